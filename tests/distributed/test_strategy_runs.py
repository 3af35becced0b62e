"""Test executed strategies: the placement on machines, the section's values from the file, the refusals."""

import contextlib
import functools
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.launcher import runner

import terapipe_ds
from terapipe_ds.config.strategy_file import sizes_of
from terapipe_ds.planner.strategy import Strategy
from terapipe_ds.strategy import DATA_FIRST, PIPE_FIRST
from tests.distributed import engines
from tests.distributed.harness import rank_pool

Place = tuple[int, int]
"""(pipe_id, data_id)."""


def strategy_of(**changes: Any) -> Strategy:
    """Return a strategy for four ranks on two machines and the seven layers of `gpt_layers`."""
    fields: dict[str, Any] = {
        "axes": list(PIPE_FIRST), "dims": [2, 2, 1], "devices_per_node": 2, "partition": [0, 3, 7],
        "schedule": "seq1f1b", "slices": [9, 8, 6], "micro_batch_size": 2, "accumulation": 2, "recompute": [1],
        "zero_stage": 0, "dtype": "float32", "predicted_s": 1.0, "lower_bound_s": 1.0, "memory_bytes": [1, 1],
    }  # fmt: skip
    return Strategy(**fields | changes)


def written(folder: Path, **changes: Any) -> str:
    path = folder / "strategy.json"
    path.write_text(strategy_of(**changes).to_json())
    return str(path)


def ds_config_of(path: str, *without: str, section: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    whole = engines.config(
        train_batch_size=8, terapipe={"enabled": True, "strategy": path, **(section or {})}, **changes
    )
    return {key: value for key, value in whole.items() if key not in without}


@contextlib.contextmanager
def engine_by(path: str | None, *without: str, layers: dict[str, Any] | None = None, **changes: Any) -> Iterator[Any]:
    """Yield an engine by the strategy in a file; None: DeepSpeed's own engine on the topology that it makes."""
    made = engines.gpt_layers(**(layers or {}))
    if path is None:
        with engines.engine_of(made, None, **changes) as engine:
            yield engine
        return
    topology = terapipe_ds.topology_of(Strategy.from_json(Path(path).read_text()))
    module = engines.pipeline_module(made, None, topology=topology)
    engine = terapipe_ds.initialize(model=module, config=ds_config_of(path, *without, **changes))[0]
    engines.reduce_in_fp64(engine)
    try:
        yield engine
    finally:
        engine.destroy()


def place_of(engine: Any) -> Place:
    return engine.stage_id, engine.grid.get_data_parallel_id()


def data_of(engine: Any, steps: int = 2) -> list[Any]:
    return engines.batches(steps, first_seed=1000 * engine.grid.get_data_parallel_id())


# --- a placement is executed

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def job_placed(
    path: str, layers: dict[str, Any], **changes: Any
) -> tuple[Place, engines.Run, list[int], dict[str, Any]]:
    with engine_by(path, *SIZES, layers=layers, **changes) as engine:
        settled = {
            "sizes": (engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()),
            "parts": list(engine.module.parts),
            "schedule": engine.terapipe_config.schedule,
            "recomputes": engine.module.activation_checkpoint_interval,
            "topology": {(at.pipe, at.data, at.model): r for at, r in engine.module.topology().mapping.items()},
        }
        run, pipeline = engines.train(engine, data_of(engine)), list(engine.grid.pp_group)
        settled["slices"] = list(engine.slice_plan(engines.LENGTH).lengths)
        return place_of(engine), run, pipeline, settled


def job_stock(layers: dict[str, Any], **changes: Any) -> tuple[Place, engines.Run]:
    with engine_by(None, layers=layers, **changes) as engine:
        return place_of(engine), engines.train(engine, data_of(engine))


@functools.cache
def stock_runs(zero_stage: int = 0, **layers: Any) -> dict[int, engines.Run]:
    """Return the results of DeepSpeed's own engine in its own placement, of all stages together, by replica."""
    zero = {"stage": zero_stage}
    found = sorted(rank_pool(4).run(job_stock, layers=layers, zero_optimization=zero), key=lambda one: one[0])
    runs = {replica_id: engines.Run() for (_, replica_id), _ in found}
    for (_, replica_id), run in found:
        whole = runs[replica_id]
        whole.losses, whole.returned = run.losses or whole.losses, run.returned
        whole.gradients = [{**a, **b} for a, b in zip(whole.gradients or [{}] * 2, run.gradients, strict=True)]
        whole.parameters |= run.parameters
    return runs


def machines_by_rank(command: str) -> list[str]:
    """Return the host of each rank as DeepSpeed's launcher numbers them: host by host, in the order of the file."""
    arguments = runner.parse_args(shlex.split(command)[1:])
    hosts = list(runner.fetch_hostfile(arguments.hostfile).items())[: arguments.num_nodes]
    return [host for host, slots in hosts for _ in range(min(slots, arguments.num_gpus))]


TIED, FP32 = {"tied_embedding": True}, {"dtype": "float32"}


@pytest.mark.parametrize(
    ("axes", "layers", "zero_stage"),
    [(PIPE_FIRST, {}, 0), (DATA_FIRST, TIED, 0), (DATA_FIRST, FP32, 1), (PIPE_FIRST, FP32, 1)],
    ids=["across", "within-tied", "within-zero1", "across-zero1"],
)  # fmt: skip
@pytest.mark.sample(1)
def test_pipelines_lie_on_the_machines_of_the_placement(
    axes: tuple[str, ...], layers: dict[str, Any], zero_stage: int, tmp_path: Path
) -> None:
    """Planned by size there are six layers, and with the module's own norm seven."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("alpha slots=2\nbeta slots=2\n")
    path = written(tmp_path, axes=list(axes), zero_stage=zero_stage, partition=[0, 3, 6 + bool(layers)])
    strategy, zero = strategy_of(axes=list(axes)), {"stage": zero_stage}
    found = rank_pool(4).run(job_placed, path=path, layers=layers, zero_optimization=zero)
    stock = stock_runs(zero_stage, **layers)

    machine = machines_by_rank(strategy.launch_command(str(hostfile)))
    assert machine == ["alpha", "alpha", "beta", "beta"]
    for rank, (place, run, pipeline, settled) in enumerate(found):
        assert strategy.placement[(*place, 0)] == divmod(rank, 2)
        nodes = [strategy.placement[stage_id, place[1], 0][0] for stage_id in range(2)]
        assert [machine[r] for r in pipeline] == [["alpha", "beta"][node] for node in nodes]
        assert len({machine[r] for r in pipeline}) == (2 if axes == PIPE_FIRST else 1)
        assert settled["topology"] == {key: 2 * n + d for key, (n, d) in strategy.placement.items()}
        assert settled["sizes"] == (2, 2) and settled["parts"] == [0, 3, 7] and settled["slices"] == [9, 8, 6]
        assert settled["schedule"] == "seq1f1b" and settled["recomputes"] == place[0]
        limit = 1e-5 if layers == FP32 else engines.EXACT
        assert not engines.violations([engines.differences(run, stock[place[1]])], limit), (rank, place)


def job_as_written(text: str) -> tuple[Place, engines.Run]:
    strategy = Strategy.from_json(text)
    module = engines.pipeline_module(engines.gpt_layers(), None, topology=terapipe_ds.topology_of(strategy))
    written_config = {key: value for key, value in strategy.to_deepspeed().items() if key != "optimizer"}
    engine = terapipe_ds.initialize(model=module, config=engines.config(**written_config))[0]
    engines.reduce_in_fp64(engine)
    place, run = place_of(engine), engines.train(engine, data_of(engine))
    engine.destroy()
    return place, run


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"axes": list(DATA_FIRST), "partition": [0, 3, 6]},
        {"partition": [0, 1, 3, 4, 6], "schedule": "zbv", "chunks_per_stage": 2, "recompute": "off"},
        {"partition": [0, 2, 3, 4, 6], "schedule": "seq1f1b-interleaved", "chunks_per_stage": 2, "recompute": [0]},
        {"partition": [0, 3, 6], "schedule": "seq1f1b-zb", "recompute": "off"},
    ],
    ids=lambda changes: changes.get("schedule", "seq1f1b"),
)
def test_what_a_strategy_writes_for_deepspeed_runs_as_it_is(changes: dict[str, Any]) -> None:
    """Without the file beside it, and planned by size: embedding, four decoder layers, head."""
    text = strategy_of(**changes).to_json()
    stock = stock_runs()
    for place, run in rank_pool(4).run(job_as_written, text=text):
        assert not engines.violations([engines.differences(run, stock[place[1]])]), place


def job_save(path: str | None, folder: str) -> None:
    with engine_by(path) as engine:
        engines.train(engine, data_of(engine, 1))
        engine.save_checkpoint(folder)


def job_load(path: str | None, folder: str) -> tuple[Place, engines.Run]:
    with engine_by(path) as engine:
        engine.load_checkpoint(folder)
        return place_of(engine), engines.train(engine, data_of(engine)[1:])


@pytest.mark.parametrize(("saved", "loaded"), [(PIPE_FIRST, DATA_FIRST), (None, DATA_FIRST), (DATA_FIRST, None)])
@pytest.mark.sample(1)
def test_a_checkpoint_goes_on_in_another_order_of_the_axes(
    saved: tuple[str, ...] | None, loaded: tuple[str, ...] | None, tmp_path: Path
) -> None:
    """None is DeepSpeed's own engine on the topology that it makes, which has no model axis."""
    pool, folder = rank_pool(4), str(tmp_path / "checkpoint")
    pool.run(job_save, path=written(tmp_path, axes=list(saved)) if saved else None, folder=folder)
    found = pool.run(job_load, path=written(tmp_path, axes=list(loaded)) if loaded else None, folder=folder)
    stock = stock_runs()
    for place, run in found:
        expected = stock[place[1]]
        last = engines.Run(expected.losses[1:], expected.returned[1:], expected.gradients[1:], expected.parameters)
        assert not engines.violations([engines.differences(run, last)]), place


# --- what is refused


def job_refused(path: str, module: dict[str, Any], ds_config: dict[str, Any]) -> tuple[str, str]:
    options = {"stages": 2, **module}
    layers = engines.gpt_layers(num_layers=options.pop("num_layers", 4))
    built = engines.pipeline_module(layers, options.pop("stages"), **options)
    return engines.raised_by(lambda: terapipe_ds.initialize(model=built, config=ds_config))


@pytest.mark.parametrize(
    ("strategy", "module", "messages"),
    [
        (
            {"axes": list(DATA_FIRST)},
            {},
            ["topology=terapipe_ds.topology_of(strategy)", "{'pipe': 1, 'data': 0, 'model': 0} is on rank 1"],
        ),
        ({}, {"num_layers": 6}, ["for the 7 layers", "module has 9, 6 of them", "plan again for this model"]),
        ({"dims": [2, 4, 1], "accumulation": 1}, {}, ["is for 8 ranks", "the job has 4", "start 8, or plan again"]),
        ({"dims": [4, 1, 1], "accumulation": 4}, {}, ["has 1 replicas", "module 2", "topology_of(strategy)"]),
    ],
)
@pytest.mark.parametrize("without", [(), SIZES], ids=["sizes said", "sizes open"])
def test_a_run_of_something_else_is_refused_on_every_rank(
    strategy: dict[str, Any], module: dict[str, Any], messages: list[str], without: tuple[str, ...], tmp_path: Path
) -> None:
    if strategy.get("dims") == [4, 1, 1]:
        strategy = {**strategy, "partition": [0, 2, 4, 5, 7], "memory_bytes": [1] * 4}
    path, sizes = written(tmp_path, **strategy), sizes_of(strategy_of(**strategy))
    ds_config = {key: value for key, value in (ds_config_of(path) | sizes).items() if key not in without}
    found = rank_pool(4).run(job_refused, path=path, module=module, ds_config=ds_config)
    for kind, text in found:
        assert kind == "TeraPipeConfigError", (kind, text)
        assert "strategy.json" in text and all(message in text for message in messages), text


def job_other_length(path: str) -> tuple[str, str]:
    with engine_by(path) as engine:
        return engines.step_error(engine, engines.batches(1, length=engines.LENGTH - 1)[0])


def test_sequences_of_another_length_are_refused_on_every_rank(tmp_path: Path) -> None:
    for slices, schedule in (([9, 8, 6], "seq1f1b"), ([engines.LENGTH], "1f1b")):
        path = written(tmp_path, slices=slices, schedule=schedule)
        for kind, text in rank_pool(4).run(job_other_length, path=path):
            assert kind in ("TeraPipeConfigError", "BatchError") and "strategy.json" in text, text
            assert "adds up to 23 tokens, but a sequence has 22" in text and "plan again for 22" in text


def job_different_files(folders: list[str]) -> tuple[str, str]:
    """Give rank 3 another file under that name, as on a machine with its own disk."""
    module, ds_config = engines.pipeline_module(engines.gpt_layers()), ds_config_of("strategy.json")
    with contextlib.chdir(folders[torch.distributed.get_rank() == 3]):
        return engines.raised_by(lambda: terapipe_ds.initialize(model=module, config=ds_config))


def test_ranks_that_read_different_files_are_told(tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "other"]
    for folder, recompute in zip(folders, ("off", "full"), strict=True):
        folder.mkdir()
        written(folder, recompute=recompute)
    for kind, text in rank_pool(4).run(job_different_files, folders=[str(folder) for folder in folders]):
        assert kind == "TeraPipeConfigError" and "the strategy's file: ranks [0, 1, 2]: checksum" in text, text


def test_a_topology_for_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    strategy = Strategy.from_json(Path(written(tmp_path)).read_text())
    for kind, text in rank_pool(2).run(engines.raised_by, act=functools.partial(terapipe_ds.topology_of, strategy)):
        assert kind == "TeraPipeConfigError" and "for 4 ranks" in text and "the job has 2" in text
