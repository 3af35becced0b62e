"""Run Python in a process of its own, as a user does."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(*words: object, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Return how it ended and what it printed. It finds the package and its tests wherever it runs."""
    usual = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    variables = os.environ | usual | environment
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)
