"""Test `terapipe.recompute`: which stages run their layers again in the backward, and that results do not change."""

import functools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from terapipe_ds.attention.call import Call
from terapipe_ds.costs.profile import Profile
from terapipe_ds.models import gpt
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.layers.measured_parts import MeasuredParts
from terapipe_ds.planner.recompute import choose_layers, recomputable_parts
from terapipe_ds.planner.recompute.choose_layers import recompute_everything
from terapipe_ds.runtime.layers.activation_checkpointing import kept_calls
from terapipe_ds.schedule import build
from terapipe_ds.simulator import Replay
from tests.distributed import engines
from tests.distributed.harness import rank_pool
from tests.distributed.hugging_face_jobs import train_family

MEASURED = {"slices": "auto", "granularity_tokens": 4}
Forwards = dict[str, float]


def forwards_per_slice(engine: Any) -> Forwards:
    """Train two batches; return how often each layer of this stage, but the output matrix, ran for a slice of the last.

    The first one brings a check of the layers with their new hooks, whose runs do not count.
    """
    count: Counter[str] = Counter()
    children = [(n, layer) for n, layer in engine.module.named_children() if not isinstance(layer, gpt.LMHead)]
    layers = {name: layer for name, layer in children if name.isdigit()}
    handles = [
        layer.register_forward_hook(lambda *_, name=name: count.update([name])) for name, layer in layers.items()
    ]
    (batch,) = engines.batches(1)
    engine.train_batch(iter(batch))
    count.clear()
    engine.train_batch(iter(batch))
    for handle in handles:
        handle.remove()
    slices = engine.slice_plan(batch[0][0].shape[1]).num_slices
    return {name: count[name] / (slices * len(batch)) for name in layers}


def job_train(stages: int, options: dict[str, Any], **changes: Any) -> tuple[dict[str, float], Forwards]:
    with engines.engine_of(engines.gpt_layers(), engines.unchecked(**changes), stages=stages, **options) as engine:
        errors = engines.differences(engines.train(engine, engines.batches(2)), engines.stock_run())
        return errors, forwards_per_slice(engine)


def job_interval_by_hand(interval: int) -> tuple[dict[str, float], Forwards]:
    """Set the interval after the engine is built, and again after its first batch."""
    with engines.engine_of(engines.gpt_layers(), engines.section()) as engine:

        def set_interval(step: int) -> None:
            engine.module.activation_checkpoint_interval = interval + step

        errors = engines.differences(engines.train(engine, engines.batches(2), set_interval), engines.stock_run())
        return errors, forwards_per_slice(engine)


def test_an_interval_that_a_program_sets_on_the_module_counts() -> None:
    found = rank_pool(2).run(job_interval_by_hand, interval=1)
    assert not engines.violations([errors for errors, _ in found])
    assert {number for _, forwards in found for number in forwards.values()} == {2.0}


NON_REENTRANT = {"pipeline": {"use_reentrant": False}}


@pytest.mark.parametrize(
    ("stages", "recompute", "again", "changes", "options"),
    [
        (2, "full", {0, 1}, {}, {}),
        (2, [1], {1}, {}, {}),
        (2, [0], {0}, {"slices": 1, "schedule": "1f1b"}, {}),
        (2, "off", set(), {}, {}),
        (2, [0], {0}, {"schedule": "zbv"}, {}),
        (2, [1], {1}, {"schedule": "seq1f1b-interleaved", "chunks_per_stage": 2}, NON_REENTRANT),
        (2, "full", {0, 1}, {"schedule": "chimera-seq"}, {}),
        (2, "full", {0, 1}, {}, engines.CHECKPOINTING["reentrant"]),  # they say the same
        (2, [0], {0}, MEASURED, NON_REENTRANT),
        (3, [2, 0], {0, 2}, {"schedule": "seq1f1b-zb"}, {}),
    ],
)  # fmt: skip
@pytest.mark.sample(2)
def test_stages_recompute_and_train_as_ever(
    stages: int, recompute: Any, again: set[int], changes: dict[str, Any], options: dict[str, Any]
) -> None:
    how = {"stages": stages, "options": options, "recompute": recompute, **changes}
    found = rank_pool(stages).run(engines.with_few_rounds, job=job_train, **how)
    assert not engines.violations([errors for errors, _ in found])
    share = 0.5 if "chimera" in changes.get("schedule", "") else 1.0  # a copy of a layer has half of the micro-batches
    for stage_id, (_, forwards) in enumerate(found):
        expected = share * (2 if stage_id in again else 1)
        assert forwards and set(forwards.values()) == {expected}, (stage_id, forwards)


def job_one_module_twice() -> list[set[float]]:
    module, ran = engines.pipeline_module(engines.gpt_layers(dtype="float32")), []
    for changes in ({"recompute": [0]}, {"recompute": [1]}, {}):
        with engines.started(module, engines.unchecked(**changes)) as engine:
            engines.train(
                engine, engines.batches(1)
            )  # with the check of the first batch, whose runs the hooks would count
            ran.append(set(forwards_per_slice(engine).values()))
    return ran


def test_the_next_engine_of_a_module_recomputes_what_its_own_section_says() -> None:
    assert rank_pool(2).run(job_one_module_twice) == [[{2.0}, {1.0}, {1.0}], [{1.0}, {2.0}, {1.0}]]


# -- layers that the planner chooses -------------------------------------------------------------------------------


@dataclass
class Chosen:
    """Hold the results of one rank: with a tight limit, and with a limit that everything fits in."""

    planned: tuple[tuple[int, ...], ...]  # for all stages, by the profile
    errors: dict[str, float]
    forwards: Forwards
    first_layer: int
    lines: list[str]
    roomy: Forwards
    too_little: tuple[str, str]
    kept: int  # calls of attention


def job_chosen(folder: str, schedule: str, slices: Any, options: dict[str, Any], keeps: bool) -> Chosen:
    how: dict[str, Any] = {"schedule": schedule, "granularity_tokens": 4, "recompute": "auto", "keep_attention": keeps}
    planner = {"cache_dir": folder, "memory_limit_gb": 1e3}
    with engines.engine_of(engines.gpt_layers(), engines.unchecked(**how, slices="auto", planner=planner)) as engine:
        engines.train(engine, engines.batches(1))
        torch.distributed.barrier()  # rank 0 has written the profile
        (path,) = Path(folder).iterdir()
        bounds = [int(bound) for bound in engine.module.parts]
        profile = Profile.load(path)
        parts = recomputable_parts(MeasuredParts.of_profile(profile), bounds)
        assert profile.layers is not None
        timed = [one for kind in profile.layers.kinds for one in kind.samples if one.attention_s is not None]
        # a second forward that takes attention from the first is shorter
        assert bool(timed) == keeps and all(0 < (one.attention_s or 0) < one.forward_s for one in timed)
        assert keeps == any(layer.again_costs is not None for part in parts for layer in part.layers)
    plan, order = SlicePlan.equal(engines.LENGTH, slices, 4), build(schedule, 2, 2, slices)
    replay = Replay.of(order)
    least, most = (
        max(replay.peak_bytes(plan, choice.memory))
        for choice in (recompute_everything(parts, plan, 2), choose_layers(parts, order, plan, 1e15))
    )
    limit = 0.5 * (least + most)
    planned = choose_layers(parts, order, plan, limit).layers

    def with_limit(limit_bytes: float) -> dict[str, Any]:
        planner = {"cache_dir": folder, "memory_limit_gb": limit_bytes / 1e9}
        return engines.unchecked(**how, slices=slices, planner=planner)

    with engines.logged() as lines, engines.engine_of(engines.gpt_layers(), with_limit(limit), **options) as engine:
        errors = engines.differences(engines.train(engine, engines.batches(2)), engines.stock_run())
        calls = kept_calls(engine.module)
        forwards, first = forwards_per_slice(engine), int(engine.module._local_start)
        engine.use_slice_plan(plan)  # nothing was chosen for slices by hand
        assert set(forwards_per_slice(engine).values()) == {2.0}
    with engines.engine_of(engines.gpt_layers(), with_limit(2 * most), **options) as engine:
        engines.train(engine, engines.batches(1))
        roomy = forwards_per_slice(engine)
    with engines.engine_of(engines.gpt_layers(), with_limit(0.5 * least), **options) as engine:
        too_little = engines.raised_by(lambda: engines.train(engine, engines.batches(1)))
    kept, lines = 0 if calls is None else calls.num, [line for line in lines if "recompute" in line]
    return Chosen(planned, errors, forwards, first, lines, roomy, too_little, kept)


@pytest.mark.parametrize(
    ("schedule", "slices", "options", "keeps"),
    [
        ("seq1f1b", 3, {}, True),
        ("seq1f1b", 3, {}, False),
        ("seq1f1b-zb", 2, NON_REENTRANT, False),
        ("1f1b", 1, {}, False),
        ("1f1b", 1, {}, True),
    ],
)
@pytest.mark.sample(2)
def test_the_layers_that_the_planner_chooses_recompute_and_no_other(
    tmp_path: Path, schedule: str, slices: int, options: dict[str, Any], keeps: bool
) -> None:
    how = {"folder": str(tmp_path), "schedule": schedule, "slices": slices, "options": options, "keeps": keeps}
    ranks = rank_pool(2).run(engines.with_few_rounds, job=job_chosen, **how)
    assert not engines.violations([one.errors for one in ranks])
    planned, text = ranks[0].planned, "\n".join(ranks[0].lines)
    assert any(one.kept for one in ranks) == keeps
    assert any(planned) and sum(map(len, planned)) < 6  # some of the layers, not all
    for stage_id, one in enumerate(ranks):
        again = {str(layer_id) for layer_id in planned[stage_id]}
        assert one.forwards == {name: 2.0 if name in again else 1.0 for name in one.forwards}, (stage_id, planned)
        assert set(one.roomy.values()) == {1.0}
        kind, message = one.too_little
        assert kind == "MemoryLimitError" and "all its layers recomputed" in message
    assert f"stage 0: layers {planned[0][0]}" in text if planned[0] else "stage 0: nothing" in text


# -- layers that recompute, and do not attend a second time ----------------------------------------------------


SLICES = 3
LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "one stage": ({}, {"recompute": [1]}),
    "dropout": ({"dropout": 0.2}, {}),
    "offloaded": ({}, {"offload_activations": True, "schedule": "terapipe", "slices": 6}),
    "split": ({}, {"schedule": "seq1f1b-zb"}),
    "whole": ({}, {"slices": 1, "schedule": "1f1b"}),
}


def kernel_runs(layers: list[Any], terapipe: dict[str, Any], dtype: str = "float32") -> tuple[Any, int]:
    """Return two steps of training, and how often a kernel of sliced attention ran forward in the second one."""
    torch.manual_seed(3)
    data = engines.batches(2)
    attend, runs = Call._attend, []

    def counted(self: Call, *tensors: Any) -> Any:
        runs.append(self.layer)
        return attend(self, *tensors)

    with engines.engine_of(layers, terapipe) as engine, mock.patch.object(Call, "_attend", counted):
        first = engines.train(engine, data[:1])
        runs.clear()
        second = engines.train(engine, data[1:])
    return [first, second], len(runs)


def job(name: str) -> dict[str, Any]:
    model, changes = LAYERS[name]
    found = {}
    for kept in (False, True):
        terapipe = engines.unchecked(
            **{"slices": SLICES, "recompute": "full", "verify": "off", "partition": [0, 3, 7], **changes},
            keep_attention=kept,
        )
        found[kept] = kernel_runs(engines.gpt_layers("float32", **model), terapipe)
    (full, runs), (ours, kept_runs) = found[False], found[True]
    pairs = [
        ([*one.gradients, one.parameters], [*other.gradients, other.parameters])
        for one, other in zip(full, ours, strict=True)
    ]
    # a whole sequence has torch's own function where nothing is kept
    is_same = torch.equal if name != "whole" else functools.partial(torch.allclose, rtol=1e-4, atol=1e-5)
    same = all(is_same(a[key], b[key]) for one, other in pairs for a, b in zip(one, other, strict=True) for key in a)
    losses = [[one.returned for one in runs_of] for runs_of in (full, ours)]
    if name == "whole":
        losses = [[[round(value, 5) for value in one] for one in runs_of] for runs_of in losses]
    with torch.random.fork_rng():
        wide = engines.unchecked(**{"slices": SLICES, "recompute": "full", **changes}, keep_attention=True)
        with engines.engine_of(engines.gpt_layers(), wide) as engine:
            errors = engines.differences(engines.train(engine, engines.batches(2)), engines.stock_run())
    return {"same": same and losses[0] == losses[1], "runs": (runs, kept_runs), "errors": errors}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.sample(1)
def test_the_same_bits_with_half_of_the_kernels(name: str) -> None:
    ranks = rank_pool(2).run(job, name=name)
    slices = LAYERS[name][1].get("slices", SLICES)
    for stage_id, found in enumerate(ranks):
        assert found["same"], (name, stage_id)
        full, kept = found["runs"]
        assert kept == 2 * 2 * slices, "two layers of a stage, two micro-batches"
        is_again = (
            stage_id in LAYERS[name][1].get("recompute", [0, 1]) and name != "whole"
        )  # torch's own is not counted
        assert name == "whole" or full == (2 if is_again else 1) * kept
    assert not engines.violations([found["errors"] for found in ranks])


def test_a_llama_of_transformers_equals_the_whole_model() -> None:
    pytest.importorskip("transformers", reason="needs the extra hf: pip install terapipe_ds[hf]")
    section = engines.unchecked(slices=[7, 3, 6], recompute="full", keep_attention=True)
    ranks = rank_pool(2).run(train_family, family="llama", terapipe=section, wide=False)
    assert not engines.violations([errors for errors, _ in ranks])
