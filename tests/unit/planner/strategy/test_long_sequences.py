"""Test strategies for long sequences: sequence ranks, offload, recomputation, bytes by kind, and the acceptance."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.config.strategy_file import contradictions, section_of
from terapipe_ds.costs.analytic import AnalyticCosts, analytic_costs
from terapipe_ds.costs.devices import device_card
from terapipe_ds.costs.model_sizes import loss_chunk_tokens, model_size
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.errors import MemoryLimitError, PlannerError
from terapipe_ds.planner.layers.counted import CountedLayers
from terapipe_ds.planner.layers.parts import Again, Setting, Span
from terapipe_ds.planner.memory import MemoryModel
from terapipe_ds.planner.strategy import (
    Cluster,
    LayerChain,
    Strategy,
    plan_strategy,
    price_strategy,
    rank_strategies,
    simulate_strategy,
    size_of,
)
from terapipe_ds.planner.strategy.candidate import Candidate, Levers, Score, replay_of
from terapipe_ds.planner.strategy.priced import Priced
from terapipe_ds.planner.strategy.question import layers_of
from terapipe_ds.planner.strategy.rates import equal_plan
from terapipe_ds.planner.strategy.search import Search
from terapipe_ds.planner.strategy.shapes import Shape
from terapipe_ds.planner.strategy.space import Choices, Space
from terapipe_ds.schedule import build
from terapipe_ds.simulator.offload import offloaded_until
from terapipe_ds.simulator.peak_memory import host_bytes
from terapipe_ds.strategy import Grid

LONG: dict[str, Any] = {"global_batch_size": 1, "sequence_length": 65536}
CHAIN = LayerChain([1.0] * 4, [2.0] * 4, [1.0] * 4, [1.0] * 4, [1.0] * 4)
SHORTER = LONG | {"sequence_length": 16384}


def ranks(count: int, **changes: Any) -> AnalyticCosts:
    (whole,) = analytic_costs("llama-3-8b", "h100", num_stages=1)
    return dataclasses.replace(whole, sequence_parallel=count, **changes)


def test_sequence_ranks_share_the_work_and_exchange_tokens_for_heads() -> None:
    """With free links four ranks take a quarter of products and attention; the all-to-all has the bytes."""
    free = dataclasses.replace(device_card("h100").node_link, bandwidth_bytes_per_s=1e30, latency_s=0.0)
    one, four = ranks(1), ranks(4, peer_link=free)
    assert four.forward_s(65536, 0) == pytest.approx(one.forward_s(65536, 0) / 4, rel=0.03)
    slow = dataclasses.replace(free, bandwidth_bytes_per_s=1e9)
    wired = ranks(4, peer_link=slow).forward_s(65536, 0) - four.forward_s(65536, 0)
    # queries, keys and values there and the output back: 3/4 of a rank's 16,384 tokens in bfloat16, in 32 layers
    moved = 65536 // 4 * (2 * 32 + 2 * 8) * 128 * 2
    assert wired == pytest.approx(32 * 0.75 * moved / 1e9, rel=1e-6)


def test_sequence_ranks_share_keys_values_and_states() -> None:
    size, shape = model_size("llama-3-8b"), {"num_stages": 2, "dtype": "bfloat16", "micro_batch": 1, "zero_stage": 1}
    one, four = (MemoryModel.of_model(size, **shape, sequence_ranks=count).parts[1] for count in (1, 4))
    assert four.store_bytes_per_token == one.store_bytes_per_token / 4
    assert four.store_grad_bytes_per_token == one.store_grad_bytes_per_token / 4
    # each computes the loss of its own tokens, as many at once
    assert four.loss_bytes_per_token == one.loss_bytes_per_token / 4
    assert four.loss_chunk_tokens == 4 * one.loss_chunk_tokens
    assert four.slice_bytes_per_token < one.slice_bytes_per_token / 3  # attention's output is there twice
    # bfloat16 with ZeRO divides twelve bytes of states per parameter, and nothing else
    parameters = one.static_bytes / 18
    assert four.static_bytes == pytest.approx(parameters * (6 + 12 / 4), rel=1e-6)
    sixteen = MemoryModel.of_model(size, **shape, sequence_ranks=16).parts[1]
    assert sixteen.store_bytes_per_token == one.store_bytes_per_token / 8  # each has a whole key head


def test_offloaded_optimizer_states_leave_the_device() -> None:
    size, shape = model_size("llama-3-8b"), {"num_stages": 2, "dtype": "bfloat16", "micro_batch": 1, "zero_stage": 1}
    there, away = (MemoryModel.of_model(size, **shape, offload_optimizer=is_away).parts[0] for is_away in (False, True))
    assert away.static_bytes == pytest.approx(there.static_bytes * 6 / 18, rel=1e-6)


def test_a_loss_without_logits_needs_one_chunk() -> None:
    size, shape = model_size("llama-3-8b"), {"num_stages": 2, "dtype": "bfloat16", "micro_batch": 1}
    plain, fused = (MemoryModel.of_model(size, **shape, fused_loss=is_fused) for is_fused in (False, True))
    kept = plain.slice_bytes(1, 4096, 0) - fused.slice_bytes(1, 4096, 0)
    assert kept == pytest.approx(4096 * size.vocab_size * 4, rel=0.01)  # fp32 log-probabilities
    long, longer = (fused.working_bytes(1, tokens, 0, False) for tokens in (8192, 65536))
    assert longer - long < 57344 * size.vocab_size  # a chunk is a chunk
    chunk = loss_chunk_tokens(size.vocab_size, on_cpu=False)
    assert long >= chunk * size.vocab_size * (2 + 4)  # as computed, and in fp32


def test_bytes_on_the_host_are_those_of_slices_that_are_away() -> None:
    schedule = build("terapipe", 2, 1, 8)
    memory = MemoryModel.of_model(model_size("mini"), num_stages=2, dtype="float32", micro_batch=1)
    spans = [[(64 * i, 64 * i + 64) for i in range(8)]]
    order = schedule.orders[0]
    away = offloaded_until(order)
    assert 0 < len(away) < 8
    staying = 64 * 4 * model_size("mini").hidden_size  # the output of the first stage is never offloaded
    kept = [memory.slice_bytes(0, 64, 64 * unit[1]) for _, unit in away]
    assert host_bytes(order, spans, memory) == sum(kept) - len(away) * staying


def test_bytes_on_the_host_come_with_an_f_and_go_after_the_copy_back() -> None:
    """By a scan over all computations, of slices that come and go."""
    memory = MemoryModel.of_model(model_size("mini"), num_stages=2, dtype="float32", micro_batch=1)
    spans = [[(64 * i, 64 * i + 64) for i in range(8)]] * 6
    order = build("seq1f1b", 2, 6, 8).orders[0]
    places = {action.unit: i for i, action in enumerate(order) if action.kind.value == "F"}
    away = [(places[unit], until) for (_, unit), until in offloaded_until(order).items()]
    most = max(sum(first <= now <= until for first, until in away) for now in range(len(order)))
    assert most < len(away)
    each = memory.slice_bytes(0, 64, 0) - 64 * 4 * model_size("mini").hidden_size
    assert host_bytes(order, spans, memory) == most * each


def test_the_fullest_node_has_the_sum_of_its_ranks() -> None:
    import numpy as np

    cluster = Cluster("h100", 2, 4)
    assert cluster.fullest_node(Grid(2, 1, 4), np.array([1.0, 2.0])) == 8.0
    assert cluster.fullest_node(Grid(2, 4, 1), np.array([1.0, 2.0])) == 8.0
    assert cluster.fullest_node(Grid(4, 1, 1, sequence=2, axes=("pipe", "data", "sequence")), np.arange(4.0)) == 10.0


@pytest.mark.parametrize(("grid", "buffers"), [
    (Grid(1, 1, 1), 0), (Grid(2, 1, 1), 16), (Grid(1, 2, 1), 64), (Grid(1, 1, 2), 64), (Grid(3, 2, 2), 16 + 64 + 64),
    (Grid(1, 2, 1, ("pipe", "data", "sequence"), 2), 64 + 64),
])  # fmt: skip
def test_a_process_has_a_context_and_buffers_of_its_communicators(grid: Grid, buffers: int) -> None:
    """4 channels of each of 4 wires, and 32 in both directions of the ring of each group, with 4 MiB each."""
    assert Cluster("h100", 1, 8).process_bytes(grid) == (1343 + 4 * buffers) * 2**20
    assert Cluster("cpu", 1, 8).process_bytes(grid) == 0


def test_gradients_are_summed_over_sequence_ranks() -> None:
    cluster = Cluster("h100", 1, 4)
    sequence = cluster.all_reduce_s(Grid(1, 1, 1, ("pipe", "data", "sequence"), 4), 1e9, 0)
    assert sequence == cluster.all_reduce_s(Grid(1, 4, 1), 1e9, 0) > 0


def test_a_strategy_with_sequence_ranks_runs_as_its_files_say() -> None:
    words = {"sequence_parallel": 2, "stages": 4, "offload_activations": True, "offload_optimizer": True}
    strategy = plan_strategy("llama-3-8b", Cluster("h100", 1, 8), **SHORTER, **words, schedule="seq1f1b")
    assert strategy.grid == {"pipe": 4, "data": 1, "model": 1, "sequence": 2} and strategy.axes[2] == "sequence"
    assert Strategy.from_json(strategy.to_json()) == strategy
    assert strategy.placement[3, 0, 1] == (0, 7)
    config = strategy.to_deepspeed()
    assert config["terapipe"]["offload_activations"] is True and config["zero_optimization"]["stage"] == 1
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert config["bf16"] == {"enabled": True} and config["data_types"] == {"grad_accum_dtype": "fp32"}  # as counted
    assert section_of(strategy)["offload_activations"] is True
    assert not list(contradictions(strategy, {}, config))
    plain = {**config, "zero_optimization": {"stage": 1}}
    (line,) = contradictions(strategy, {}, plain)
    assert "offload_optimizer" in line and '"cpu"' in line


@pytest.mark.parametrize(("length", "ranks"), [(65520, 8), (20008, 8), (9010, 5)])
def test_every_sequence_rank_has_as_many_tokens_of_a_slice(length: int, ranks: int) -> None:
    question = {"global_batch_size": 2, "sequence_length": length, "sequence_parallel": ranks, "data_parallel": 1}
    ranked = rank_strategies("gpt3-13b", Cluster("h200", 2, ranks), **question, memory_limit_gb=500, stages=2)
    for strategy in ranked:
        section = TeraPipeConfig.from_deepspeed(strategy.to_deepspeed()).with_multiple(ranks)
        assert section.plan_for(length) == strategy.plan
        assert not [tokens for tokens in strategy.plans[0].lengths if tokens % ranks]
    assert any(strategy.plans[0].num_slices > 1 for strategy in ranked)
    old = ranked[0].model_copy(update={"slices": [length // 2 + 1, length - length // 2 - 1]})
    with pytest.raises(PlannerError, match=f"slices of {length // 2 + 1} tokens, which its {ranks} sequence ranks"):
        price_strategy(old, "gpt3-13b", Cluster("h200", 2, ranks))
    assert equal_plan(Setting(1, 1, sequence=ranks), 2 * ranks, 3).lengths == (ranks, ranks)


def test_planned_slices_on_sequence_ranks_are_as_fine_as_equal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of 390 tokens does not divide by 8 ranks: slices end at multiples of 384, not of 1,560."""
    cluster, granules = Cluster("h100", 2, 8), []

    def granule_alone(*question: Any, **options: Any) -> None:
        granules.append(question[4])
        raise MemoryLimitError("none", 0, 0)

    monkeypatch.setattr("terapipe_ds.planner.strategy.search.plan_slices", granule_alone)
    layers = layers_of("llama-3-8b", cluster, 50_008, "auto")
    search = Search(Space(layers, cluster, 1, 50_008, 1e15, Choices(stages=2, sequence_parallel=8)))
    candidate, plan = next(search.space.candidates()), SlicePlan.equal(50_008, 128, 8)
    score = Score(1.0, candidate, (0, 17, 34), (Again.OFF,) * 2, Shape("seq1f1b"), plan, (), True)
    search._plan_slices(search.price(candidate), score)
    assert granules == [384]


def test_bytes_by_kind_add_up_and_levers_lower_them() -> None:
    cluster, fixed = Cluster("h100", 1, 4), SHORTER | {"stages": 4, "schedule": "seq1f1b", "memory_limit_gb": 200}
    plain = plan_strategy("llama-3-8b", cluster, **fixed, offload_activations=False, offload_optimizer=False)
    # at the end of a B the gradients of parameters are there, and the slice is gone
    small = plan_strategy("tiny", Cluster("v100", 1, 1), global_batch_size=1, sequence_length=63)
    of_kinds = list(small.memory_by_kind.values())
    assert [sum(of) for of in zip(*of_kinds, strict=True)] == small.memory_bytes and min(map(min, of_kinds)) >= 0
    # a context, and 4 MiB for each of 4 channels of the 2 wires to each of 2 neighbours
    assert plain.memory_by_kind["context_and_nccl"] == [(1343 + 4 * 4 * 4) * 2**20] * 4
    away = plan_strategy("llama-3-8b", cluster, **fixed, offload_activations=True, offload_optimizer=True)
    fullest = [max(strategy.memory_by_kind["live_slices"]) for strategy in (plain, away)]
    assert fullest[1] < fullest[0] / 4
    assert max(away.memory_by_kind["model_states"]) < 0.5 * max(plain.memory_by_kind["model_states"])
    assert away.host_memory_bytes > 18 * model_size("llama-3-8b").num_parameters()
    assert away.predicted_s > plain.predicted_s


def test_bytes_by_kind_of_long_batches_come_from_few_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, grid, plan = Cluster("h100", 1, 2), Grid(2, 1, 1), SlicePlan.equal(128, 2)
    priced = Priced(layers_of("nano", cluster, 128, "auto"), cluster, 128, Candidate(grid, 1, 1000, 1, Levers(True)))
    score = priced.price((0, 2, 4), Shape("terapipe"), plan, (Again.OFF,) * 2)
    assert score is not None
    asked: list[int] = []
    few = "terapipe_ds.planner.strategy.priced.replay_of"
    monkeypatch.setattr(few, lambda shape, count: asked.append(count) or replay_of(shape, count))
    of_kinds = priced.peak_by_kind(score).values()
    assert [sum(of) for of in zip(*of_kinds, strict=True)] == list(score.peak_bytes) and min(map(min, of_kinds)) >= 0
    assert max(asked) < 500


def test_bytes_by_kind_where_a_step_needs_more_than_a_few_micro_batches() -> None:
    cluster, plan = Cluster("h100", 1, 2), SlicePlan.equal(64, 2)
    priced = Priced(layers_of("gpt3-1b", cluster, 64, "fp16"), cluster, 64, Candidate(Grid(2, 1, 1), 1, 1000, 1))
    score = priced.price((0, 13, 26), Shape("terapipe"), plan, (Again.OFF,) * 2)
    assert score is not None
    by_kind = priced.peak_by_kind(score)
    assert min(by_kind["live_slices"]) > 40e9 > 10 * max(by_kind["running"]) > 0
    assert [sum(of) for of in zip(*by_kind.values(), strict=True)] == list(score.peak_bytes)


def test_a_host_without_room_limits_what_goes_there() -> None:
    card = dataclasses.replace(device_card("h100"), host_memory_bytes=10**9)
    words = SHORTER | {"stages": 4, "offload_activations": True, "offload_optimizer": False}
    strategy = plan_strategy("llama-3-8b", Cluster(card, 1, 4), **words)
    assert (strategy.host_memory_bytes, len(strategy.slices)) == (0, 1), "one slice at a time stays on the device"
    with pytest.raises(PlannerError, match=r"a node's host \(0\.8382 GiB.*leave out offload_activations, or"):
        plan_strategy("llama-3-8b", Cluster(card, 1, 4), **words, schedule="seq1f1b")
    nothing_fixed = Space(Any, Cluster(card, 1, 4), 1, 1, 1.0)
    assert "give more devices, a larger memory_limit_gb, or" in str(nothing_fixed.host_memory_error())


def test_an_optimizer_stays_on_a_device_that_has_room() -> None:
    """A CPU is its own host: no optimizer steps faster there than where it is."""
    words = {"global_batch_size": 4, "sequence_length": 256, "stages": 2, "data_parallel": 2, "schedule": "1f1b"}
    free = plan_strategy("nano", Cluster("cpu", 1, 4), **words)
    assert not free.offload_optimizer
    away = plan_strategy("nano", Cluster("cpu", 1, 4), **words, offload_optimizer=True)
    assert away.offload_optimizer and away.predicted_s >= free.predicted_s


def test_kept_attention_is_not_paid_twice() -> None:
    """Only attention grows with the prefix, so a backward with kept attention grows as one without recomputation."""
    layers = CountedLayers(model_size("llama-3-8b"), Cluster("h100", 1, 8))
    setting = Setting(1, 1)
    off, full, kept = (layers.layer_costs(setting, again)[1] for again in Again)
    growth = [cost.backward_s(2048, 262144) - cost.backward_s(2048, 8192) for cost in (off, full, kept)]
    assert growth[2] == pytest.approx(growth[0], rel=1e-9) and growth[1] > 1.2 * growth[0]
    assert off.backward_s(2048, 8192) < kept.backward_s(2048, 8192) < full.backward_s(2048, 8192)
    # the output and the log-sum-exp of 32 heads, in bfloat16 and fp32, beside the input of each layer
    parts = [layers.memory_of_spans(setting, [Span(0, 17, again), Span(17, 34, again)])[0] for again in Again]
    more = parts[2].slice_bytes_per_token - parts[1].slice_bytes_per_token
    assert more == 16 * (32 * 128 * 2 + 32 * 4)


def test_a_strategy_that_keeps_attention_says_so_in_its_files() -> None:
    words: dict[str, Any] = {"stages": 2, "sequence_parallel": 4, "schedule": "seq1f1b", "memory_limit_gb": 75}
    card = dataclasses.replace(device_card("h100"), host_memory_bytes=None)
    strategy = plan_strategy("llama-3-8b", Cluster(card, 1, 8), **LONG, **words, offload_activations=False)
    assert strategy.recompute != "off" and strategy.keep_attention
    assert strategy.to_deepspeed()["terapipe"]["keep_attention"] is True
    assert Strategy.from_json(strategy.to_json()) == strategy and section_of(strategy)["keep_attention"] is True


@pytest.mark.parametrize("lever", ["keep_attention", "offload_activations", "offload_optimizer"])
def test_a_strategy_is_not_priced_without_the_costs_of_a_lever(lever: str) -> None:
    cluster = Cluster("h100", 1, 2)
    plain = plan_strategy(CHAIN, cluster, global_batch_size=2, sequence_length=64, stages=2)
    strategy = plain.model_copy(update={lever: True, "recompute": "full"})
    for price in (price_strategy, simulate_strategy):
        price(plain, CHAIN, cluster)
        with pytest.raises(PlannerError, match=f"{lever} = True: only counted models have its costs"):
            price(strategy, CHAIN, cluster)


@pytest.mark.parametrize("lever", ["offload_activations", "offload_optimizer"])
def test_a_lever_without_known_costs_is_refused(lever: str) -> None:
    words: dict[str, Any] = {"global_batch_size": 1, "sequence_length": 64}
    with pytest.raises(PlannerError, match=f"{lever} = True: only counted models have its costs"):
        plan_strategy(CHAIN, Cluster("h100", 1, 2), **words, **{lever: True})
    assert plan_strategy(CHAIN, Cluster("h100", 1, 2), **words, **{lever: False}).model_dump()[lever] is False


def test_what_cannot_fit_is_told_before_any_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terapipe_ds.planner.strategy.search.Search._search", lambda *_: pytest.fail("it searched"))
    with pytest.raises(MemoryLimitError, match=r"from about 128 of these devices on it can fit"):
        plan_strategy("llama-3-405b", Cluster("a100-40gb", 8, 8), global_batch_size=256, sequence_length=8192)


@pytest.mark.full
def test_llama_3_8b_with_262144_tokens_fits_in_60_gb() -> None:
    words = {"global_batch_size": 1, "sequence_length": 262144, "memory_limit_gb": 60}
    strategy = plan_strategy("llama-3-8b", Cluster("h100", 1, 8), **words)
    assert max(strategy.memory_bytes) <= 60e9


@pytest.mark.full
def test_qwen3_8b_with_a_million_tokens_takes_less_than_380_s() -> None:
    words = {"global_batch_size": 1, "sequence_length": 1048576, "memory_limit_gb": 81.6}
    strategy = plan_strategy("qwen3-8b", Cluster("h100", 1, 8), **words)
    assert strategy.predicted_s <= 380 and max(strategy.memory_bytes) <= 81.6e9
    # keys, values and their fp32 gradients of all layers, divided over eight devices
    stored = 36 * 2 * 8 * 128 * (2 + 4) * 1048576 / 8
    kinds = strategy.memory_by_kind
    assert max(map(sum, zip(kinds["keys_and_values"], kinds["their_gradients"], strict=True))) == pytest.approx(
        stored, rel=0.01
    )
    assert math.isclose(strategy.mfu * 989.4e12, strategy.model_flops_per_s, rel_tol=1e-6)


QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288,
    "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip


def test_the_named_size_is_that_of_the_published_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    read, known = size_of(tmp_path / "config.json"), model_size("qwen3-8b")
    assert dataclasses.replace(read, name=known.name, rope_base=known.rope_base) == known
