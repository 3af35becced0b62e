"""Run DeepSpeed's own tests of its pipeline engine through ours.

    python -m tests.upstream.deepspeed_tests SOURCE             # a checkout of DeepSpeed, which stays as it is
    python -m tests.upstream.deepspeed_tests SOURCE --stock     # the same tests with the stock engine, to compare

Each config gets the section `{"enabled": true, "schedule": "1f1b", "slices": 1}`. The tests are the checkout's, the
DeepSpeed under them is the installed one. Further arguments go to pytest.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = ("unit/runtime/pipe", "unit/pipe", "unit/checkpoint/test_pipeline.py")  # under the checkout's tests/
ROOT = Path(__file__).resolve().parents[2]
MOST_RANKS = 4
STOCK = "TERAPIPE_UPSTREAM_STOCK"  # an environment variable; where it is set, the ranks run the stock engine


def main(arguments: list[str] | None = None) -> int:
    """Run the tests and return pytest's exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path, help="a checkout of DeepSpeed")
    parser.add_argument("--stock", action="store_true", help="with the stock engine")
    options, for_pytest = parser.parse_known_args(arguments)
    tests = options.source.resolve() / "tests"
    missing = [name for name in TESTS if not (tests / name).exists()]
    if missing:
        parser.error(f"{options.source}/tests has no {', '.join(missing)}: give a checkout of DeepSpeed")
    with tempfile.TemporaryDirectory(prefix="terapipe-upstream-") as folder:
        command = [
            sys.executable, "-m", "pytest", "-p", "tests.upstream.ranks", "-p", "no:cacheprovider",
            "-c", str(tests / "pytest.ini"), "--rootdir", str(tests), "--basetemp", f"{folder}/files", "-rs",
            *for_pytest, *(str(tests / name) for name in TESTS),
        ]  # fmt: skip
        return subprocess.run(command, cwd=folder, env=_environment(options.stock)).returncode


def _environment(stock: bool) -> dict[str, str]:
    """Return variables that run ranks on the CPU, unless set otherwise, and write nothing into the checkout."""
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOCAL_SIZE": str(MOST_RANKS), **os.environ}
    # DeepSpeed compiles its Adam; a rank that is killed meanwhile would leave a lock in a folder that others use too
    environment.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / "out" / "upstream" / "extensions"))
    environment.update(PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path[1:]]))
    if stock:
        environment[STOCK] = "1"
    return environment


if __name__ == "__main__":
    sys.exit(main())
