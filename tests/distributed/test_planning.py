"""Test slices planned from costs that the engine measures in place, on ranks."""

import contextlib
import dataclasses
import json
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from terapipe_ds.cli import main
from terapipe_ds.costs.profile import Profile, ProfileError
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner import PlanResult, plan_slices
from terapipe_ds.runtime.engine.engine import TeraPipeEngine
from terapipe_ds.runtime.planning import choose_plan, measure_and_share
from terapipe_ds.runtime.profiling import rounds
from terapipe_ds.runtime.profiling.memory_peak import MemoryPeak
from terapipe_ds.schedule import SCHEDULE_NAMES
from tests.distributed.engines import (
    EXACT,
    LENGTH,
    ZERO1,
    Run,
    batches,
    config,
    differences,
    engine_of,
    error_of,
    gpt_layers,
    logged,
    run_training,
    step_error,
    train,
    unchecked,
    violations,
    with_few_rounds,
)
from tests.distributed.harness import rank_pool


def on_ranks(ranks: int, job: Callable[..., Any], **options: Any) -> list[Any]:
    return rank_pool(ranks).run(with_few_rounds, job=job, **options)


@contextlib.contextmanager
def measured_lengths() -> Iterator[list[int]]:
    """Record the lengths of the sequences that parts of this rank are measured for, one by one."""
    lengths: list[int] = []
    original = rounds.measure

    def noted(timer: Any, points: Any, length: int, *rest: Any) -> Any:
        lengths.append(length)
        return original(timer, points, length, *rest)

    with mock.patch.object(rounds, "measure", noted):
        yield lengths


AUTO = {"slices": "auto", "granularity_tokens": 4}


def _auto(**planner: Any) -> dict[str, Any]:
    return unchecked(**AUTO, planner=planner)


# -- training as before ------------------------------------------------------------------------------------------


def cut_anyway(*arguments: Any, **options: Any) -> PlanResult:
    """Use the planner's answer, but with several slices: models as small as these are fastest unsliced."""
    return dataclasses.replace(plan_slices(*arguments, **options), plans=(SlicePlan((9, 13, 1)),) * 2)


def _auto_then_listed(options: dict[str, Any]) -> tuple[list[int], float]:
    """Return the plan that ran, and how far a run with that plan as a list is from it, random numbers included."""
    torch.manual_seed(5)
    layers = options.pop("layers", {})
    cut = mock.patch.object(choose_plan, "plan_slices", cut_anyway)
    with cut, engine_of(gpt_layers(**layers), _auto(), **options) as engine:
        planned = train(engine, batches(2))
        lengths = list(engine.slice_plan(LENGTH).lengths)
        after = torch.rand(1)
    torch.manual_seed(5)
    listed = run_training(lambda: gpt_layers(**layers), unchecked(slices=lengths), batches(2), **options)
    return lengths, error_of([vars(planned), after], [vars(listed), torch.rand(1)])


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"layers": {"dtype": "float32", "dropout": 0.2}}),
        (2, {}),
        (4, {"layers": {"tied_embedding": True}}),
        (1, {"stages": 1}),
        (4, {"layers": {"dtype": "float16"}, "fp16": {"enabled": True, "initial_scale_power": 8}}),
        (2, {"module": {"activation_checkpoint_interval": 1}}),
        (2, {"layers": {"dtype": "bfloat16"}, "bf16": {"enabled": True}, **ZERO1}),
    ],
    ids=["dropout", "plain", "tied-2x2", "one-stage", "fp16-2x2", "checkpointing", "bf16-zero1"],
)
@pytest.mark.sample(1)
def test_measuring_leaves_training_as_it_is(ranks: int, options: dict[str, Any]) -> None:
    assert on_ranks(ranks, _auto_then_listed, options=options) == [([9, 13, 1], 0.0)] * ranks


def _auto_against_stock(schedule: str, mode: str) -> tuple[dict[str, float], float, dict[str, Any], list[str]]:
    """Evaluate and train; return the differences, the plans in a checkpoint, and their log."""

    def run(engine: Any) -> tuple[float, Run]:
        with getattr(torch, mode)():
            evaluated = float(engine.eval_batch(iter(batches(1)[0])))
        return evaluated, train(engine, batches(2))

    with engine_of(gpt_layers(), None) as engine:
        expected, stock = run(engine)
    with logged() as lines, engine_of(gpt_layers(), {**_auto(), "schedule": schedule}) as engine:
        evaluated, ours = run(engine)
        described = engine._plans.described()
    return differences(ours, stock), abs(evaluated - expected), described, lines


@pytest.mark.parametrize(
    ("schedule", "mode"),
    [("seq1f1b", "inference_mode"), ("auto", "enable_grad"), pytest.param("auto", "no_grad", marks=pytest.mark.full)],
)
def test_an_automatic_plan_trains_as_the_stock_engine_and_is_told(schedule: str, mode: str) -> None:
    """The first batch may be an evaluation."""
    first, second = on_ranks(2, _auto_against_stock, schedule=schedule, mode=mode)
    assert violations([first[0], second[0]], EXACT) == {}
    assert max(first[1], second[1]) < 1e-5
    profile = first[2]["profile"]
    assert isinstance(profile, str) and len(profile) >= 8 and second[2]["profile"] == profile
    (plan,) = first[2]["plans"].values()
    assert plan == second[2]["plans"][str(sum(plan["slices"]))]
    (told,), of_others = ([line for line in lines if "unsliced" in line] for *_, lines in (first, second))
    assert of_others == []
    for word in ("plan", "predicted", "equal", "bubble", "memory", "seq1f1b"):
        assert word in told, told
    if schedule == "auto":
        (block,) = [line for line in first[3] if line.startswith("planned ")]
        for name in SCHEDULE_NAMES:
            assert (f" {name} " in block) == (name != "dapple"), block
        plain = ("gpipe", "1f1b", "terapipe", "seq1f1b", "zb-h1", "seq1f1b-zb")
        assert block.split("schedule  ")[1].split()[0] in plain


# -- the profile, kept and given -----------------------------------------------------------------------------------


def _measured_in(
    folder: str, count: int, granularity_tokens: int = 4, **options: Any
) -> tuple[list[int], tuple[int, ...]]:
    """Return how often each of ``count`` engines, one after the other, measured, and the last one's plan."""
    measured: list[int] = []
    layers = options.pop("layers", {})
    terapipe = {**_auto(cache_dir=folder), "granularity_tokens": granularity_tokens}
    for _ in range(count):
        with measured_lengths() as lengths, engine_of(gpt_layers(**layers), terapipe, **options) as engine:
            train(engine, batches(1))
            plan = engine.slice_plan(LENGTH).lengths  # type: ignore[attr-defined]
        measured.append(len(lengths))
    return measured, plan


@pytest.fixture(scope="module")
def measured_twice(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Return a cache with one profile, which callers copy, and the results of two engines that used it."""
    folder = tmp_path_factory.mktemp("profiles")
    return folder, on_ranks(2, _measured_in, folder=str(folder), count=2)


@pytest.fixture
def profile_file(measured_twice: tuple[Path, list[Any]], tmp_path: Path) -> Path:
    (file,) = shutil.copytree(measured_twice[0], tmp_path / "cache").glob("profile-*.json")
    return file


def test_a_second_start_measures_nothing(measured_twice: tuple[Path, list[Any]], profile_file: Path) -> None:
    first, second = measured_twice[1]
    assert first[0] == second[0] == [1, 0] and first[1] == second[1]
    profile = Profile.load(profile_file)
    assert profile.key.num_stages == len(profile.parts) == 2 and profile.key.micro_batch == 2
    assert profile.key.sequence_length == LENGTH and profile.key.dtype == "float64"
    layers = profile.layers
    assert layers is not None and layers.bounds == (0, 4, 7)  # embedding, three decoder layers; another, norm and head
    assert layers.kind_of == (0, 1, 1, 1, 1, 2, 3)  # the decoder layers are one kind, on whatever stage
    assert {link.part_id for link in profile.links} == {0, 1}
    heads, tokens = 2 * 4 * 8, 2  # 2 key heads of dimension 4 in fp64, 2 rows
    memory = [part.memory and part.memory["store_bytes_per_token"] for part in profile.parts]
    assert memory == [2 * heads * tokens * layers for layers in (3, 1)]


_HALF = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


@pytest.mark.full
@pytest.mark.parametrize(
    "runs",
    [
        # no slice of 4 tokens was measured; the memory figures include whole optimizer states
        [{"granularity_tokens": 8}, {"granularity_tokens": 4}, ZERO1],
        pytest.param([{}, {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, _HALF], marks=pytest.mark.full),
    ],
    ids=["granularity and zero", "optimizer and autocast"],
)
def test_another_run_is_measured_again(tmp_path: Path, runs: list[dict[str, Any]]) -> None:
    job = {"folder": str(tmp_path), "count": 1, "layers": {"dtype": "float32"}}
    for expected in (1, 0):
        for options in runs:
            for measured, _ in on_ranks(2, _measured_in, **job, **options):
                assert measured == [expected], options


def _measured_by_others(folder: str) -> list[int]:
    """Return how often engines measure: with more threads, with rank 1 on a machine of its own, and with neither."""
    rank = torch.distributed.get_rank()
    changes = [
        mock.patch.object(torch, "get_num_threads", lambda: 3),
        mock.patch.object(platform, "node", lambda: f"machine {rank}"),
        mock.patch.object(platform, "node", lambda: "another name for one machine"),
    ]
    counts = []
    for change in changes:
        with change:
            counts += _measured_in(folder, 1)[0]
    return counts


def test_other_threads_and_other_links_are_measured_again(profile_file: Path) -> None:
    """The cache has a profile of the same model, made in fp32 on one machine."""
    assert on_ranks(2, _measured_by_others, folder=str(profile_file.parent)) == [[1, 1, 0]] * 2


def test_a_cache_that_cannot_be_used_is_measured_again(profile_file: Path) -> None:
    profile_file.write_text(profile_file.read_text()[:99])
    for measured, _ in on_ranks(2, _measured_in, folder=str(profile_file.parent), count=2):
        assert measured == [1, 0]  # and repaired


def _with_profile(path: str, layers: dict[str, Any], **options: Any) -> tuple[str, bool]:
    """Return the refusal, and whether it came before an engine existed."""
    early = True
    with (
        pytest.raises(ProfileError) as caught,
        engine_of(gpt_layers(**layers), _auto(profile=path), **options) as engine,
    ):
        early = False
        train(engine, batches(1))
    return str(caught.value), early


@pytest.mark.parametrize(
    ("key", "layers", "options", "named"),
    [
        (None, {}, {}, "cannot read the profile"),
        ({}, {"ffn_size": 32}, {}, "model_fingerprint"),
        ({}, {"dropout": 0.1}, {}, "model_fingerprint"),  # of the same sizes
        ({}, {"dtype": "float32"}, {}, "dtype"),
        ({}, {}, {"module": {"activation_checkpoint_interval": 1}}, "activation_checkpointing"),
        ({"device": "a calculator"}, {}, {}, "a calculator"),
        ({"micro_batch": 7}, {}, {}, "micro_batch"),  # which the first batch tells
    ],
)
def test_the_profile_of_something_else_is_refused_on_every_rank(
    profile_file: Path, key: dict[str, Any] | None, layers: dict[str, Any], options: dict[str, Any], named: str
) -> None:
    if key is None:
        profile_file.unlink()
    else:
        document = json.loads(profile_file.read_text())
        document["key"].update(key)
        profile_file.write_text(json.dumps(document))
    for message, early in on_ranks(2, _with_profile, path=str(profile_file), layers=layers, **options):
        assert named in message and early == (named != "micro_batch")
        assert ("measure" if key is not None else profile_file.name) in message


def _planned_from(path: str, layers: dict[str, Any], **options: Any) -> tuple[int, ...]:
    with engine_of(gpt_layers(**layers), _auto(profile=path), **options) as engine:
        train(engine, batches(1))
        return engine.slice_plan(LENGTH).lengths  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float32", {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}),
        ("float32", _HALF),
        ("float64", {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}}),
    ],
    ids=["bf16", "autocast", "recompute"],
)
@pytest.mark.sample(1)
def test_a_run_takes_its_own_profile(tmp_path: Path, dtype: str, options: dict[str, Any]) -> None:
    """Compare profiles after DeepSpeed has made its changes while building an engine."""
    model = {"layers": {"dtype": dtype}, **options}
    (measured, plan), _ = on_ranks(2, _measured_in, folder=str(tmp_path), count=1, **model)
    (file,) = tmp_path.iterdir()
    assert measured == [1] and on_ranks(2, _planned_from, path=str(file), **model) == [plan] * 2


def test_a_profile_of_the_command_serves_the_engine(tmp_path: Path) -> None:
    model, ds_config, path = (tmp_path / name for name in ("model.json", "ds.json", "profile.json"))
    fields = gpt_layers(dtype="float32")[0].module_args[0].model_dump()
    model.write_text(json.dumps(fields))
    ds_config.write_text(json.dumps(config(terapipe=_auto())))
    files = ["--config", str(ds_config), "--model", str(model), "--out", str(path)]
    assert on_ranks(1, main, argv=["profile", *files, "--stages", "2", "--sequence-length", str(LENGTH)]) == [0]
    cut = {"partition_method": "parameters"}  # as the command cuts, and DeepSpeed by default
    plans = on_ranks(2, _planned_from, path=str(path), layers={"dtype": "float32"}, module=cut)
    assert plans[0] == plans[1] and sum(plans[0]) == LENGTH


# -- limits and lengths --------------------------------------------------------------------------------------------


def _limited(limit_gb: float, counts_bytes: bool) -> tuple[str, str]:
    """Return the refusal; ``counts_bytes``: whether rank 0 can measure memory, which a profiler prevents."""
    here = torch.distributed.get_rank() == 0 and not counts_bytes
    counts = mock.patch.object(MemoryPeak, "is_available", staticmethod(lambda: not here))
    with counts, engine_of(gpt_layers(), _auto(memory_limit_gb=limit_gb)) as engine:
        return step_error(engine)


@pytest.mark.parametrize(
    ("limit_gb", "counts_bytes", "expected"),
    [
        (1e-6, True, "MemoryLimitError: .*on stage 0.*more memory"),
        (1.0, False, r"TeraPipeConfigError: .*memory_limit_gb = 1\.0.*start the profiler after the first batch"),
    ],
)
def test_a_memory_limit_that_is_not_met_or_not_measured(limit_gb: float, counts_bytes: bool, expected: str) -> None:
    for refusal in on_ranks(2, _limited, limit_gb=limit_gb, counts_bytes=counts_bytes):
        assert re.match(expected, ": ".join(refusal), re.DOTALL), refusal


def _too_short() -> tuple[str, str]:
    with engine_of(gpt_layers(), unchecked(slices="auto", granularity_tokens=24)) as engine:
        refusal = step_error(engine)
        train(engine, batches(1, length=24))  # nobody was left waiting
        assert step_error(engine) == ("", ""), "after longer sequences one may be shorter than a granule"
    return refusal


def test_a_granule_longer_than_the_first_sequences_is_an_error_on_every_rank() -> None:
    for kind, message in on_ranks(4, _too_short):
        assert re.search(r"TeraPipeConfigError: .*granularity_tokens = 24: .* at most 23", f"{kind}: {message}")


def _lengths_and_rows() -> tuple[dict[str, float], list[int], list[tuple[int, ...]]]:
    """Train with a length that has a plan by hand, new ones, and micro-batches of another size in turns."""
    mixed = [*batches(1, 1, length=31)[0], *batches(1, 1, first_seed=7, length=17)[0]]
    data = [*batches(1), *batches(1, first_seed=1, length=31), mixed]
    stock = run_training(gpt_layers, None, data, stages=1)  # with more it cannot mix lengths in a batch
    with measured_lengths() as calls, engine_of(gpt_layers(), _auto()) as engine:
        assert isinstance(engine, TeraPipeEngine)
        engine.use_slice_plan(SlicePlan((12, 11)))
        ours = train(engine, data)
        plans = [engine.slice_plan(length).lengths for length in (LENGTH, 31, 17)]
        for rows in (4, 2):
            engine.set_train_micro_batch_size(rows)
            train(engine, batches(1, num_micro_batches=engine.micro_batches, rows=rows, length=31))
    return differences(ours, stock), calls, plans


def test_what_is_new_is_measured_once_and_what_is_set_by_hand_never() -> None:
    results = on_ranks(2, _lengths_and_rows)
    assert violations([errors for errors, *_ in results], EXACT) == {}
    for _, calls, plans in results:
        assert calls == [31, 31], "what was measured for 31 tokens serves 17 as well, but not other rows"
        assert plans[0] == (12, 11) and [sum(plan) for plan in plans] == [LENGTH, 31, 17]


def _many_lengths(section: dict[str, Any]) -> tuple[dict[str, float], list[int], list[list[int]]]:
    """Train lengths between 17 and 24. Return errors, planned lengths, and starts by length."""
    lengths = [24, 21, 22, 17, 19, 20, 23, 18]
    micro_batches = [batches(1, 1, first_seed=seed, length=length)[0] for seed, length in enumerate(lengths)]
    data = [[*first, *second] for first, second in zip(micro_batches[::2], micro_batches[1::2], strict=True)]
    planned, plan = [], measure_and_share.best_without_moving

    def noted(stage: Any, cuts: Any, length: int, *rest: Any) -> Any:
        planned.append(length)
        result, lines = plan(stage, cuts, length, *rest)
        even = SlicePlan.equal(length, 3, 4)  # models as small as these are fastest unsliced
        return dataclasses.replace(result, plans=(even,) * len(result.plans)), lines

    stays = mock.patch.object(measure_and_share.AutoPlanner, "misjudged", return_value=[])
    with (
        mock.patch.object(measure_and_share, "best_without_moving", noted),
        stays,
        engine_of(gpt_layers(), section) as ours,
    ):
        errors = differences(train(ours, data), run_training(gpt_layers, None, data, stages=1))
        starts = [list(ours.slice_plan(length).starts) for length in sorted(lengths)]  # type: ignore[attr-defined]
    return errors, planned, starts


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("more", "searched"),
    [
        pytest.param({}, [24, 21, 17], id="the nearest multiple of 4"),
        pytest.param({"slices": 3, "schedule": "auto"}, [24, 17, 20], id="a number of slices"),
        pytest.param({"planner": {"memory_limit_gb": 9}}, [24, 17, 20], id="a limit for each length"),
    ],
)
def test_lengths_around_a_multiple_of_the_granularity_share_one_search(
    more: dict[str, Any], searched: list[int]
) -> None:
    results = on_ranks(2, _many_lengths, section=_auto() | more)
    assert violations([errors for errors, *_ in results], EXACT) == {}
    assert [planned for _, planned, _ in results] == [searched, []], "rank 0 plans"
    assert [starts for *_, starts in results] == [[[0, 8, 16]] * 8] * 2


def _listed(section: dict[str, Any]) -> dict[str, float]:
    stock = run_training(gpt_layers, None, batches(2), stages=1)
    return differences(run_training(gpt_layers, unchecked(**section), batches(2)), stock)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "more",
    [{"schedule": "auto"}, {"recompute": "auto", "planner": {"memory_limit_gb": 1.0}}],
    ids=["schedule", "recompute"],
)
def test_listed_slices_within_a_granule_are_measured(more: dict[str, Any]) -> None:
    section = {"slices": [9, 13, 1], "granularity_tokens": 64, **more}
    assert violations(on_ranks(2, _listed, section=section), EXACT) == {}


def _replicas_with_other_lengths() -> list[int]:
    """Train two pipelines whose batches differ in length: both learn of both lengths."""
    with engine_of(gpt_layers(), _auto()) as engine:
        train(engine, batches(1, length=31 if engine.grid.get_data_parallel_rank() else LENGTH))
        return [sum(engine.slice_plan(length).lengths) for length in (LENGTH, 31)]  # type: ignore[attr-defined]


def test_pipelines_plan_together_whatever_their_lengths() -> None:
    assert on_ranks(4, _replicas_with_other_lengths) == [[LENGTH, 31]] * 4
