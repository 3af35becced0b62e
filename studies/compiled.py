"""What compiled layers take on one device: a step of slices with `torch.compile`, and the same layers as they are.

python -m studies.compiled --slices 8 --json docs/results/DATE-compiled.json

Both run in turns in one process: the forwards of all slices, then their backwards in reverse. The layers as they are
add weight gradients in their products, as the engine has them do.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx

from studies.attention import CLOCKS, describe_device, timed
from studies.options import study_parser
from terapipe_ds.attention import ActiveSlice, SliceStore, push_slice
from terapipe_ds.files.atomic import write_text
from terapipe_ds.models.gpt import DecoderLayer, GPTConfig
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.layers.compiled import compile_layer
from terapipe_ds.runtime.layers.weight_gradients import accumulate_in_products


class Step:
    """Run forward and backward of the layers, on slices of one micro-batch."""

    def __init__(self, layers: nn.ModuleList, inputs: Tensor, plan: SlicePlan) -> None:
        self.layers, self.inputs, self.plan = layers, inputs, plan
        self.store = SliceStore()  # as an engine keeps one from batch to batch

    def __call__(self) -> list[Tensor]:
        """Return the outputs, and the gradients of the inputs and of all parameters."""
        for parameter in self.layers.parameters():
            parameter.grad = None
        begun, gradients = [], []
        for start, stop in self.plan.spans():
            active = ActiveSlice(start, stop, self.plan.sequence_length, store=self.store)
            leaf = self.inputs[:, start:stop].clone().requires_grad_()
            with push_slice(active):
                out = leaf
                for layer in self.layers:
                    out = layer(out)
            begun.append((active, leaf, out))
        for active, leaf, out in reversed(begun):
            with push_slice(active.replace(mode="recompute")):
                out.backward(torch.full_like(out, 1e-2))
            gradients.append(leaf.grad)
        self.store.release(0, 0)
        outs = [out.detach() for _, _, out in begun]
        of_parameters = [p.grad for p in self.layers.parameters()]
        return [torch.cat(outs, 1), *(g for g in (*gradients, *of_parameters) if g is not None)]


def compiled_copy(layers: nn.ModuleList, backend: str) -> tuple[nn.ModuleList, Callable[[], int]]:
    """Return a compiled copy of the layers, and a function that returns its number of graphs."""
    copies, graphs = copy.deepcopy(layers), []

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        made = compile_fx(graph, inputs)
        graphs.append(graph)
        return made

    for index, layer in enumerate(copies):
        compile_layer(layer, f"layer {index}", counting if backend == "inductor" else backend)
    return copies, lambda: len(graphs)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return seconds, their ratio and the largest difference of the results, relative to the largest number."""
    torch.manual_seed(0)
    sizes = {"hidden_size": args.hidden, "num_heads": args.heads, "num_layers": args.layers}
    layers = nn.ModuleList(DecoderLayer(GPTConfig(**sizes), index) for index in range(args.layers))
    inputs, plan = torch.randn(1, args.sequence_length, args.hidden), SlicePlan.equal(args.sequence_length, args.slices)
    copies, graphs = compiled_copy(layers, args.backend)
    accumulate_in_products(layers, None)
    plain, compiled = Step(layers, inputs, plan), Step(copies, inputs, plan)
    begin_s = time.perf_counter()
    ours = compiled()
    first_s, theirs = time.perf_counter() - begin_s, plain()
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))
    pairs = [
        (timed(plain, "cpu", CLOCKS[args.clock]), timed(compiled, "cpu", CLOCKS[args.clock]))
        for _ in range(args.repeats)
    ]
    plain_s, compiled_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratios = [compiled_s / plain_s for plain_s, compiled_s in pairs]
    return {
        "plain_s": plain_s,
        "compiled_s": compiled_s,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "first_step_s": first_s,
        "graphs": graphs(),
        "largest_difference": error,
    }


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = study_parser("compiled", __doc__, writes="the figures")
    sizes = {"hidden": 512, "heads": 8, "layers": 4, "sequence-length": 2048, "slices": 8}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="turns (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", default="wall", choices=sorted(CLOCKS), help="cpu: the process's CPU time")
    parser.add_argument("--backend", default="inductor", help="of torch.compile (default: %(default)s)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write to the file of `--json`."""
    args = parse_arguments(arguments)
    torch.set_num_threads(args.threads)
    row, device = measure(args), describe_device("cpu")
    if args.json:
        options = {name: value for name, value in vars(args).items() if name != "json"}
        given = [each for each in sys.argv[1:] if arguments is None]
        command = " ".join(["python -m studies.compiled", *given])
        found = {"date": date.today().isoformat(), "command": command, "device": device, "machine": platform.machine()}
        write_text(Path(args.json), json.dumps({**found, "options": options, "row": row}, indent=1) + "\n")
    print(device)
    print(f"{args.slices} slices of {args.sequence_length} tokens, {args.layers} layers of {args.hidden}, fp32")
    print(f"as they are {row['plain_s'] * 1e3:.1f} ms, compiled {row['compiled_s'] * 1e3:.1f} ms: {row['ratio']:.3f}")
    print(f"first step {row['first_step_s']:.1f} s, {row['graphs']} graphs, differs by {row['largest_difference']:.1e}")


if __name__ == "__main__":
    main()
