"""Strategies: models by name and by `config.json`, the value, what is refused, and searches that are stopped."""

import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import terapipe_ds
from terapipe_ds.costs.analytic import analytic_costs
from terapipe_ds.costs.model_sizes import ModelSize, model_size
from terapipe_ds.planner import MemoryLimitError, PlannerError
from terapipe_ds.planner.layers.config_json import size_of_config
from terapipe_ds.planner.layers.counted import CountedLayers
from terapipe_ds.planner.layers.cuts import all_cuts, best_cuts, spans_matrix
from terapipe_ds.planner.layers.part_costs import PartCosts
from terapipe_ds.planner.layers.parts import Setting
from terapipe_ds.planner.strategy import (
    Cluster,
    LayerChain,
    Strategy,
    plan_strategy,
    price_strategy,
    rank_strategies,
    size_of,
)
from terapipe_ds.planner.strategy.candidate import Candidate
from terapipe_ds.planner.strategy.priced import Priced
from terapipe_ds.planner.strategy.search import Search
from terapipe_ds.planner.strategy.shapes import NAMES
from terapipe_ds.schedule import build
from terapipe_ds.schedule.placement import LOOPED
from terapipe_ds.simulator import simulate
from terapipe_ds.strategy import DATA_FIRST, PIPE_FIRST, Grid, StrategyError
from tests.costs import CostsOf, constant

SMALL: Any = {"global_batch_size": 4, "sequence_length": 512}


def small_strategy(**more: Any) -> Strategy:
    return plan_strategy("mini", Cluster("v100", 2, 2), **SMALL, **more)


@functools.cache
def small_ranking() -> list[Strategy]:
    return rank_strategies("mini", Cluster("v100", 2, 2), **SMALL)


# --- costs of parts


@pytest.mark.parametrize("recompute", [False, True])
def test_a_part_costs_what_the_counted_part_does(recompute: bool) -> None:
    """Parts are sums of layers, and `analytic_costs` counts whole parts."""
    cluster = Cluster("h100", 1, 8, within_latency_s=1e-6)
    layers = CountedLayers(model_size("llama-3-8b"), cluster)
    costs = layers.layer_costs(Setting(tensor=2, micro_batch=3), recompute)
    card = dataclasses.replace(cluster.card, node_link=cluster.within)
    counted = analytic_costs(
        "llama-3-8b", card, num_stages=3, micro_batch=3, tensor_parallel=2, activation_checkpointing=recompute,
        layers_per_part=(9, 12, 11), fused_loss=True,
    )  # fmt: skip
    for (start, stop), whole in zip([(0, 10), (10, 22), (22, 34)], counted, strict=True):
        part = PartCosts(costs[start:stop])
        for span in ((512, 0), (64, 4096)):
            assert part.forward_s(*span) == pytest.approx(whole.forward_s(*span), rel=1e-12)
            assert part.backward_s(*span) == pytest.approx(whole.backward_s(*span), rel=1e-12)


def test_a_cut_is_the_best_of_all() -> None:
    rng = np.random.default_rng(3)
    for _ in range(30):
        matrix = spans_matrix(rng.uniform(0, 1, 7))
        extra = np.broadcast_to(rng.uniform(0, 0.3, 8)[:, None], matrix.shape)
        value = best_cuts([matrix] * 3, [extra] * 3, 2.5, 0.5)[0][0]

        def by_hand(cut: tuple[int, ...], matrix: Any = matrix, extra: Any = extra) -> float:
            times = [matrix[a, b] for a, b in itertools.pairwise(cut)]
            return 2.5 * max(times) + 0.5 * (sum(times) + sum(extra[a, 0] for a in cut[:-1]))

        assert value <= min(map(by_hand, all_cuts(7, 3))) * (1 + 1e-6)


def test_gradients_go_back_over_the_link_that_they_take() -> None:
    """The link behind the middle stage is slow, the one before it is not."""
    parts = [constant(1, 1, *sends) for sends in ((0.5, 0), (7, 0.5), (0, 7))]
    timeline = simulate(build("1f1b", 3, 1, 1), terapipe_ds.SlicePlan((8,)), parts)
    assert timeline.makespan_s == 6 + 2 * 0.5 + 2 * 7


# --- placement


def test_axes_place_stages_in_nodes_or_across_them() -> None:
    fresh, scatter = Grid(2, 2, 2, PIPE_FIRST), Grid(2, 2, 2, DATA_FIRST)
    assert {place[0] for (pipe, _, _), place in fresh.placement(4).items() if pipe == 0} == {0}
    assert {place[0] for (_, data, _), place in scatter.placement(4).items() if data == 0} == {0}
    cluster = Cluster(
        "v100", 2, 4, within_bytes_per_s=8.0, between_bytes_per_s=1.0, within_latency_s=0, between_latency_s=0
    )
    assert cluster.link_between(fresh, 0, 1).bandwidth_bytes_per_s == 1.0
    assert cluster.link_between(scatter, 0, 1).bandwidth_bytes_per_s == 8.0
    assert cluster.all_reduce_s(fresh, 8.0, 0) == 1.0  # two ranks within a node: 2 * 1/2 * 8 / 8
    assert cluster.all_reduce_s(scatter, 8.0, 0) == 8.0
    assert cluster.all_reduce_s(Grid(1, 8, 1), 8.0, 0) == 2 * 7 / 8 * 8 / 4  # four rings over links of 1 byte/s each
    faster = Cluster(
        "v100", 2, 4, within_bytes_per_s=2.0, between_bytes_per_s=1.0, within_latency_s=0, between_latency_s=0
    )
    assert faster.all_reduce_s(Grid(1, 8, 1), 8.0, 0) == 2 * 7 / 8 * 8 / 2  # hops within nodes are the slowest


def test_devices_of_a_node_share_its_network() -> None:
    """By hand: 2 nodes of 4, pairs of tensor ranks; the node has 1 byte per second, a device alone 0.9 of it."""
    cluster = Cluster(
        "v100", 2, 4, within_bytes_per_s=8.0, between_bytes_per_s=0.9, node_bytes_per_s=1.0, within_latency_s=0,
        between_latency_s=0,
    )  # fmt: skip
    fresh, scatter = Grid(2, 2, 2, PIPE_FIRST), Grid(2, 2, 2, DATA_FIRST)
    assert cluster.link_between(fresh, 0, 1).bandwidth_bytes_per_s == 0.25  # two replicas of two ranks send from node 0
    assert cluster.link_between(Grid(8, 1, 1), 3, 4).bandwidth_bytes_per_s == 0.9  # one device sends
    assert cluster.link_between(Grid(8, 1, 1), 2, 3).bandwidth_bytes_per_s == 8.0
    assert cluster.all_reduce_s(scatter, 8.0, 0) == 8.0 / 0.25  # both stages of a node sum, over two nodes each
    assert cluster.all_reduce_s(fresh, 8.0, 0) == 1.0


def test_a_placement_is_where_the_ranks_of_the_topology_are() -> None:
    topology = pytest.importorskip("deepspeed.runtime.pipe.topology")
    for strategy in rank_strategies("mini", Cluster("v100", 2, 4), **SMALL, schedule="1f1b"):
        axes = topology.ProcessTopology(axes=strategy.axes, dims=strategy.dims)
        inner = "sequence" if "sequence" in strategy.axes else "model"
        for (pipe, data, third), place in strategy.placement.items():
            assert divmod(axes.get_rank(pipe=pipe, data=data, **{inner: third}), 4) == place


# --- the value


def test_a_strategy_comes_back_from_json() -> None:
    strategy = small_ranking()[0]
    assert Strategy.from_json(strategy.to_json()) == strategy
    document = json.loads(strategy.to_json())
    for key, value, message in (
        ("axes", ["pipe", "data", "tensor"], "pipe, data and model"),
        ("axes", ["data", "pipe", "pipe", "model"], "pipe, data and model"),
        ("partition", [0, 3, 3], "rising numbers"),
        ("partition", list(range(11)), "partition is for 10"),
        ("chunks_per_stage", 3, "'zbv' has two parts per stage, give 2"),
        ("schedule", "1f1b", "'1f1b' has one part per stage, leave it at 1"),
        ("schedule", "chimera", "partition is for 4, the grid has 2"),
        ("schedule", "1F1B", "schedule"),
        ("micro_batch", 3, "unknown key"),
        ("predicted_s", -1.0, "predicted_s"),
        ("recompute", [0, 9], "stages below"),
        ("recompute", [0, 0], "each once"),
        ("recompute", [], "each once"),
    ):
        with pytest.raises(StrategyError, match=message):
            Strategy.from_json(json.dumps(document | {key: value}))


def test_a_deepspeed_config_trains_the_global_batch_with_the_plan() -> None:
    strategy = small_strategy(stages=4, schedule="seq1f1b")
    config = strategy.to_deepspeed()
    assert config["train_batch_size"] == 4 == strategy.micro_batch_size * strategy.accumulation * strategy.grid["data"]
    assert config["terapipe"]["partition"] == strategy.partition
    assert config["pipeline"] == {"stages": 4}  # where Trainer reads it
    cut = terapipe_ds.TeraPipeConfig.from_deepspeed(config).plan_for(512)  # a number where slices are equal
    assert list(cut.lengths) == list(strategy.plans[0].lengths)
    assert config["fp16"] == {"enabled": True}  # what a v100 is made for
    for recompute in ("off", "full", [0, 2]):
        again = strategy.model_copy(update={"recompute": recompute})
        section = terapipe_ds.TeraPipeConfig.from_deepspeed(again.to_deepspeed())
        assert section.plan_for(512) == strategy.plan and section.partition == tuple(strategy.partition)
        assert section.recompute == (tuple(recompute) if isinstance(recompute, list) else recompute)
    command = strategy.launch_command("my hosts")
    front = "deepspeed --hostfile 'my hosts' --num_nodes 2 --num_gpus 2"
    assert command == f"{front} --module terapipe_ds.run train.py --deepspeed_config ds.json"


def test_searches_answer_alike_and_within_the_bound() -> None:
    assert small_strategy() == small_ranking()[0]
    times = [strategy.predicted_s for strategy in small_ranking()]
    assert times == sorted(times)
    assert all(0 < strategy.lower_bound_s <= strategy.predicted_s for strategy in small_ranking())


# --- models


def test_a_config_json_is_the_size_that_it_describes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    llama = {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
    }  # fmt: skip
    path.write_text(json.dumps(llama))
    size = size_of_config(str(path))
    assert size.num_parameters() == model_size("llama-3-8b").num_parameters()
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    path.write_text(json.dumps(gpt2))
    assert size_of_config(str(path)).num_parameters() == 124_439_808  # GPT-2 small
    assert plan_strategy(str(path), Cluster("v100", 1, 2), **SMALL).partition[-1] == 14
    monkeypatch.chdir(tmp_path)
    assert size_of(".").num_parameters() == 124_439_808  # a folder without a separator in its name
    for change, message in (
        ({"n_head": None}, "lacks num_attention_heads"),
        ({"n_head": "12"}, "n_head = '12': give an integer"),
        ({"n_inner": [3072] * 12}, "n_inner = .*: give an integer, or a measured profile if layers differ"),
        ({"layer_types": ["full_attention", "conv"] * 6}, "not all attention and a usual MLP; give a measured profile"),
        ({"num_experts": 8}, "experts"),
    ):
        path.write_text(json.dumps(gpt2 | change))
        with pytest.raises(PlannerError, match=message):
            size_of_config(str(path))
    path.write_text("[")
    with pytest.raises(PlannerError, match="give a decoder.s config.json"):
        size_of_config(str(path))


_HF = {
    "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 512, "vocab_size": 1000,
}  # fmt: skip
_OLD = {"n_layer": 2, "n_embd": 256, "n_head": 8, "vocab_size": 1000, "n_positions": 1024}
_FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "gpt_neox", "phi", "cohere", "granite", "apertus", "arcee"), _HF),
    **dict.fromkeys(
        ("gemma", "gemma2", "starcoder2", "qwen2", "nemotron"), _HF | {"num_key_value_heads": 4, "head_dim": 32}
    ),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), _OLD),
    **dict.fromkeys(("gptj", "codegen"), _OLD | {"rotary_dim": 16}),
    "bloom": {"n_layer": 2, "hidden_size": 256, "n_head": 8, "vocab_size": 1000},
    "falcon": {
        "num_hidden_layers": 2,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "vocab_size": 1000,
        "num_kv_heads": 8,  # which its class does not read
    },
    "gpt_neo": {
        "num_layers": 2,
        "hidden_size": 256,
        "num_heads": 8,
        "vocab_size": 1000,
        "attention_types": [[["global", "local"], 1]],
    },
    "mpt": {"n_layers": 2, "d_model": 256, "n_heads": 8, "vocab_size": 1000},
    "opt": {"ffn_dim": 512, "word_embed_proj_dim": 256, **_HF},
}


@pytest.mark.parametrize("family", _FAMILIES)
def test_a_config_json_has_about_as_many_parameters_as_the_model_s_own_class(family: str, tmp_path: Path) -> None:
    """Also where the config does not say whether matrices are tied, as those of transformers 4 do not."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    numbers = _FAMILIES[family] | {"model_type": family, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(numbers))
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(str(tmp_path))
        model = transformers.AutoModelForCausalLM.from_config(config)
    size = size_of_config(str(tmp_path / "config.json"))
    assert size.num_parameters() == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.02)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_of_images_and_text_says_itself_whether_matrices_are_tied(tied: bool, tmp_path: Path) -> None:
    """Its decoder's config may say otherwise, and transformers then follows the saved config of the model."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    text = _HF | {"model_type": "llama", "tie_word_embeddings": not tied}
    images = {"model_type": "clip_vision_model", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    both = transformers.LlavaConfig(text_config=text, vision_config=images, tie_word_embeddings=tied)
    both.save_pretrained(str(tmp_path))
    with torch.device("meta"):
        model = transformers.LlavaForConditionalGeneration(both)
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert size_of_config(str(tmp_path / "config.json")).tied_embedding == is_tied


_GEMMA = {
    "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
    "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
}  # fmt: skip
_VICUNA = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064}


@pytest.mark.parametrize(
    ("text", "billions"), [(_GEMMA, 27.009), (_VICUNA, 6.739)], ids=["gemma-3-27b", "llava-1.5-7b"]
)
def test_a_model_of_images_and_text_lacks_the_defaults_of_its_decoder(
    text: dict[str, Any], billions: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file, by transformers 4, has only the numbers that differ from its decoder's class."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    size = size_of_config(str(tmp_path / "config.json"))
    assert size.num_parameters() / 1e9 == pytest.approx(billions, rel=1e-3)
    assert len(size.windows) == (62 if text is _GEMMA else 0)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text | {"hidden_size": "wide"}}))
    with pytest.raises(PlannerError, match="transformers cannot read text_config .*: give the model's file"):
        size_of_config(str(tmp_path / "config.json"))
    monkeypatch.setattr("terapipe_ds.compat.versions.is_there", lambda module: False)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"model_type": "llama"}}))
    with pytest.raises(PlannerError, match="lacks num_hidden_layers, .* or install transformers with its class"):
        size_of_config(str(tmp_path / "config.json"))


@pytest.mark.parametrize(("change", "message"), [
    ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM is no decoder model"),
    ({"model_type": "t5", "is_encoder_decoder": True}, "t5 is no decoder model"),
    ({"model_type": "mamba2"}, "layers of mamba2 are not all attention"),
    ({"model_type": "gemma4_text", "hidden_size_per_layer_input": 8}, "layers of gemma4_text are not all attention"),
    ({"model_type": "moshi"}, "layers of moshi are not all attention"),
    ({"model_type": "bert", "type_vocab_size": 2}, "layers of bert are not all attention"),
    ({"model_type": "lfm2", "full_attn_idxs": [1]}, "layers of lfm2 are not all attention"),
    ({"model_type": "hunyuan_v1_moe", "num_experts": 64}, "num_experts: experts are counted for"),
    ({"model_type": "llama", "per_layer_config": {"1": {"intermediate_size": 64}}}, "layers of llama are not all"),
    ({"model_type": "llama", "per_layer_config": [{"head_dim": 64}]}, "layers of llama are not all attention"),
    ({"model_type": "nemotron-nas", "block_configs": [{}]}, "layers of nemotron-nas are not all attention"),
], ids=str)  # fmt: skip
def test_configs_of_other_models_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_HF | change))
    with pytest.raises(PlannerError, match=message):
        size_of_config(str(tmp_path / "config.json"))


@pytest.mark.parametrize(("devices", "length", "schedule"), [(1, 63, None), (4, 512, "interleaved")])
def test_a_strategy_may_need_exactly_the_limit(devices: int, length: int, schedule: str | None) -> None:
    """Estimates exceed the bytes of a replay by little, and a strategy that fits is none to refuse."""
    question: dict[str, Any] = {"global_batch_size": 1, "sequence_length": length, "schedule": schedule}
    cluster = Cluster("v100", devices, 1)
    free = plan_strategy("mini" if schedule else "tiny", cluster, **question)
    limit_gb = max(free.memory_bytes) / 1e9
    tight = plan_strategy("mini" if schedule else "tiny", cluster, memory_limit_gb=limit_gb, **question)
    assert (tight.predicted_s, tight.memory_bytes) == (free.predicted_s, free.memory_bytes)


def test_memory_decides_what_is_recomputed_and_a_limit_that_nothing_meets_says_the_least_need() -> None:
    cluster, batch = Cluster("h100", 1, 4), {"global_batch_size": 4, "sequence_length": 2048, "schedule": "1f1b"}
    batch["tensor_parallel"] = 2
    free = plan_strategy("gpt3-1b", cluster, memory_limit_gb=1000, **batch)
    tight = plan_strategy("gpt3-1b", cluster, memory_limit_gb=9, **batch)
    assert free.recompute == "off" != tight.recompute
    assert max(tight.memory_bytes) <= 9e9
    assert tight.predicted_s > free.predicted_s
    again = price_strategy(tight, "gpt3-1b", cluster)
    assert again.predicted_s == pytest.approx(tight.predicted_s) and again.memory_bytes == tight.memory_bytes
    # on other machines each figure is a new one
    other = price_strategy(tight, "gpt3-1b", Cluster("a100", 2, 2))
    assert other.devices_per_node == 2 and other.memory_by_kind.keys() == again.memory_by_kind.keys()
    assert [sum(stage) for stage in zip(*other.memory_by_kind.values(), strict=True)] == other.memory_bytes
    with pytest.raises(PlannerError, match=r"2 tensor ranks, which do not divide the 1 device of a node: .* 4"):
        price_strategy(tight, "gpt3-1b", Cluster("h100", 4, 1))
    # where all forwards come first, each micro-batch has its slices, and what runs stays the same
    long = {"schedule": "terapipe", "slices": [32] * 32, "recompute": "off", "keep_attention": False}
    of_batches, hosts = [], []
    for m in (4, 40, 76):
        strategy = tight.model_copy(update=long | {"accumulation": m})
        of_batches.append(price_strategy(strategy, "gpt3-1b", cluster).memory_by_kind)
        away = strategy.model_copy(update={"offload_activations": True})
        hosts.append(price_strategy(away, "gpt3-1b", cluster).host_memory_bytes)
    assert hosts[0] > 0 and hosts[1] - hosts[0] == pytest.approx(hosts[2] - hosts[1], abs=2)
    for kind in of_batches[0]:
        few, more, most = (of[kind] for of in of_batches)
        assert kind != "running" or few == most
        assert [b - a for a, b in zip(few, more, strict=True)] == [c - b for b, c in zip(more, most, strict=True)]
    rates = {one.model_flops_per_s * one.predicted_s for one in (tight, other)}
    assert max(rates) == pytest.approx(min(rates)) and other.mfu == pytest.approx(other.model_flops_per_s / 312e12)
    with pytest.raises(
        MemoryLimitError,
        match=r"fits in 2.794 GiB \(3 GB\) per device: all need more than .*, the least .*_limit_gb above",
    ) as bound:
        plan_strategy("gpt3-1b", cluster, memory_limit_gb=3, **batch)
    above_gb = 1.01 * bound.value.need_bytes / 1e9  # no strategy needs so little, and the need of a replay is met
    needs = "the least need found is .* with .*1 replica, .*_limit_gb >= "
    with pytest.raises(MemoryLimitError, match=needs) as refusal:
        plan_strategy("gpt3-1b", cluster, memory_limit_gb=above_gb, **batch)
    assert plan_strategy("gpt3-1b", cluster, memory_limit_gb=1.2 * refusal.value.need_bytes / 1e9, **batch)


@pytest.mark.sample(2)
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_every_schedule_is_planned_with_its_numbers_of_parts_and_refuses_others(chunks: int) -> None:
    for schedule in NAMES:
        question = {**SMALL, "stages": 2, "schedule": schedule, "chunks_per_stage": chunks}
        if schedule in LOOPED or chunks <= 1 + (schedule == "zbv"):
            strategy = plan_strategy("mini", Cluster("v100", 2, 2), **question)
            assert (strategy.schedule, strategy.chunks_per_stage) == (schedule, 2 if schedule == "zbv" else chunks)
        else:
            with pytest.raises(PlannerError, match=f"schedule {schedule!r} has (one part|two parts) per stage"):
                plan_strategy("mini", Cluster("v100", 2, 2), **question)


@pytest.mark.parametrize(("question", "message"), [
    (
        {"tensor_parallel": 3},
        "num_heads = 8 of mini does not divide by it.*Give tensor_parallel = .*, the nearest that works here",
    ),
    ({"tensor_parallel": 3, "stages": 4}, "Give tensor_parallel = 1, the nearest that works here"),
    ({"stages": 3}, "no strategy has stages = 3; give 2, the nearest that works"),
    ({"data_parallel": 4, "global_batch_size": 7}, "give global_batch_size = 8, the nearest that works"),
    ({"global_batch_size": 0}, "global_batch_size = 0: give an integer >= 1"),
    ({"memory_limit_gb": -1}, "memory_limit_gb = -1: give a number > 0"),
    ({"schedule": "chimera"}, "schedule = 'chimera': strategies have"),
    ({"schedule": "zbv", "chunks_per_stage": 3}, "zbv.* two parts per stage"),
    ({"chunks_per_stage": 9}, "no strategy has chunks_per_stage = 9; leave one of them out"),
])  # fmt: skip
def test_what_cannot_be_is_refused_with_the_nearest_that_can(question: dict[str, Any], message: str) -> None:
    with pytest.raises(PlannerError, match=message):
        plan_strategy("mini", Cluster("v100", 2, 2), **(SMALL | question))


def test_numbers_that_no_chain_and_no_cluster_has_are_refused() -> None:
    with pytest.raises(PlannerError, match="backward_s has 2 entries, forward_s 1"):
        LayerChain([1], [1, 2], [1], [1], [1])
    with pytest.raises(PlannerError, match="saved_bytes: give one finite number >= 0"):
        LayerChain([1], [1], [1], [-1], [1])
    for name, value in (("between_bytes_per_s", 0), ("node_bytes_per_s", True), ("within_bytes_per_s", math.inf)):
        with pytest.raises(PlannerError, match=f"{name} = .*: give a finite number > 0"):
            Cluster("v100", 1, 1, **{name: value})
    with pytest.raises(PlannerError, match="within_latency_s = -1: give a finite number >= 0"):
        Cluster("v100", 1, 1, within_latency_s=-1)
    with pytest.raises(PlannerError, match="nodes = 0: give an integer >= 1"):
        Cluster("v100", 0, 1)


# --- chains with slices, and searches that are stopped


def test_a_chain_with_costs_is_sliced() -> None:
    forward_s = lambda tokens, prefix: 1e-5 + 1e-6 * tokens + 1e-9 * tokens * (prefix + tokens / 2)  # noqa: E731
    layer, whole_s = CostsOf(forward_s, lambda *span: 2 * forward_s(*span)), forward_s(4096, 0)
    numbers: Any = [whole_s] * 6, [2 * whole_s] * 6, [1e6] * 6, [1e8] * 6, [1e8] * 6
    question: Any = {"global_batch_size": 1, "sequence_length": 4096}
    cluster = Cluster("v100", 1, 2)
    sliced = plan_strategy(LayerChain(*numbers, costs=[layer] * 6), cluster, **question)
    unsliced = plan_strategy(LayerChain(*numbers), cluster, **question)
    assert sliced.plan.num_slices > 1 == unsliced.plan.num_slices
    assert sliced.lower_bound_s <= sliced.predicted_s < 0.7 * unsliced.predicted_s
    wrong = CostsOf(lambda tokens, prefix: float("nan"), forward_s)
    with pytest.raises(PlannerError, match=r"forward_s\(tokens=64, prefix=0\) = nan: times are finite seconds >= 0"):
        plan_strategy(LayerChain(*numbers, costs=[wrong] * 6), cluster, **question)


@pytest.mark.parametrize("costs", [None, [constant(1, 2)] * 4])
@pytest.mark.parametrize("saved", [0.0, 1e8])
def test_layers_that_save_less_than_their_inputs_need_no_recomputation(saved: float, costs: Any) -> None:
    """Recomputation would keep 1 GB per layer, so that no bound may take it for the least."""
    chain = LayerChain([1.0] * 4, [2.0] * 4, [1e9] * 4, [saved] * 4, [1e7] * 4, costs)
    question: Any = {"global_batch_size": 2, "sequence_length": 8}
    free = plan_strategy(chain, Cluster("h100", 1, 2), **question)
    limit_gb = max(free.memory_bytes) / 1e9
    assert limit_gb < 3
    tight = plan_strategy(chain, Cluster("h100", 1, 2), memory_limit_gb=limit_gb, **question)
    assert (tight.recompute, tight.predicted_s) == ("off", free.predicted_s)


def test_a_search_that_is_stopped_gives_the_best_so_far() -> None:
    asked: list[str] = []

    def stop() -> bool:
        return asked.count("replays") >= 2

    stopped = small_strategy(progress=lambda what, done, of: asked.append(what), stop=stop)
    assert not stopped.is_complete
    assert "stopped" in str(stopped)
    assert stopped.lower_bound_s <= small_ranking()[0].predicted_s <= stopped.predicted_s
    with pytest.raises(PlannerError, match="stopped before it had any strategy"):
        small_strategy(stop=lambda: True)


def test_a_search_that_is_stopped_replays_its_answer_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few micro-batches may predict too little time; the printed time belongs to the whole batch."""
    score, asked = Priced.score, []

    def predicted(self: Priced, bounds: Any, shape: Any, plan: Any, limit: float, most: Any, beat_s: float) -> Any:
        found = score(self, bounds, shape, plan, limit, most, beat_s)
        return found and (found if most else dataclasses.replace(found, seconds=found.seconds / 2, is_final=False))

    monkeypatch.setattr(Priced, "score", predicted)
    stopped = small_strategy(
        progress=lambda what, done, of: asked.append(what), stop=lambda: asked.count("replays") >= 2
    )
    whole = price_strategy(stopped, "mini", Cluster("v100", 2, 2))
    assert not stopped.is_complete
    assert stopped.predicted_s == pytest.approx(whole.predicted_s, rel=1e-12)


def test_a_second_interrupt_keeps_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Search, "_replay_best", mock.Mock(side_effect=KeyboardInterrupt))
    stopped = small_strategy(
        progress=lambda what, done, of: asked.append(what), stop=lambda: asked.count("replays") >= 2
    )
    assert stopped.predicted_s < math.inf and not stopped.is_complete


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "nodes", "batch", "length"), [("llama-3-70b", 8, 256, 32768), ("gpt3-175b", 128, 1536, 2048)]
)
def test_large_clusters_are_planned_near_the_bound(model: str, nodes: int, batch: int, length: int) -> None:
    """The bound holds for several parts per stage, too, which hardly wait; these clusters have no memory for them."""
    best = plan_strategy(model, Cluster("h100", nodes, 8), global_batch_size=batch, sequence_length=length)
    assert best.gap < 0.25
    assert max(best.memory_bytes) <= 0.9 * 80 * 2**30


def test_a_strategy_whose_stage_has_both_ends_of_a_tied_matrix_is_found_under_its_own_peak() -> None:
    size = ModelSize("tied", 4, 512, 4, 4, 128, 1024, 400_000, 128, tied_embedding=True)
    question: Any = {"global_batch_size": 4, "sequence_length": 128, "stages": 2, "schedule": "zbv", "zero_stage": 0}
    free = rank_strategies(size, Cluster("v100", 1, 2), dtype="float32", **question)[0]
    limit = max(free.memory_bytes) / 1e9 * (1 + 1e-9)
    found = rank_strategies(size, Cluster("v100", 1, 2), dtype="float32", memory_limit_gb=limit, **question)[0]
    assert found.predicted_s == free.predicted_s


def test_a_tied_matrix_is_summed_and_stepped_where_it_is() -> None:
    """By hand, GPT-2's sizes on links of 1 GB/s: one copy in one stage; with two, the last stage has another."""
    cluster = Cluster("v100", 1, 4, within_bytes_per_s=1e9, within_latency_s=0)
    layers = CountedLayers(model_size("gpt3-1b"), cluster)
    size = layers.size
    assert size.tied_embedding
    matrix, rate = size.vocab_size * size.hidden_size, cluster.card.memory_bandwidth_bytes_per_s
    step_s = 28 / (rate * cluster.card.bandwidth_efficiency)
    one, two = (Priced(layers, cluster, 1024, Candidate(Grid(k, 4 // k, 1), 1, 1, 0)) for k in (1, 2))
    whole = one.ends_s((0, layers.num_layers), (0,))[0]
    assert whole == pytest.approx(size.num_parameters() * (2 * 2 * 3 / 4 / 1e9 + step_s))
    last = two.ends_s((0, layers.num_layers - 1, layers.num_layers), (0, 1))[1]
    reduced_s = 2 * 2 * 1 / 2 / 1e9
    head = matrix + size.head_parameters()
    assert last == pytest.approx(head * (reduced_s + step_s) + 2 * matrix / 1e9)
