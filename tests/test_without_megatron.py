"""Where megatron-core is not installed, all the rest works, and what needs it says which extra to install."""

from pathlib import Path

from tests.processes import run_python

SCRIPT = """
import os, sys
sys.modules["megatron"] = None  # an import of it fails, as where there is none

import terapipe_ds
from tests.distributed import engines, harness

os.environ.update(harness.rank_environment(0, 1))
harness._join(0, 1, sys.argv[1])
whole, sliced = engines.both(lambda engine: engines.train(engine, engines.batches(2)), stages=1)
assert not engines.violations([engines.differences(sliced, whole)])

try:
    import terapipe_ds.models.megatron
except ImportError as error:
    print(error)
sys.path.insert(0, "examples")
import index_text
try:
    index_text.main(["README.md", "--out", sys.argv[1] + "-index"])
except SystemExit as error:
    print(error)
sys.stdout.flush()
os._exit(0)  # gloo's threads may outlive the interpreter's teardown
"""


def test_everything_else_trains_and_the_extra_is_named(tmp_path: Path) -> None:
    done = run_python("-c", SCRIPT, tmp_path / "store")
    said = done.stdout + done.stderr
    assert "terapipe_ds.models.megatron needs megatron-core" in said, said
    assert said.count("pip install megatron-core==") == 2, said
    assert "examples/index_text.py needs megatron-core" in said, said
