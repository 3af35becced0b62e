"""The script for SLURM, with stand-ins for SLURM's commands and for `torchrun`."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm" / "train.sbatch"

# what `srun` does here: one task per machine, one after the other
SRUN = """#!/bin/bash
shift
for node in 0 1; do SLURM_NODEID=$node SLURM_GPUS_ON_NODE=4 "$@"; done
"""
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames first,second" ] && printf 'first\\nsecond\\n'
"""
TORCHRUN = f"""#!{sys.executable}
import json, sys
print(json.dumps(sys.argv[1:]))
"""


def submit(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("torchrun", TORCHRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_JOB_NODELIST": "first,second", "SLURM_JOB_ID": "123456", "SLURM_JOB_NUM_NODES": "2"}
    environment = {**os.environ, **variables, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    return subprocess.run(["bash", SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=60)


def test_each_machine_starts_its_ranks(tmp_path: Path) -> None:
    done = submit(tmp_path, "train.py", "--save-dir", "/shared/my run", "--name", "$HOME")
    assert done.returncode == 0, done.stderr
    own = [json.loads(line) for line in done.stdout.splitlines()]
    common = ["--nproc-per-node", "4", "--master-addr", "first", "--master-port", str(20000 + 123456 % 20000)]
    script = ["train.py", "--save-dir", "/shared/my run", "--name", "$HOME"]
    assert own == [["--nnodes", "2", "--node-rank", str(node), *common, *script] for node in range(2)]


def test_a_script_must_be_named(tmp_path: Path) -> None:
    done = submit(tmp_path)
    assert done.returncode == 2
    assert "usage: sbatch" in done.stderr
