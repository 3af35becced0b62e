"""The paper's step times, published against simulated: `python -m studies.paper`.

Li et al., "TeraPipe" (ICML 2021, arXiv 2102.07988) give step times of whole pipelines, not of single slices, so the
costs behind them are fitted (`parametric_costs`) to some of these times and others are predicted; every row says
which. "our plan" is what the planner chooses under the fitted costs, simulated, beside the time published for the
paper's own plan. For the longer sequences the paper's plans are not known, and this is the only prediction there is.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from studies.options import study_parser
from studies.parametric_costs import ParametricCosts, StepTotal
from studies.slice_program import solve
from terapipe_ds.costs.devices import device_card
from terapipe_ds.files.atomic import write_text
from terapipe_ds.plan import SlicePlan

FILE = Path(__file__).with_name("published.json")
GRANULARITY_TOKENS = 8  # all published plans are multiples of it
NOTES = {
    9: "Five parameters fitted to the seven totals of equal slices (figure 6b); no point of the dynamic program is in "
    "the fit, but its time was known when the form of the cost was settled: see docs/paper.md.",
    8: "Five parameters, four totals (figure 6a), and still not met, because they are not smooth: 8 equal slices take "
    "longer than both 4 and 16. No smooth cost of slices explains that.",
    5: "Fitted to the four unsliced times and the one time of a published plan (figure 7). None of these five has a "
    "small slice, so what small slices cost is not known here, and the long sequences, which are cut in many, come out "
    "too fast.",
}


@dataclass(frozen=True)
class PublishedTime:
    """Hold one published time and ours. `kind`: "fitted" if the costs saw this time of this plan, "predicted" if
    not, "planned" if the plan is ours."""

    setting: int
    sequence_length: int
    plan: str
    published_s: float
    simulated_s: float
    kind: str
    lengths: tuple[int, ...]

    @property
    def error(self) -> float:
        """Return the error relative to the published time."""
        return self.simulated_s / self.published_s - 1


@dataclass(frozen=True)
class Setting:
    """Hold one row of the paper's table 1 with the published figures about it."""

    setting: int
    num_stages: int
    heads: float  # of all layers of a stage, on one tensor-parallel rank
    head_dim: int
    uniform: tuple[StepTotal, ...]
    scheme: StepTotal
    longer: tuple[tuple[int, int, float, float], ...]  # sequence length, micro-batches, unsliced s, sliced s

    def total(self, plan: SlicePlan, num_micro_batches: int, latency_s: float) -> StepTotal:
        return StepTotal(plan, self.num_stages, num_micro_batches, latency_s)


def parse_scheme(text: str) -> tuple[SlicePlan, int]:
    """Read the authors' notation `[(rows, [lengths] * n + ...)] * m`: a micro-batch's plan, and how many there are.

    Raises:
        ValueError: rows other than 1, or another notation.
    """
    notation = re.fullmatch(r"\[\(1, (.+)\)\] \* (\d+)", text)
    if notation is None:
        raise ValueError(f"scheme {text!r}: expected [(1, lengths)] * micro-batches")
    lengths: list[int] = []
    for term in notation[1].split(" + "):
        listed, _, times = term.partition(" * ")
        lengths += ast.literal_eval(listed) * int(times or 1)
    return SlicePlan(tuple(lengths)), int(notation[2])


def read_setting(setting: int, document: dict[str, Any] | None = None) -> Setting:
    """Read the facts in `published.json` about a setting of the paper."""
    document = document or json.loads(FILE.read_text(encoding="utf-8"))
    (shape,) = (row for row in document["table1_settings"] if row["setting"] == setting)
    (main,) = (row for row in document["main_results"] if row["setting"] == setting)
    stages, batch, length = shape["pipe"], shape["batch_per_replica"], shape["seq_len"]
    plan, micro_batches = parse_scheme(main["scheme_w"])
    uniform = tuple(
        StepTotal(SlicePlan.equal(length, row["slices_per_sequence"]), stages, batch, row["latency_s"])
        for row in document["ablation_uniform_vs_dp"]
        if row["setting"] == setting and row["slices_per_sequence"] != "DP"
    )
    longer = tuple(
        (row["seq_len"], row["batch"], row["latency_wo_s"], row["latency_w_s"])
        for row in document["longer_sequences"]
        if row["setting"] == setting
    )
    heads = shape["layers_per_stage"] * shape["heads"] / shape["op"]
    scheme = StepTotal(plan, stages, micro_batches, main["latency_w_s"])
    return Setting(setting, stages, heads, shape["head_dim"], uniform, scheme, longer)


def unfused_pair_s(heads: float, head_dim: int) -> float:
    """Return the seconds of one (query, key) pair, forward and backward, in fp16 on a V100 without a fused kernel.

    Per head 4 D FLOPs forward, and 16 bytes: the score is written (2), scaled, masked and normalised (4 each), and
    read (2). The backward does twice that.
    """
    card = device_card("v100-16gb")
    peak = card.peak_flops["fp16"]
    assert peak is not None
    flops_s = 4 * head_dim / (peak * card.matmul_efficiency)
    bytes_s = 16 / (card.memory_bandwidth_bytes_per_s * card.bandwidth_efficiency)
    return 3 * heads * (flops_s + bytes_s)


def reproduce(setting: int) -> tuple[ParametricCosts, list[PublishedTime]]:
    """Fit the costs of a setting and set every published time against the simulated one."""
    given = read_setting(setting)
    if given.longer:
        unsliced = [given.total(SlicePlan((length,)), m, wo_s) for length, m, wo_s, _ in given.longer]
        fitted, predicted = [*unsliced, given.scheme], []
        ours = [(length, m, w_s) for length, m, _, w_s in given.longer]
    else:
        fitted, predicted = list(given.uniform), [given.scheme]
        ours = [(given.scheme.plan.sequence_length, given.scheme.num_micro_batches, given.scheme.latency_s)]
    costs = ParametricCosts.fit(fitted, per_pair_s=unfused_pair_s(given.heads, given.head_dim))
    rows = [_row(given, costs, total, "fitted") for total in fitted]
    rows += [_row(given, costs, total, "predicted") for total in predicted]
    for length, micro_batches, latency_s in ours:
        solution = solve(costs, length, given.num_stages, micro_batches, GRANULARITY_TOKENS)
        total = given.total(solution.plan, micro_batches, latency_s)
        rows.append(_row(given, costs, total, "planned", name="our plan"))
    return costs, rows


def _row(given: Setting, costs: ParametricCosts, total: StepTotal, kind: str, name: str = "") -> PublishedTime:
    plan = total.plan
    count = f"{plan.num_slices} slices" if plan.num_slices > 1 else "unsliced"
    name = name or ("published plan" if total is given.scheme else "equal" if plan.num_slices > 1 else "")
    simulated_s = costs.total_s(plan, total.num_stages, total.num_micro_batches)
    return PublishedTime(
        given.setting,
        plan.sequence_length,
        f"{name}, {count}".removeprefix(", "),
        total.latency_s,
        simulated_s,
        kind,
        plan.lengths,
    )


def table(rows: Iterable[PublishedTime]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| setting | tokens | plan | published s | simulated s | error | |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        times = f"{row.published_s:.3f} | {row.simulated_s:.3f} | {row.error:+.1%}"
        lines.append(f"| {row.setting} | {row.sequence_length} | {row.plan} | {times} | {row.kind} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = study_parser("paper", __doc__, writes="the rows, with the lengths of every plan,")
    parser.add_argument("--setting", type=int, choices=sorted(NOTES), help="one setting of table 1; default: all")
    options = parser.parse_args(arguments)
    written = []
    for setting in [options.setting] if options.setting else [9, 8, 5]:
        costs, rows = reproduce(setting)
        print(f"{table(rows)}\n\nSetting {setting}: {NOTES[setting]}")
        print(f"Costs: {', '.join(f'{name} {value:.3g}' for name, value in asdict(costs).items())}\n", flush=True)
        written += [asdict(row) | {"error": row.error} for row in rows]
    if options.json:
        write_text(options.json, json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
