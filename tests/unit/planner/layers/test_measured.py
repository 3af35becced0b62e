"""Layers from profiles: sums by hand of what was measured, and profiles that do not belong together."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from terapipe_ds.costs.devices import device_card
from terapipe_ds.costs.profile import (
    CostSample,
    LayerProfile,
    LayerProfiles,
    LinkSample,
    Overhead,
    PartProfile,
    Profile,
    ProfileKey,
)
from terapipe_ds.planner import PlannerError
from terapipe_ds.planner.layers.measured import MeasuredLayers, measured_cluster
from terapipe_ds.planner.layers.measured_parts import MeasuredParts
from terapipe_ds.planner.layers.part_costs import PartCosts
from terapipe_ds.planner.layers.parts import Setting, Span
from terapipe_ds.planner.recompute import recomputable_parts
from terapipe_ds.planner.recompute.frontier import Subset
from terapipe_ds.planner.strategy import Cluster, price_strategy, rank_strategies
from terapipe_ds.planner.strategy.candidate import Candidate
from terapipe_ds.planner.strategy.priced import Priced
from terapipe_ds.planner.strategy.shapes import Shape
from terapipe_ds.strategy import Grid

LENGTH = 256
FORWARD = ((0.1, 0.5, 0.4), (0.25, 0.35, 0.4))  # shares of the layers of two parts
BACKWARD = ((0.2, 0.4, 0.4), (0.3, 0.3, 0.4))
PARAMETERS = ((100, 300, 300), (300, 300, 200))
WHOLE_S = ((0.02, 0.05), (0.03, 0.07))  # of a part, forward and backward of a whole sequence
CLUSTER = Cluster("cpu", 1, 2, within_bytes_per_s=1e6, within_latency_s=1e-3)
RATE = CLUSTER.card.memory_bandwidth_bytes_per_s * CLUSTER.card.bandwidth_efficiency
ONE = Setting(tensor=1, micro_batch=1)


KEPT = ((60.0, 30.0, 10.0), (20.0, 70.0, 10.0))  # bytes per token that a slice keeps of each layer


def samples_of(forward_s: float, backward_s: float) -> tuple[CostSample, ...]:
    points = ((LENGTH, 0, 1.0), (64, 0, 0.3), (64, 192, 0.4))
    return tuple(CostSample(tokens, prefix, x * forward_s, x * backward_s) for tokens, prefix, x in points)


def part(part_id: int, times: float = 1.0, **more: Any) -> PartProfile:
    return PartProfile(part_id, samples_of(*(times * seconds for seconds in WHOLE_S[part_id])), **more)


def layer(part_id: int, index: int, times: float = 1.0, tensor: int = 1, memory: bool = True) -> LayerProfile:
    """One of the layers, which takes a share of the seconds above."""
    shares = zip((FORWARD, BACKWARD), WHOLE_S[part_id], strict=True)
    whole = [times * share[part_id][index] * seconds for share, seconds in shares]
    count = PARAMETERS[part_id][index] // tensor
    known: dict[str, Any] = {
        "static_bytes": 12 * count, "gradient_bytes": 4 * count, "slice_bytes_per_token": KEPT[part_id][index],
        "store_bytes_per_token": 40.0, "store_grad_bytes_per_token": 20.0, "working_bytes": 500 + part_id,
        "working_bytes_per_token": 30.0 + part_id, "whole_bytes_per_token": KEPT[part_id][index] / 2,
        "joined_bytes_per_token": 5.0,
    }  # fmt: skip
    return LayerProfile(samples_of(*whole), count, count, 16.0, known if memory else None)


def layers_of(kinds: Any, bounds: tuple[int, ...] = (0, 3, 6)) -> LayerProfiles:
    return LayerProfiles(tuple(kinds), tuple(range(6)), bounds)


def profile(
    times: float = 1.0, parts: dict[str, Any] | None = None, links: bool = True, layers: bool = True,
    memory: bool = True, divided: int | None = None, **key: Any,
) -> Profile:  # fmt: skip
    known: dict[str, Any] = {
        "model_fingerprint": "a", "model": "1 Embedding, 4 Layer, 1 Head", "device": "my CPU", "dtype": "float32",
        "micro_batch": 1, "tensor_parallel": 1, "num_stages": 2, "activation_checkpointing": False,
        "sequence_length": LENGTH, "attention_backend": "blocks", "layers_fingerprint": "b",
    }  # fmt: skip
    made = ProfileKey(**known | key)
    both = tuple(part(i, times, **(parts or {})) for i in range(2))
    sent = [LinkSample(n, 2e-3 + 8e-6 * n, i, num_bytes=16 * n) for i in range(2) for n in (64, 256)]
    tensor = made.tensor_parallel if divided is None else divided
    kinds = [layer(i, index, times, tensor, memory) for i in range(2) for index in range(3)]
    return Profile(made, both, tuple(sent) if links else (), 2, layers_of(kinds) if layers else None)


def by_hand(shares: Any, direction: int, start: int, stop: int) -> float:
    """Seconds of a whole sequence in the layers from `start` to `stop`."""
    layers = [share * WHOLE_S[part_id][direction] for part_id in range(2) for share in shares[part_id]]
    return sum(layers[start:stop])


@pytest.mark.parametrize("span", list(itertools.combinations(range(7), 2)))
def test_any_part_takes_the_sum_of_its_layers(span: tuple[int, int]) -> None:
    layers = MeasuredLayers([profile()], CLUSTER, LENGTH)
    for again in (False, True):
        costs = PartCosts(layers.layer_costs(ONE, again)[slice(*span)])
        forward, backward = by_hand(FORWARD, 0, *span), by_hand(BACKWARD, 1, *span)
        assert costs.forward_s(LENGTH, 0) == pytest.approx(forward, rel=1e-12)
        assert costs.backward_s(LENGTH, 0) == pytest.approx(backward + again * forward, rel=1e-12)
        assert costs.forward_s(64, 192) == pytest.approx(0.4 * forward, rel=1e-9)  # measured with a prefix


@pytest.mark.parametrize(("schedule", "parts"), [("1f1b", 1), ("interleaved", 2)])
@pytest.mark.parametrize("recompute", ["off", "full"])
def test_every_part_takes_the_same_beyond_its_layers(schedule: str, parts: int, recompute: str) -> None:
    """One micro-batch in one slice: 6 ms more per F and 9 ms more per B of every part, however many layers it has."""
    beyond = {"overheads": (Overhead(64, 6e-3, 9e-3), Overhead(LENGTH, 6e-3, 9e-3))}
    question: Any = {"global_batch_size": 1, "sequence_length": LENGTH, "stages": 2, "schedule": schedule}
    planned = rank_strategies(profile(parts={"step_s": 0.0001}), CLUSTER, **question)[0]
    strategy = planned.model_copy(update={"recompute": recompute})
    plain, more = (price_strategy(strategy, profile(parts={"step_s": 1e-4} | p), CLUSTER) for p in ({}, beyond))
    assert more.predicted_s - plain.predicted_s == pytest.approx(2 * parts * 15e-3, rel=1e-9)


def test_estimates_of_cuts_have_the_time_of_each_part_too() -> None:
    beyond = {"overheads": (Overhead(64, 6e-3, 9e-3), Overhead(LENGTH, 6e-3, 9e-3))}
    plain, more = (
        Priced(
            MeasuredLayers([profile(parts=parts)], CLUSTER, LENGTH), CLUSTER, LENGTH, Candidate(Grid(2, 1, 1), 1, 1, 0)
        )
        for parts in (None, beyond)
    )
    numbers = []
    for priced in (plain, more):
        (cut_s, cut), *_ = priced.estimates(1, math.inf)
        numbers.append((cut_s, priced._cut_s(cut, Shape("1f1b"), 1, math.inf), priced.even_s(Shape("1f1b"), 1)))
    for without, beside in zip(*numbers, strict=True):
        assert beside - without == pytest.approx(2 * 15e-3, rel=1e-9)


def test_memory_of_a_cut_of_recompute_and_of_zero() -> None:
    layers = MeasuredLayers([profile()], CLUSTER, LENGTH)
    counts = [count for of_part in PARAMETERS for count in of_part]
    (memory,) = layers.memory_of_spans(ONE, [Span(1, 5)])
    assert (memory.static_bytes, memory.gradient_bytes) == (12 * sum(counts[1:5]), 4 * sum(counts[1:5]))
    assert memory.slice_bytes_per_token == pytest.approx(30 + 10 + 20 + 70)
    assert (memory.store_bytes_per_token, memory.store_grad_bytes_per_token) == (160, 80)
    assert (memory.working_bytes, memory.working_bytes_per_token) == (501, 31)
    (again,) = layers.memory_of_spans(ONE, [Span(1, 5, recompute=True)])
    assert again.slice_bytes_per_token == 4 * 16  # the input of each layer
    assert again.working_bytes_per_token == pytest.approx(31 + 70)  # and all that one keeps, while it runs
    assert (again.whole_bytes_per_token, again.working_whole_bytes_per_token) == pytest.approx((0, 35))
    assert again.store_bytes_per_token == memory.store_bytes_per_token
    # a stage with layers that run again joins no products of weight gradients
    assert (memory.joined_bytes_per_token, again.joined_bytes_per_token) == (20, 0)
    part, _ = recomputable_parts(MeasuredParts.of_profile(profile()), [0, 3, 6])
    some = [part.with_subset(Subset(0, 0, 0, layers), is_whole=False) for layers in ((), (1,))]
    assert [one.joined_bytes_per_token for one in some] == [15, 0]
    divided = Setting(1, 1, data=2, zero_stage=1)
    (zero,) = layers.memory_of_spans(divided, [Span(1, 5)])
    # fp32 parameters and gradients whole, a copy of the parameters and two states by halves
    assert (zero.static_bytes, zero.gradient_bytes) == ((4 + 4 + 12 / 2) * sum(counts[1:5]), 0)
    half = MeasuredLayers([profile(dtype="bfloat16")], CLUSTER, LENGTH)
    sums_in_bf16, sums_in_fp32 = (half.memory_of_spans(setting, [Span(1, 5)])[0] for setting in (ONE, divided))
    assert (sums_in_bf16.step_bytes, sums_in_fp32.step_bytes) == (4 * sum(counts[1:5]), 2 * sum(counts[1:5]))
    # a profile of two replicas, which divided the states of bf16, and one of ZeRO-1
    two = MeasuredLayers([dataclasses.replace(profile(dtype="bfloat16"), state_ranks=2)], CLUSTER, LENGTH)
    own, of_two = (one.memory_of_spans(divided, [Span(1, 5)])[0].static_bytes for one in (half, two))
    lasting = (2 + 4) * sum(counts[1:5])  # parameters and sums
    assert of_two - lasting == 2 * (own - lasting) > 0
    with pytest.raises(PlannerError, match="divided the optimizer's states over 2 ranks: measure with ZeRO 0"):
        MeasuredLayers([dataclasses.replace(profile(), state_ranks=2)], CLUSTER, LENGTH)
    # a bucket of the reduction, and the share of the gradients
    assert (memory.step_bytes, zero.step_bytes) == (4 * sum(counts[1:5]), 4 / 2 * sum(counts[1:5]))


def test_what_is_summed_and_stepped_is_what_was_measured() -> None:
    counts = [float(count) for of_part in PARAMETERS for count in of_part]
    summed, moved = MeasuredLayers([profile()], CLUSTER, LENGTH).end_bytes(ONE)
    assert (summed.tolist(), moved.tolist()) == ([4 * count for count in counts], [28 * count for count in counts])
    summed, moved = MeasuredLayers([profile(parts={"step_s": 0.01})], CLUSTER, LENGTH).end_bytes(Setting(1, 1, 2, 1))
    passes = (6 + 16 / 2) / (6 + 7)  # ZeRO-1 moves more of half of the parameters
    assert (moved[:3] / RATE).tolist() == pytest.approx([passes * 0.01 * count / 700 for count in PARAMETERS[0]])
    assert summed.sum() == pytest.approx(6 * 1500)  # and gathers them, which is half a sum
    half = MeasuredLayers([profile(dtype="bfloat16")], CLUSTER, LENGTH).end_bytes(Setting(1, 1, 2))
    assert (half[0].sum(), half[1].sum()) == (3 * sum(counts), 28 * sum(counts) / 2)
    # a step of bf16 that was measured on two replicas, with half of the states each
    two = dataclasses.replace(profile(dtype="bfloat16", parts={"step_s": 0.01}), state_ranks=2)
    seconds = [MeasuredLayers([two], CLUSTER, LENGTH).end_bytes(Setting(1, 1, n))[1].sum() / RATE for n in (1, 2, 4)]
    assert seconds == pytest.approx([2 * 2 * 0.01, 2 * 0.01, 0.01])


def test_a_strategy_takes_the_best_cut_by_hand() -> None:
    """One micro-batch in one slice through two stages: all layers, two messages, and the slower step."""
    question: Any = {"global_batch_size": 1, "sequence_length": LENGTH, "stages": 2, "schedule": "1f1b"}
    (strategy,) = rank_strategies(profile(parts={"step_s": 0.05}), CLUSTER, **question)
    layers_s = sum(map(sum, WHOLE_S))
    send_s = 2 * (1e-3 + 16 * LENGTH / 1e6)
    steps = [0.05 * count / sum(of_part) for of_part in PARAMETERS for count in of_part]
    ends = []
    for cut in range(1, 6):
        back_s = by_hand(FORWARD, 0, 0, cut) + by_hand(BACKWARD, 1, 0, cut)
        last_s = layers_s - back_s + by_hand(FORWARD, 0, 0, cut) + send_s / 2  # when the last stage has done
        ends.append(max(layers_s + send_s + sum(steps[:cut]), last_s + sum(steps[cut:])))
    assert strategy.predicted_s == pytest.approx(min(ends), rel=1e-9)
    assert strategy.partition[1] == 1 + ends.index(min(ends))
    assert strategy.dtype == "float32"
    assert strategy.model == "1 Embedding, 4 Layer, 1 Head"


def test_each_number_of_tensor_ranks_and_rows_has_its_profile(tmp_path: Path) -> None:
    two, four = profile(0.6, tensor_parallel=2, links=False), profile(3.9, micro_batch=4)
    two.save(tmp_path / "two.json")
    question: Any = {"global_batch_size": 4, "sequence_length": LENGTH, "schedule": "1f1b"}
    profiles = [profile(), tmp_path / "two.json", four]
    degrees = ("stages", "data_parallel", "tensor_parallel")
    best = {name: rank_strategies(profiles, CLUSTER, **question, **{name: 2})[0] for name in degrees}
    whole_s, step_s = sum(map(sum, WHOLE_S)), 28 * 1500 / RATE
    assert best["tensor_parallel"].predicted_s == pytest.approx(4 * 0.6 * whole_s + step_s / 2, rel=1e-9)
    assert best["data_parallel"].micro_batch_size == 1  # four rows leave none for a second replica
    sum_s = 2 * (4 * 1500 / 2 / 1e6 + 1e-3)
    assert best["data_parallel"].zero_stage == 0
    assert best["data_parallel"].predicted_s == pytest.approx(2 * whole_s + sum_s + step_s, rel=1e-9)
    assert best["stages"].micro_batch_size in (1, 4)
    profile(tensor_parallel=2).save(tmp_path / "two.json")
    path_only = rank_strategies(str(tmp_path / "two.json"), Cluster("cpu", 1, 2), **question | {"tensor_parallel": 2})
    assert [s.grid["model"] for s in path_only] == [2]


def test_what_was_not_measured_is_refused_with_what_was() -> None:
    question: Any = {"global_batch_size": 4, "sequence_length": LENGTH}
    with pytest.raises(PlannerError, match=r"tensor_parallel = 2 was not measured, but 1: give a profile of it"):
        rank_strategies(profile(), CLUSTER, **question, tensor_parallel=2)
    with pytest.raises(PlannerError, match=r"micro-batches of 1 were not measured .*, but 4.*global_batch_size = 4"):
        rank_strategies(profile(micro_batch=4), CLUSTER, **question | {"global_batch_size": 5})
    # a strategy that another profile priced, and more devices that would do: they have the measured micro-batches too
    strategy = rank_strategies(profile(), CLUSTER, **question, data_parallel=2)[0]
    for changes in ({"micro_batch_size": 2}, {"dims": [1, 1, 2]}):
        with pytest.raises(PlannerError, match=r"no price for the strategy \(.* not measured.*, but 1.*: give another"):
            price_strategy(strategy.model_copy(update=changes), profile(), CLUSTER)
    with pytest.raises(PlannerError, match=r"or more devices; from about \d+ of these devices on it can fit"):
        rank_strategies(profile(micro_batch=3), CLUSTER, **question | {"global_batch_size": 6}, memory_limit_gb=1e-5)
    with pytest.raises(PlannerError, match="sequence_length = 512: the profile is of 256 tokens"):
        rank_strategies(profile(), CLUSTER, **question | {"sequence_length": 512})
    with pytest.raises(PlannerError, match="dtype = 'bf16': the profile is of float32"):
        rank_strategies(profile(), CLUSTER, **question, dtype="bf16")


@pytest.mark.parametrize(("others", "message"), [
    ([], "no profile: give at least one"),
    ([profile(), profile()], "two profiles have 1 tensor ranks and micro-batches of 1: give one"),
    ([profile(), profile(device="your CPU", micro_batch=2)], "different device: my CPU and your CPU"),
    ([profile(), profile(sequence_length=512, micro_batch=2)], "different sequence_length: 256 and 512"),
    ([profile(), profile(layers_fingerprint="c", micro_batch=2)], "profiles of different models"),
    ([profile(), profile(tensor_parallel=4, divided=8)], "different models"),
    ([profile(activation_checkpointing=True)], "activation_checkpoint_interval = 0"),
    ([profile(dtype="float64")], "profiles are of float64"),
    ([profile(num_stages=3)], "has 2 of 3 parts: measure all of them"),
    ([profile(layers=False)], "its layers were not timed one by one; measure with terapipe.planner.cache_dir"),
    ([profile(memory=False)], "the memory of its layers was not measured; measure in a running job"),
])  # fmt: skip
def test_profiles_that_do_not_belong_together_are_refused(others: list[Profile], message: str) -> None:
    with pytest.raises(PlannerError, match=message):
        rank_strategies(others, CLUSTER, global_batch_size=4, sequence_length=LENGTH)


def test_a_cluster_has_the_link_that_was_measured() -> None:
    cluster = measured_cluster(profile(), 1, 2, dataclasses.replace(device_card("cpu"), memory_bytes=10**9))
    assert (cluster.within.latency_s, cluster.within.bandwidth_bytes_per_s) == pytest.approx((2e-3, 2e6))
    assert (cluster.card.title, cluster.card.memory_bytes) == ("my CPU", 10**9)
    assert measured_cluster(profile(), 2, 2, between_bytes_per_s=5e5).between.bandwidth_bytes_per_s == 5e5
    with pytest.raises(PlannerError, match="the profile has no link"):
        measured_cluster(profile(links=False), 1, 2)
    alone = measured_cluster(profile(links=False), 1, 2, within_bytes_per_s=5e5)
    assert alone.within.bandwidth_bytes_per_s == 5e5
