"""``"schedule": "auto"`` with a profile from a file: layers go where the best schedule of all wants them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import terapipe_ds
from terapipe_ds.runtime.engine import build as engine_build
from terapipe_ds.runtime.layout.parted_module import PartedModule
from terapipe_ds.runtime.planning import schedule_choice
from terapipe_ds.schedule import placement_for
from tests.distributed.engines import (
    LENGTH,
    batches,
    build,
    config,
    differences,
    engine_of,
    gpt_layers,
    logged,
    pipeline_module,
    raised_by,
    section,
    stock_run,
    train,
    violations,
)
from tests.distributed.harness import rank_pool

SHARES = [0.25] * 4, [0.25, 0.25, 0.5]
AUTO = {"schedule": "auto", "slices": "auto", "granularity_tokens": 4}


def job_measure(folder: str) -> None:
    planned = section(**{**AUTO, "schedule": "seq1f1b", "planner": {"cache_dir": folder}})
    with engine_of(gpt_layers(), planned) as engine:
        train(engine, batches(1))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of the two stages of this very model. Copy it."""
    folder = tmp_path_factory.mktemp("profiles")
    rank_pool(2).run(job_measure, folder=str(folder))
    (file,) = [f for f in folder.glob("profile-*.json") if ".memory." not in f.name]
    return file


def by_hand(measured: Path, send_s: float, folder: Path, num_bytes: int | None = None, **key: Any) -> Path:
    """The profile with other numbers: two parts take the same, and so do four; B and W take as long as F."""
    document = json.loads(measured.read_text())
    document["key"].update(key)
    for part in document["parts"]:
        for sample in part["samples"]:
            forward_s = 1e-3 * (100 + sample["tokens"])
            sample.update(forward_s=forward_s, backward_s=2 * forward_s, weight_s=forward_s)
        part["overheads"] = []
    # seven layers, 4 and 3 of them on a stage; of four parts the last has the last one alone
    for index, share in zip(document["layers"]["kind_of"], [*SHARES[0], *SHARES[1]], strict=True):
        for sample in document["layers"]["kinds"][index]["samples"]:
            forward_s = share * 1e-3 * (100 + sample["tokens"])
            sample.update(forward_s=forward_s, backward_s=2 * forward_s, weight_s=forward_s)
    for link in document["links"]:
        link.update(send_s=send_s, num_bytes=num_bytes)
    path = folder / "profile.json"
    path.write_text(json.dumps(document))
    return path


def job_train(
    path: str, partition: list[int] | None = None, **changes: Any
) -> tuple[dict[str, float], dict[tuple[int, int], int], str, list[str]]:
    planned = section(**AUTO, planner={"profile": path}, partition=partition)
    with logged() as lines, engine_of(gpt_layers(), planned, **changes) as engine:
        assert partition is None or list(engine.module.parts) == partition
        ours = train(engine, batches(2))
        found = dict(engine._layout.placement), engine._plans._planner.known(LENGTH).schedule
    return differences(ours, stock_run()), *found, [line for line in lines if line.startswith('schedule "auto"')]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("num_bytes", "schedules"), [(None, ("zbv",)), (10**12, ("chimera-seq", "chimera"))])
def test_the_best_schedule_of_all_runs(
    measured: Path, tmp_path: Path, num_bytes: int | None, schedules: tuple[str, ...]
) -> None:
    """Two micro-batches on two stages with F = B = W: on a V the second stage waits for half as long as on a line, and
    with one micro-batch in each direction nobody waits. But what sums of gradients take must be known, and little."""
    first, second = rank_pool(2).run(job_train, path=str(by_hand(measured, 1e-6, tmp_path, num_bytes)))
    assert not violations([first[0], second[0]])
    (line,) = first[3]
    assert first[1] == second[1] == placement_for(schedules[0], 2, 2), line
    assert first[2] == second[2] and first[2] in schedules
    assert f"laid out for {schedules[0]}" in line and "23 tokens and 2 micro-batches" in line
    assert second[3] == []


@pytest.mark.parametrize(
    ("partition", "send_s", "num_bytes", "placed"),
    [
        ([0, 2, 3, 4, 7], 10.0, None, ("zbv", "interleaved")),  # other schedules have two parts, which is not to be
        ([0, 5, 7], 1e-6, None, ("1f1b",)),  # so is the V, which would be faster
        ([0, 4, 7], 1e-6, 10**12, ("chimera-seq",)),
    ],
)
def test_only_schedules_with_the_parts_of_a_partition_by_hand(
    measured: Path, tmp_path: Path, partition: list[int], send_s: float, num_bytes: int | None, placed: tuple[str, ...]
) -> None:
    path = str(by_hand(measured, send_s, tmp_path, num_bytes))
    first, second = rank_pool(2).run(job_train, path=path, partition=partition)
    assert not violations([first[0], second[0]])
    chunks = 1 if placed == ("1f1b",) else 2
    assert first[1] == second[1] and first[1] in [placement_for(name, 2, chunks) for name in placed], first[3]
    assert first[2] == second[2]


def test_a_partition_that_no_schedule_has(measured: Path, tmp_path: Path) -> None:
    path = str(by_hand(measured, 1e-6, tmp_path))
    for kind, text in rank_pool(2).run(job_partition_refused, path=path, partition=[0, 1, 3, 7]):
        assert kind == "TeraPipeConfigError" and "[0, 1, 3, 7]: has 3 parts" in text, text


def job_partition_refused(path: str, partition: list[int]) -> tuple[str, str]:
    return raised_by(lambda: build(gpt_layers(), section(**AUTO, planner={"profile": path}, partition=partition)))


def test_layers_stay_where_links_are_slow(measured: Path, tmp_path: Path) -> None:
    """On a V a micro-batch crosses links twice as often, on a loop three times."""
    first, second = rank_pool(2).run(job_train, path=str(by_hand(measured, 10.0, tmp_path)))
    assert not violations([first[0], second[0]])
    assert first[1] == second[1] == {(0, 0): 0, (1, 0): 1} and first[2] == second[2]
    assert "layers stay" in first[3][0]


def test_a_profile_that_does_not_know_its_layers(measured: Path, tmp_path: Path) -> None:
    """One of an earlier version serves the cut that it was measured with."""
    first, _ = rank_pool(2).run(job_train, path=str(by_hand(measured, 1e-6, tmp_path, layers_fingerprint=None)))
    assert first[1] == {(0, 0): 0, (1, 0): 1} and "does not tell what each layer takes" in first[3][0]


def job_cut_otherwise(path: str) -> tuple[list[int], list[float]]:
    terapipe = section(slices="auto", granularity_tokens=4, planner={"profile": path})
    with engine_of(gpt_layers(), terapipe, module={"partition_method": "type:Decoder"}) as engine:
        train(engine, batches(1))
        planner = engine._plans._planner
        (profile,) = planner._profiles.values()
        with mock.patch.object(schedule_choice, "plan_slices", wraps=schedule_choice.plan_slices) as search:
            planner._plan(LENGTH, profile)
        return list(engine.module.parts), [costs.forward_s(23, 0) for costs in search.call_args.args[0]]


def test_costs_of_another_cut_of_the_same_layers(measured: Path, tmp_path: Path) -> None:
    """Measured with 4 and 3 layers on the two stages, 0.123 s each; the run has 3 and 4."""
    path = by_hand(measured, 1e-6, tmp_path)
    (bounds, costs), _ = rank_pool(2).run(job_cut_otherwise, path=str(path))
    assert bounds == [0, 3, 7] and costs == pytest.approx([0.75 * 0.123, 1.25 * 0.123])


def job_refused(path: str, layers: dict[str, Any], **changes: Any) -> tuple[str, str, list[bool]]:
    """Return the refusal, and whether layers were laid out as they stood."""
    plain: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        original = engine_build.lay_out
        patch.setattr(engine_build, "lay_out", lambda m, at, *a: plain.append(at.is_plain) or original(m, at, *a))
        terapipe = section(**AUTO, planner={"profile": path})
        return *raised_by(lambda: build(gpt_layers(**layers), terapipe, **changes)), plain


def job_fails(path: str, rank: int) -> str:
    """An iterator over parameters that breaks on one rank."""

    def parameters() -> Iterator[torch.nn.Parameter]:
        if torch.distributed.get_rank() == rank:
            raise LookupError("no such parameter")
        yield from module.parameters()

    module = pipeline_module(gpt_layers())
    given = config(terapipe=section(**AUTO, planner={"profile": path}))
    with pytest.raises(LookupError) as caught:
        terapipe_ds.initialize(model=module, model_parameters=parameters(), config=given)
    return str(caught.value)


def test_what_fails_on_one_rank_is_raised_on_all(measured: Path, tmp_path: Path) -> None:
    """Before there is a watch-dog: the others would wait for half an hour."""
    path = by_hand(measured, 1e-6, tmp_path)
    assert rank_pool(2).run(job_fails, path=str(path), rank=1, timeout_s=30) == ["no such parameter"] * 2


@pytest.mark.parametrize(
    ("layers", "changes", "named", "stays"),
    [
        ({"ffn_size": 32}, {}, "model_fingerprint", True),  # as many layers, of other sizes
        ({"init_std": 0.2}, {}, "model_fingerprint", False),  # of the same sizes: seen once the engine stands
        ({"dtype": "float32"}, {"bf16": {"enabled": True}}, "dtype: the profile has float64", False),
    ],
    ids=["sizes", "arguments", "dtype"],
)
def test_a_profile_of_another_model_with_as_many_layers_is_refused_before_there_is_a_batch(
    measured: Path, tmp_path: Path, layers: dict[str, Any], changes: dict[str, Any], named: str, stays: bool
) -> None:
    path = str(by_hand(measured, 1e-6, tmp_path))
    for kind, message, plain in rank_pool(2).run(job_refused, path=path, layers=layers, **changes):
        assert kind == "ProfileError"
        assert "the profile does not belong to this run" in message and named in message and plain == [stays]


def job_early(path: str) -> tuple[bool, Any, Any]:
    terapipe = section(**AUTO, planner={"profile": path})
    module = pipeline_module(gpt_layers())
    terapipe_ds.lay_out(module, config(terapipe=terapipe))
    own = pipeline_module(gpt_layers())
    ds_config = config(terapipe=terapipe)
    del ds_config["optimizer"]
    sgd = torch.optim.SGD(own.parameters(), lr=0.1)
    with logged() as lines:
        engine = terapipe_ds.initialize(model=own, optimizer=sgd, config=ds_config)[0]
    placement = dict(engine._layout.placement)
    engine.destroy()
    return isinstance(module, PartedModule), placement, lines


def test_what_was_made_of_layers_keeps_them(measured: Path, tmp_path: Path) -> None:
    first, second = rank_pool(2).run(job_early, path=str(by_hand(measured, 1e-6, tmp_path)))
    assert first[0] and second[0]  # lay_out moves them, for who makes an optimizer afterwards
    assert first[1] == second[1] == {(0, 0): 0, (1, 0): 1}
    assert any("but they stay, for the optimizer" in line for line in first[2])
