"""Test two machines, emulated by ranks that have a working folder to themselves: caches, traces and checkpoints."""

import contextlib
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as torch_dist

from tests.distributed.engines import batches, engine_of, few_rounds, gpt_layers, micro_batch, raised_by, unchecked
from tests.distributed.harness import rank_pool

STEPS = 2
MEASURED = unchecked(slices="auto", granularity_tokens=8, planner={"cache_dir": "cache"}, trace_dir="traces")


def train_and_save(shared: str) -> dict[str, Any]:
    """Train in a working folder, save to a folder of each machine, then to one that all see, and load that."""
    with engine_of(gpt_layers(), None) as engine:
        result: dict[str, Any] = {"stock": _losses(engine, range(STEPS + 1))}
    with engine_of(gpt_layers(), MEASURED) as engine:
        result["losses"] = _losses(engine, range(STEPS))
        result["save"] = raised_by(lambda: engine.save_checkpoint("saved"))
        engine.save_checkpoint(shared)
        result["after"] = _losses(engine, range(STEPS, STEPS + 1))
    with engine_of(gpt_layers(), MEASURED) as engine:
        engine.load_checkpoint(shared)
        result["resumed"] = _losses(engine, range(STEPS, STEPS + 1))
    return result


def try_mistakes(shared: str) -> dict[str, Any]:
    """Make mistakes with machines that differ; return the errors."""
    result: dict[str, Any] = {}
    only_here = Path("only_here")
    rank = torch_dist.get_rank()
    with engine_of(gpt_layers(), unchecked()) as engine:
        engine.save_checkpoint(shared, tag="copied")
        if rank == 0:
            only_here.symlink_to(shared)
        torch_dist.barrier()
        result["load"] = raised_by(lambda: engine.load_checkpoint("only_here", tag="copied"))
        other_length = [[micro_batch(seed, length=23 + rank) for seed in range(2)]]
        result["lengths"] = raised_by(lambda: engine.train_batch(iter(other_length[0])))
    result["config"] = raised_by(lambda: engine_of(gpt_layers(), unchecked(slices=3 + rank)).__enter__())
    Path("order.csv").write_text(f"of rank {rank}\n")
    result["file"] = raised_by(lambda: engine_of(gpt_layers(), unchecked(schedule="order.csv")).__enter__())
    local = {"checkpoint": {"use_node_local_storage": True}}
    with engine_of(gpt_layers(), unchecked(), **local) as engine:
        engine.train_batch(iter(batches(1)[0]))
        result["local storage"] = raised_by(lambda: engine.save_checkpoint("local"))
    return result


def _losses(engine: Any, steps: range) -> list[float]:
    return [float(engine.train_batch(iter(batches(1, first_seed=1000 * step)[0]))) for step in steps]


def on_own_machine(shared: str, folders: list[Path]) -> dict[str, Any]:
    """Run both jobs with the folder and the local rank of a rank that has a machine to itself."""
    with contextlib.chdir(folders[torch_dist.get_rank()]), mock.patch.dict(os.environ, LOCAL_RANK="0"):
        with few_rounds():
            trained = train_and_save(shared)
        return trained | try_mistakes(shared)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[dict[str, Any]]]:
    """Return the working folders of two machines and the report of the rank on each."""
    root = tmp_path_factory.mktemp("machines")
    folders = [root / "first", root / "second"]
    for folder in folders:
        folder.mkdir()
    return folders, rank_pool(2).run(on_own_machine, shared=str(root / "shared"), folders=folders)


@pytest.mark.slow
class TestTwoMachines:
    def test_losses_are_those_of_the_stock_engine(self, machines: Any) -> None:
        for result in machines[1]:  # in fp64, told in fp32
            assert [*result["losses"], *result["after"]] == pytest.approx(result["stock"], rel=1e-6)
            assert result["resumed"] == result["after"]

    def test_the_first_machine_keeps_the_cache_and_each_its_traces(self, machines: Any) -> None:
        (first, second), _ = machines
        assert list((first / "cache").glob("profile-*.json"))
        assert not (second / "cache").exists()
        assert (first / "traces" / "timeline-step000001-rank0000.json").is_file()
        assert [path.name for path in (second / "traces").glob("*-step000001-*")] == [
            "timeline-step000001-rank0001.json"
        ]

    def test_pieces_of_a_checkpoint_are_refused_on_both(self, machines: Any) -> None:
        (first, second), results = machines
        for result in results:
            kind, text = result["save"]
            assert kind == "CheckpointError"
            assert f"rank 0 sees {first}/saved/.global_step" in text
            assert f"these ranks do not (ranks [1]: {second}/saved/.global_step" in text
            assert "Give all machines one folder" in text
        assert list((first / "saved").iterdir()) == []
        assert not (second / "saved").exists()

    @pytest.mark.parametrize(
        ("mistake", "kind", "said"),
        [
            ("load", "CheckpointError", "/second/only_here/copied): they have another disk"),
            ("local storage", "CheckpointError", "use_node_local_storage: DeepSpeed saves one model state per machine"),
            ("config", "TeraPipeConfigError", "terapipe: ranks [0]: "),
            ("file", "TeraPipeConfigError", "the schedule's file: ranks [0]: checksum"),
            ("lengths", "BatchError", "ranks [0]: [[2, 23], [2, 23]]; ranks [1]: [[2, 24], [2, 24]]"),
        ],
    )
    def test_machines_that_differ_are_told_so(self, machines: Any, mistake: str, kind: str, said: str) -> None:
        for result in machines[1]:
            assert result[mistake][0] == kind
            assert said in result[mistake][1]
