"""Measure what slicing costs in attention: sliced against unsliced, by one kernel."""

import time
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from studies import gpu
from studies.attention import Shape, Sides, measure, timed
from terapipe_ds.bench.drivers.base import one_attention
from tests.gpu_checks.checks import Check, Settings, not_run

MOST_RATIO, FROM_TOKENS = 1.05, 1024
"""The largest ratio that is allowed, for slices of at least so many tokens."""


def checks(settings: Settings) -> Iterator[Check]:
    """Yield the ratios for all shapes of `studies.gpu attention`, measured in turns with the unsliced call."""
    heads, lengths, slices, dtype = gpu.HEADS, gpu.ATTENTION_LENGTHS, gpu.ATTENTION_SLICES, "bfloat16"
    if settings.dry_run:
        heads, lengths, slices, dtype = ((4, 2, 16),), (256,), (64, 128), "float32"
    with one_attention(settings.device, getattr(torch, dtype), heads[0][2]) as kernel:
        yield Check("the kernel of both sides", kernel)
        for num_heads, kv_heads, head_dim in heads:
            for length in lengths:
                for tokens in slices:
                    name = f"{num_heads}/{kv_heads} heads of {head_dim}, {length} in slices of {tokens}, over unsliced"
                    if settings.is_late(10.0):
                        yield not_run(name, "the part's time is over")
                        continue
                    shape = Shape(1, num_heads, kv_heads, head_dim, length, dtype)
                    ratio = measure(shape, length // tokens, 2 if settings.dry_run else 7, settings.device).ratio
                    small = tokens < FROM_TOKENS
                    yield Check(name, ratio) if small else settings.timed(name, ratio, MOST_RATIO)
                yield from _by_torchs_choice(settings, Shape(1, num_heads, kv_heads, head_dim, length, dtype))


def _by_torchs_choice(settings: Settings, shape: Shape) -> Iterator[Check]:
    """Yield the time of whole sequences by the kernel that torch would choose, over that by ours."""
    if settings.device == "cpu":
        return
    sides = Sides(shape, 1, settings.device)
    every = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    pairs = []
    for _ in range(9):
        ours_s = timed(sides.run_unsliced, settings.device, time.perf_counter)
        with sdpa_kernel(every):
            pairs.append(timed(sides.run_unsliced, settings.device, time.perf_counter) / ours_s)
    name = f"{shape.heads}/{shape.kv_heads} heads of {shape.head_dim}, {shape.sequence_length} whole, torch's choice"
    yield Check(f"{name} over this kernel", sorted(pairs[2:])[3])
