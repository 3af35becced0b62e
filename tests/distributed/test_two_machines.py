"""Test two machines, emulated by two groups of processes, each with a working folder of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.utils.distributed import get_free_port

from tests.distributed.harness import SERVER_ENVIRONMENT, rank_pool
from tests.distributed.two_machines import STEPS, train_and_save

ROOT = Path(__file__).parents[2]
LAUNCH_TIMEOUT_S = 240.0


def _start(node: int, port: int, folder: Path, shared: Path) -> subprocess.Popen[str]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)),
        *("-m", "tests.distributed.two_machines", str(shared)),
    ]
    environment = {**os.environ, **SERVER_ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[dict[str, Any]]]:
    """Return the working folders of two machines and the report of the rank on each."""
    root, port = tmp_path_factory.mktemp("machines"), get_free_port()
    folders = [root / "first", root / "second"]
    for folder in folders:
        folder.mkdir()
    processes = [_start(node, port, folder, root / "shared") for node, folder in enumerate(folders)]
    try:
        said = [process.communicate(timeout=LAUNCH_TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    return folders, [json.loads((folder / "result.json").read_text()) for folder in folders]


@pytest.mark.slow
class TestTwoMachines:
    def test_losses_are_those_of_one_machine(self, machines: Any, tmp_path: Path) -> None:
        _, results = machines
        assert [result["rank"] for result in results] == [0, 1]
        assert [result["local_rank"] for result in results] == ["0", "0"]
        (alone, _) = rank_pool(2).run(train_and_save, shared=str(tmp_path / "shared"), folder=str(tmp_path))
        assert alone["save"] == ("", ""), "on one machine both ranks see the folder"
        for result in results:
            # plans come from measured times, and other slices add up in another order: fp64, told in fp32
            assert result["losses"] == pytest.approx(alone["losses"], rel=1e-6)
            assert result["resumed"] == result["after"] == pytest.approx(alone["after"], rel=1e-6)
        assert len(set(alone["losses"])) == STEPS

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
            ("local storage", "CheckpointError", "use_node_local_storage with 2 stages and 1 tensor-parallel ranks"),
            ("config", "TeraPipeConfigError", "terapipe: ranks [0]: "),
            ("file", "TeraPipeConfigError", "the schedule's file: ranks [0]: checksum"),
            ("lengths", "BatchError", "ranks [0]: [[2, 23], [2, 23]]; ranks [1]: [[2, 24], [2, 24]]"),
        ],
    )
    def test_machines_that_differ_are_told_so(self, machines: Any, mistake: str, kind: str, said: str) -> None:
        for result in machines[1]:
            assert result[mistake][0] == kind
            assert said in result[mistake][1]
