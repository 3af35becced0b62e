"""Test random questions: plans within their limits and options, that the engine takes; more resources cost no time."""

import dataclasses
import functools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.costs.devices import LinkCard, device_card
from terapipe_ds.costs.model_sizes import ModelSize
from terapipe_ds.planner.errors import PlannerError
from terapipe_ds.planner.strategy import Cluster, Strategy, plan_strategy, price_strategy
from terapipe_ds.planner.strategy.shapes import NAMES

SIZES = [
    ModelSize("wide", 4, 1024, 8, 4, 128, 4096, 32768, 65536),
    ModelSize("deep", 7, 256, 4, 4, 64, 768, 8192, 65536),
]
OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("stages", "tensor_parallel", "sequence_parallel", "chunks_per_stage"), (1, 2)),
    **dict.fromkeys(("offload_activations", "offload_optimizer"), (False, True)),
    "schedule": ["seq1f1b", "seq1f1b-zb", "zbv", "1f1b"],
}
questions = st.fixed_dictionaries(
    {
        "size": st.sampled_from(SIZES),
        "device": st.sampled_from(["h100", "v100", "cpu"]),
        "nodes": st.sampled_from([1, 2]),
        "global_batch_size": st.sampled_from([1, 2]),
        "sequence_length": st.sampled_from([1000, 2048, 4096]),
        "memory_limit_gb": st.sampled_from([None, 2.5, 4]),
        "host_gb": st.sampled_from([None, 1, 20]),
        "options": st.lists(st.sampled_from(sorted(OPTIONS)), max_size=2, unique=True).flatmap(
            lambda names: st.fixed_dictionaries({name: st.sampled_from(OPTIONS[name]) for name in names})
        ),
    }
)


def cluster_of(device: str, nodes: int, host_gb: float | None) -> Cluster:
    card = device_card(device)
    host_bytes = card.host_memory_bytes if host_gb is None else int(1e9 * host_gb)
    return Cluster(dataclasses.replace(card, host_memory_bytes=host_bytes), nodes, 2)


def best(
    size: ModelSize, device: str, nodes: int, host_gb: float | None, options: Any, **words: Any
) -> Strategy | None:
    """Return the plan, or None where the planner says that there is none."""
    try:
        return plan_strategy(size, cluster_of(device, nodes, host_gb), **words, **options)
    except PlannerError:
        return None


@settings(max_examples=settings().max_examples // 30, deadline=None)
@given(questions)
def test_a_plan_keeps_to_its_question_and_adds_up(question: dict[str, Any]) -> None:
    plan = best(**question)
    if plan is None:
        return
    # the options; zbv has two parts, where the config may say 1 as well
    wanted = dict(question["options"])
    if wanted.get("schedule") == "zbv" and "chunks_per_stage" in wanted:
        wanted["chunks_per_stage"] = 2
    given_values = {"stages": plan.grid["pipe"], "tensor_parallel": plan.grid["model"]}
    given_values |= {"sequence_parallel": plan.grid.get("sequence", 1), **plan.model_dump()}
    assert {name: given_values[name] for name in wanted} == wanted
    assert plan.plan is not None and plan.plan.sequence_length == question["sequence_length"]
    # seconds, and bytes by kind, within the limits
    assert 0 < plan.lower_bound_s <= plan.predicted_s < math.inf
    of_kinds = list(plan.memory_by_kind.values())
    assert [sum(stage) for stage in zip(*of_kinds, strict=True)] == plan.memory_bytes
    assert all(number >= 0 for of in of_kinds for number in of)
    cluster = cluster_of(question["device"], question["nodes"], question["host_gb"])
    limit_gb = question["memory_limit_gb"]
    assert max(plan.memory_bytes) <= (0.9 * cluster.card.memory_bytes if limit_gb is None else 1e9 * limit_gb)
    assert plan.host_memory_bytes <= 0.9 * (cluster.card.host_memory_bytes or math.inf)
    # the file, the config of the engine, and the price of the same plan
    assert Strategy.from_json(plan.to_json()) == plan
    assert TeraPipeConfig.from_deepspeed(plan.to_deepspeed()).enabled
    again = price_strategy(plan, question["size"], cluster)
    assert again.predicted_s == pytest.approx(plan.predicted_s, rel=1e-9) and again.memory_bytes == plan.memory_bytes


TIGHT: dict[str, Any] = {"size": SIZES[0], "device": "h100", "nodes": 1}
TIGHT |= {"global_batch_size": 1, "sequence_length": 16384}


@pytest.mark.parametrize(("device", "hosts"), [((4, 8), (20,)), ((3,), (1, 20))], ids=["device memory", "host memory"])
def test_more_memory_never_makes_a_plan_slower(device: tuple[float, ...], hosts: tuple[float, ...]) -> None:
    plans = [best(**TIGHT, memory_limit_gb=limit, host_gb=host, options={}) for limit in device for host in hosts]
    seconds = [math.inf if plan is None else plan.predicted_s for plan in plans]
    assert seconds == sorted(seconds, reverse=True) and len(set(seconds)) > 1


FIXED: dict[str, Any] = OPTIONS | {"data_parallel": [1, 2], "schedule": sorted(NAMES)}
FIXED |= dict.fromkeys(("stages", "chunks_per_stage"), (1, 2, 4))


@pytest.mark.sample(2)
@pytest.mark.parametrize("option", sorted(FIXED))
@pytest.mark.parametrize(
    ("nodes", "limit", "batch", "length"), [(2, None, 1, 4096), (1, 4, 2, 4096)], ids=["one sequence", "tight memory"]
)
def test_fixed_options_never_save_time(option: str, nodes: int, limit: float | None, batch: int, length: int) -> None:
    question: dict[str, Any] = {"size": SIZES[0], "device": "h100", "nodes": nodes, "memory_limit_gb": limit}
    question |= {"global_batch_size": batch, "sequence_length": length, "host_gb": None}
    free = free_s(**question)
    plans = [best(**question, options={option: value}) for value in FIXED[option]]
    assert [plan.predicted_s for plan in plans if plan is not None and plan.predicted_s < free * (1 - 1e-9)] == []


@functools.cache
def free_s(**question: Any) -> float:
    plan = best(**question, options={})
    assert plan is not None
    return plan.predicted_s


def test_stages_recompute_where_copies_to_the_host_take_longer() -> None:
    """Everything fits without recomputation, and a slow link makes a copy more expensive than a second forward."""
    card = dataclasses.replace(device_card("h100"), host_link=LinkCard(1e9, 1e-5, "slow"), host_memory_bytes=None)
    question: dict[str, Any] = {"global_batch_size": 32, "sequence_length": 16384, "stages": 2, "schedule": "terapipe"}
    plan = plan_strategy(SIZES[0], Cluster(card, 1, 2), offload_activations=True, **question)
    assert plan.recompute == "full"
