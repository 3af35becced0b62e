"""Compare losses without logits with plain logits: processor time and bytes of the output matrix and its loss.

`python -m studies.losses` runs all forwards of the slices of a sequence and then all backwards, as the last stage does
with one micro-batch, and repeats this for each way in turns. Times are medians, relative to plain logits. With
`--layers N` the whole last stage runs: N decoder layers, a norm, the output matrix and the loss.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from terapipe_ds.attention import ActiveSlice, SliceStore, push_slice
from terapipe_ds.costs.model_sizes import loss_chunk_tokens
from terapipe_ds.losses import Head, LinearCrossEntropy
from terapipe_ds.models.gpt import GPTConfig, gpt_layers, gpt_loss
from terapipe_ds.runtime.profiling.memory_peak import MemoryPeak

Loss = Callable[[Tensor, nn.Linear, Tensor], Tensor]


def plain(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    return gpt_loss(head(hidden), labels)


def fused(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    def add(weight: Tensor, rows: Tensor, inputs: Tensor) -> Tensor | None:  # as the engine's linear layers do
        if weight.grad is None:
            return rows.t() @ inputs
        weight.grad.addmm_(rows.t(), inputs)
        return None

    return LinearCrossEntropy().of_hidden(hidden, labels, Head(head.weight), add=add)


def recomputed(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """Compute the logits of each chunk in the forward, and again in the backward."""
    most = loss_chunk_tokens(head.out_features, on_cpu=hidden.is_cpu)
    pieces = zip(hidden.split(most, dim=1), labels.split(most, dim=1), strict=True)
    share = [checkpoint(plain, h, head, y, use_reentrant=False) * (y.numel() / labels.numel()) for h, y in pieces]
    return torch.stack(share).sum()


def of_torch(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()  # since 2.13
    return F.linear_cross_entropy(hidden.flatten(0, 1), head.weight, labels.flatten(), options=options)


def step(loss: Loss, layers: nn.Module, head: nn.Linear, slices: list[Tensor], labels: list[Tensor]) -> None:
    """Run all forwards, and then all backwards in reverse."""
    head.zero_grad()
    layers.zero_grad()
    store, losses, start, length = SliceStore(), [], 0, sum(x.shape[1] for x in slices)
    for slice_id, (x, y) in enumerate(zip(slices, labels, strict=True)):
        active = ActiveSlice(start, start + x.shape[1], length, slice_id=slice_id, store=store)
        with push_slice(active):
            losses.append((loss(layers(x.detach().requires_grad_()), head, y), active))
        start = active.stop
    while losses:
        of_slice, active = losses.pop()
        with push_slice(active):
            of_slice.backward()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--slices", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=0, help="decoder layers before the output matrix")
    parser.add_argument("--ways", type=int, default=4, help="how many, from plain logits on (default: %(default)s)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)  # processor time of several threads counts their waits
    head = nn.Linear(arguments.hidden, arguments.vocabulary, bias=False)
    of_stage = gpt_layers(GPTConfig(hidden_size=arguments.hidden, num_layers=max(1, arguments.layers)))[1:-1]
    layers = nn.Sequential(*(spec.build() for spec in of_stage if arguments.layers))
    slices = list(torch.randn(1, arguments.tokens, arguments.hidden).chunk(arguments.slices, dim=1))
    labels = list(torch.randint(arguments.vocabulary, (1, arguments.tokens)).chunk(arguments.slices, dim=1))
    ways: dict[str, Loss] = {"plain logits": plain, "LinearCrossEntropy": fused, "recomputed": recomputed}
    if hasattr(F, "linear_cross_entropy"):
        ways["torch"] = of_torch
    ways = dict(list(ways.items())[: arguments.ways])
    # bytes first: they warm up as well
    peaks = {}
    for name, loss in ways.items():
        with MemoryPeak() as peak:
            step(loss, layers, head, slices, labels)
        peaks[name] = peak.grown_bytes / arguments.tokens
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, loss in ways.items():
            begin_s = time.process_time()
            step(loss, layers, head, slices, labels)
            times[name].append(time.process_time() - begin_s)
    least = statistics.median(times["plain logits"])
    print(f"{'':20}{'time':>8}{'bytes per token':>20}")
    for name in ways:
        print(f"{name:20}{statistics.median(times[name]) / least:8.2f}{peaks[name]:20,.0f}")


if __name__ == "__main__":
    main()
