"""Test ``"schedule": "auto"`` with a profile from a file: layers stay, and the log names a faster layout."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import terapipe_ds
from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.runtime.planning import choose_plan
from terapipe_ds.schedule.placement import LOOPED, V_SHAPED
from tests.distributed import engines
from tests.distributed.harness import rank_pool

SHARES = [0.25] * 4, [0.25, 0.25, 0.5]
AUTO = {"schedule": "auto", "slices": "auto", "granularity_tokens": 4}


def job_measure(folder: str) -> None:
    planned = engines.unchecked(**{**AUTO, "schedule": "seq1f1b", "planner": {"cache_dir": folder}})
    with engines.engine_of(engines.gpt_layers(), planned) as engine:
        engines.train(engine, engines.batches(1))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a profile of the two stages of this very model. Copy it."""
    folder = tmp_path_factory.mktemp("profiles")
    rank_pool(2).run(engines.with_few_rounds, job=job_measure, folder=str(folder))
    (file,) = [f for f in folder.glob("profile-*.json") if ".memory." not in f.name]
    return file


def by_hand(measured: Path, send_s: float, folder: Path, num_bytes: int | None = None, **key: Any) -> Path:
    """Return the profile with other numbers: two parts take the same, and so do four; B and W take as long as F."""
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


def job_train(path: str, **changes: Any) -> tuple[dict[str, float], bool, float, str]:
    """Train two steps; return the differences, whether the layout is plain, the predicted seconds, the plan's log."""
    planned = engines.unchecked(**{**AUTO, "planner": {"profile": path}, **changes})
    with engines.logged() as lines, engines.engine_of(engines.gpt_layers(), planned) as engine:
        ours = engines.train(engine, engines.batches(2))
        found = engine._layout.is_plain, engine._plans._choice(engines.LENGTH).predicted.predicted_s
    return (
        engines.differences(ours, engines.stock_run()),
        *found,
        "\n".join(line for line in lines if line.startswith("planned ")),
    )


def test_what_the_log_recommends_trains_as_fast_as_predicted(measured: Path, tmp_path: Path) -> None:
    """Two micro-batches on two stages with F = B = W: with two parts per stage the second waits for half as long."""
    path = str(by_hand(measured, 1e-6, tmp_path, num_bytes=1))  # the sums of gradients, of chimera, take too long
    first, second = rank_pool(2).run(job_train, path=path)
    assert not engines.violations([first[0], second[0]])
    assert first[1] and second[1] and first[2] == second[2]  # no layer has moved
    advice = next(line for line in first[3].splitlines() if "needs another layout of the layers" in line)
    gain = float(advice.split("take ")[1].split("%")[0]) / 100
    changes = json.loads("{" + advice.split("set ")[1].removesuffix(" to try it") + "}")
    assert changes["schedule"] in V_SHAPED + LOOPED and len(changes["partition"]) == 5 and gain > 0.01
    moved, other = rank_pool(2).run(job_train, path=path, **changes)
    assert not engines.violations([moved[0], other[0]])
    assert not moved[1] and moved[2] == pytest.approx((1 - gain) * first[2], rel=2e-3)  # the advice has one digit


def test_a_recommended_partition_trains_as_fast_as_predicted(measured: Path, tmp_path: Path) -> None:
    """The second stage has seven eighths of the work."""
    path, changes = str(by_hand(measured, 1e-6, tmp_path)), {"schedule": "1f1b", "granularity_tokens": engines.LENGTH}
    first, _ = rank_pool(2).run(job_train, path=path, partition=[0, 1, 7], **changes)
    assert "less time than [0, 1, 7]" in first[3], first[3]
    advice = next(line.strip() for line in first[3].splitlines() if "less time than [0, 1, 7]" in line)
    assert advice.startswith('"partition": [0, 4, 7] would take'), advice
    gain = float(advice.split("take ")[1].split("%")[0]) / 100
    moved, other = rank_pool(2).run(job_train, path=path, partition=[0, 4, 7], **changes)
    assert not engines.violations([first[0], moved[0], other[0]])
    assert "would take" not in moved[3] and moved[2] == pytest.approx((1 - gain) * first[2], rel=2e-3)


def job_cut_otherwise(path: str) -> tuple[list[int], list[float]]:
    terapipe = engines.unchecked(slices="auto", granularity_tokens=4, planner={"profile": path})
    with engines.engine_of(engines.gpt_layers(), terapipe, module={"partition_method": "type:Decoder"}) as engine:
        engines.train(engine, engines.batches(1))
        planner = engine._plans._planner
        (profile,) = planner.profiles._known.values()
        plan_slices = mock.patch.object(choose_plan, "plan_slices", wraps=choose_plan.plan_slices)
        with plan_slices as search, mock.patch.object(planner, "_note"):  # the watch-dog takes notes within batches
            planner._plan(engines.LENGTH, profile)
        return list(engine.module.parts), [costs.forward_s(23, 0) for costs in search.call_args.args[0]]


def test_costs_of_another_cut_of_the_same_layers(measured: Path, tmp_path: Path) -> None:
    """Measured with 4 and 3 layers on the two stages, 0.123 s each; the run has 3 and 4."""
    path = by_hand(measured, 1e-6, tmp_path)
    (bounds, costs), _ = rank_pool(2).run(job_cut_otherwise, path=str(path))
    assert bounds == [0, 3, 7] and costs == pytest.approx([0.75 * 0.123, 1.25 * 0.123])


def job_limited(path: str) -> str:
    planner = {"profile": path, "memory_limit_gb": 1}
    with engines.engine_of(engines.gpt_layers(), engines.unchecked(**AUTO, planner=planner)) as engine:
        with pytest.raises(TeraPipeConfigError) as caught:
            engines.train(engine, engines.batches(1))
        return str(caught.value)


def test_bytes_in_a_file_are_of_another_run(measured: Path, tmp_path: Path) -> None:
    path = by_hand(measured, 1e-6, tmp_path)
    for told in rank_pool(2).run(job_limited, path=str(path)):
        assert "memory_limit_gb = 1.0: memory was not measured, the profile is from a file" in told


def job_fails(path: str, rank: int) -> str:
    """Pass an iterator over parameters that breaks on one rank."""

    def parameters() -> Iterator[torch.nn.Parameter]:
        if torch.distributed.get_rank() == rank:
            raise LookupError("no such parameter")
        yield from module.parameters()

    module = engines.pipeline_module(engines.gpt_layers())
    ds_config = engines.config(terapipe=engines.unchecked(**AUTO, planner={"profile": path}))
    with pytest.raises(LookupError) as caught:
        terapipe_ds.initialize(model=module, model_parameters=parameters(), config=ds_config)
    return str(caught.value)


def test_what_fails_on_one_rank_is_raised_on_all(measured: Path, tmp_path: Path) -> None:
    """Before there is a watch-dog: the others would wait for half an hour."""
    path = by_hand(measured, 1e-6, tmp_path)
    assert rank_pool(2).run(job_fails, path=str(path), rank=1, timeout_s=30) == ["no such parameter"] * 2
