"""The runner of DeepSpeed's own tests, on a small checkout of our own: ranks get our engine."""

import re
from pathlib import Path

import pytest

from tests.processes import ROOT, run_python
from tests.upstream import deepspeed_tests

FILES = {
    "pytest.ini": "[pytest]\n",
    "conftest.py": "import os, sys\nsys.path.insert(1, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))\n",
    "unit/__init__.py": "",
    "unit/common.py": "import torch.multiprocessing as mp\n",
    "unit/pipe/test_ranks.py": """
import sys
import deepspeed
from unit import common

def told(index):
    import terapipe_ds.runtime.register as register
    return register.is_registered(), deepspeed.initialize.__module__, "site-packages" in deepspeed.__file__

def test_ranks():
    common.mp.set_start_method("forkserver", force=True)
    with common.mp.Pool(processes=1) as pool:
        assert pool.starmap(told, [(0,)]) == [(True, "tests.upstream.ranks", True)]
""",
    "unit/runtime/pipe/test_passes.py": "def test_passes():\n    pass\n",
    "unit/checkpoint/test_pipeline.py": "def test_fails():\n    raise ValueError\n",
    "../deepspeed/__init__.py": "raise ImportError('the checkout')\n",
}
OUTCOMES = {"test_ranks": "PASSED", "test_passes": "PASSED", "test_fails": "FAILED"}


@pytest.mark.full
def test_the_tests_of_a_checkout_run_with_our_engine_and_leave_it_alone(tmp_path: Path) -> None:
    for name, text in FILES.items():
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    before = sorted(tmp_path.rglob("*"))
    run = run_python("-m", "tests.upstream.deepspeed_tests", tmp_path, "-v")
    found = dict(re.findall(r"::(\w+) (\w+)", run.stdout))
    assert found == OUTCOMES, run.stdout + run.stderr
    assert run.returncode == 1
    assert sorted(tmp_path.rglob("*")) == before, "the checkout has changed"


def test_what_is_no_checkout_is_refused(tmp_path: Path) -> None:
    run = run_python("-m", "tests.upstream.deepspeed_tests", tmp_path)
    assert run.returncode == 2 and "give a checkout of DeepSpeed" in run.stderr


def test_users_are_told_which_tests_run() -> None:
    said = (ROOT / "docs" / "stock-differences.md").read_text()
    assert all(name in said for name in deepspeed_tests.TESTS)
