"""Plan longer and longer sequences: seconds, bytes and options of the best strategy found for each length.

`python -m studies.ladder` prints the tables of docs/long_context.md. All numbers are predictions.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from studies.options import study_parser
from terapipe_ds.planner.errors import MemoryLimitError
from terapipe_ds.planner.strategy import Cluster, plan_strategy

EXAMPLES = """  python -m studies.ladder
  python -m studies.ladder --model qwen3-8b --nodes 1 --memory-limit-gb 81.6"""
LENGTHS = tuple(1024 * 2**power for power in range(5, 11))


@dataclass(frozen=True)
class Row:
    """Hold one length: the strategy as JSON has it, or why there is none; and the processor time of the search."""

    tokens: int
    strategy: dict[str, Any] | None
    problem: str
    search_s: float


def row(model: str, device: str, nodes: int, tokens: int, limit_gb: float | None) -> Row:
    """Return the best strategy for steps of one sequence of `tokens` tokens."""
    begin_s = time.process_time()
    answer, problem = None, ""
    try:
        strategy = plan_strategy(
            model, Cluster(device, nodes, 8), global_batch_size=1, sequence_length=tokens, memory_limit_gb=limit_gb
        )
        answer = strategy.model_dump(mode="json") | {"grid": strategy.grid}
    except MemoryLimitError as error:
        problem = str(error)
    return Row(tokens, answer, problem, time.process_time() - begin_s)


def shown(one: Row) -> str:
    """Return a row of the table."""
    if one.strategy is None:
        return f"| {one.tokens:,} | does not fit |"
    found, grid = one.strategy, one.strategy["grid"]
    again = found["recompute"] if isinstance(found["recompute"], str) else f"{len(found['recompute'])} stages"
    again += ", attention kept" * found["keep_attention"]
    offloaded = [name for name in ("activations", "optimizer") if found[f"offload_{name}"]]
    degrees = f"{grid['pipe']} x {grid['data']} x {grid['model']} x {grid.get('sequence', 1)}"
    parts = f", {found['chunks_per_stage']} parts" if found["chunks_per_stage"] > 1 else ""
    cells = (
        f"{one.tokens:,}",
        f"{found['predicted_s']:.4g}",
        f"{max(found['memory_bytes']) / 2**30:.1f}",
        f"{found['host_memory_bytes'] / 2**30:,.0f}",
        degrees,
        found["schedule"] + parts,
        str(len(found["slices"])),
        again,
        ", ".join(offloaded) or "-",
        f"{found['mfu']:.0%}",
    )
    return f"| {' | '.join(cells)} |"


def main(argv: list[str] | None = None) -> None:
    """Print the table of one model, or write it as JSON."""
    parser = study_parser("ladder", __doc__, examples=EXAMPLES)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--device", default="h100")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--memory-limit-gb", type=float)
    words = parser.parse_args(argv)
    rows = []
    for tokens in LENGTHS:
        rows.append(row(words.model, words.device, words.nodes, tokens, words.memory_limit_gb))
        if not words.json:
            print(shown(rows[-1]), flush=True)
    if words.json:
        print(json.dumps([vars(one) for one in rows], indent=1))
    else:
        print(f"\nsearches, s of processor time: {', '.join(f'{one.search_s:.0f}' for one in rows)}")


if __name__ == "__main__":
    main()
