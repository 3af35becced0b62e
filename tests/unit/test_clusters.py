"""The files for containers, Kubeflow, Ray and GitHub: their forms, and names that exist. Nothing runs them here."""

import re
from pathlib import Path

import pytest

from terapipe_ds.cli import COMMANDS

yaml = pytest.importorskip("yaml", reason="PyYAML comes with transformers")
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "clusters"


def test_the_dockerfile() -> None:
    """Each instruction is one of Docker's, and each copied file exists."""
    lines = re.sub(r"\\\n", " ", (FOLDER / "Dockerfile").read_text()).splitlines()
    steps = [line.split() for line in lines if line and not line.startswith("#")]
    assert {step[0] for step in steps} <= {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "CMD"} and steps[0][0] == "FROM"
    torch = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert torch is not None and f":{torch[1]}-" in steps[0][1]
    for step in steps:
        if step[0] == "COPY":
            assert all((ROOT / name).exists() for name in step[1:-1]), step
    assert steps[-1][1:] == ['["terapipe",', f'"{COMMANDS[COMMANDS.index("doctor")]}"]']


def test_the_train_job() -> None:
    """The file has the fields of a TrainJob of Kubeflow Trainer 2 (trainer.kubeflow.org/v1alpha1)."""
    job = yaml.safe_load((FOLDER / "trainjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["spec"]["runtimeRef"] == {"name": "deepspeed-distributed"}
    trainer = job["spec"]["trainer"]
    assert set(trainer) <= {"image", "command", "args", "env", "numNodes", "numProcPerNode", "resourcesPerNode"}
    assert trainer["command"][:4] == ["mpirun", "python", "-m", "terapipe_ds.run"]
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] >= 1


def test_the_workflow_calls_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    rows = workflow["jobs"]["test"]["strategy"]["matrix"]["target"]
    assert rows == ["test", "test-transformers"]
    runs = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    runs = [run.replace("${{ matrix.target }}", row) for run in runs for row in rows]
    assert runs and all(run.startswith("make ") and run.split()[1] in targets for run in runs)
