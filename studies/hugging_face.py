"""What slices cost a model of transformers: the engine on one stage against the model itself, whole and by sdpa.

python -m studies.hugging_face --slices 8 --sequence-length 2048 --hidden 512

Both take a training step of the same sequence (forward, backward, SGD), in turns in one process with one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any

from studies.attention import CLOCKS, timed
from studies.options import measure_in_ranks, study_parser
from terapipe_ds.bench.ranks import Workload, finish_rank, machine, prepare_rank
from terapipe_ds.files.atomic import write_text

_RATE = 1e-3


def _rank_main(rank: int, rendezvous: str, work: Workload, arguments: argparse.Namespace, out: str) -> None:
    prepare_rank(rank, 1, rendezvous)
    import torch

    tokens = torch.randint(arguments.vocab, (1, work.sequence_length), generator=torch.Generator().manual_seed(1))
    ours, theirs, engine = _steps(work, arguments, {"input_ids": tokens, "labels": tokens.clone()})
    losses = [[step() for step in (ours, theirs)] for _ in range(2)]  # this call also warms up
    clock, turns = CLOCKS[arguments.clock], []
    for _ in range(arguments.repeats):
        turns.append([timed(step, "cpu", clock) for step in (ours, theirs)])
    write_text(out, json.dumps({"turns": turns, "losses": losses}))
    finish_rank([engine])


def _steps(work: Workload, arguments: argparse.Namespace, batch: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return two functions that train a step and return its loss, ours first, and our engine."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    import terapipe_ds

    config = LlamaConfig(
        hidden_size=work.hidden, intermediate_size=work.hidden * 8 // 3, num_hidden_layers=work.layers,
        num_attention_heads=work.heads, num_key_value_heads=work.heads, vocab_size=arguments.vocab,
        max_position_embeddings=work.sequence_length,
    )  # fmt: skip
    module = terapipe_ds.from_config(config, num_stages=1, dtype=torch.float32)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()
    names = module.checkpoint_names()
    whole.load_state_dict({names[name]: p.detach() for name, p in module.named_parameters()}, strict=True)
    section = {"enabled": True, "schedule": "seq1f1b", "slices": arguments.slices, "verify": "off"}
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "steps_per_print": 10**9}
    optimizer = torch.optim.SGD(module.parameters(), _RATE)
    settings = {**sizes, "gradient_clipping": 0.0, "terapipe": section}
    engine = terapipe_ds.initialize(model=module, optimizer=optimizer, config=settings)[0]
    inputs = module.to_tuple(batch)
    sgd = torch.optim.SGD(whole.parameters(), _RATE)

    def ours() -> float:
        return float(engine.train_batch(iter([inputs])))

    def theirs() -> float:
        sgd.zero_grad()
        loss = whole(**batch, use_cache=False).loss
        loss.backward()
        sgd.step()
        return float(loss)

    return ours, theirs, engine


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = study_parser("hugging_face", __doc__)
    sizes = {"sequence-length": 2048, "hidden": 512, "layers": 4, "heads": 8, "vocab": 4096, "slices": 8, "repeats": 9}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--clock", default="wall", choices=sorted(CLOCKS), help="cpu: the process's CPU time")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    args = parse_arguments(arguments)
    work = Workload(1, 1, args.sequence_length, 1, args.hidden, args.layers, args.heads)
    measured = measure_in_ranks(_rank_main, work, args)
    ours, theirs = (statistics.median(times) for times in zip(*measured["turns"], strict=True))
    ratios = sorted(a / b for a, b in measured["turns"])
    row = {"sliced_s": ours, "whole_s": theirs, "ratio": statistics.median(ratios), "spread": [ratios[0], ratios[-1]]}
    if args.json:
        print(json.dumps({"machine": machine(), **row, "losses": measured["losses"]}))
        return
    print(", ".join(f"{name} {value}" for name, value in vars(args).items() if name != "json"))
    print(f"in {args.slices} slices {ours * 1e3:.1f} ms, whole {theirs * 1e3:.1f} ms a step")
    print(f"ratio {row['ratio']:.3f}, over {args.repeats} turns from {ratios[0]:.3f} to {ratios[-1]:.3f}")


if __name__ == "__main__":
    main()
