"""Files of a stranger: no code of theirs runs, and what is refused is refused in one line, soon, in little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from terapipe_ds.schedule import build, to_csv
from tests.fuzz.hostile import HOSTILE, LIMIT_BYTES, LIMIT_S, MARK
from tests.fuzz.test_fuzz_configs import DEEPSPEED, MODEL, RESULT
from tests.fuzz.test_fuzz_planning_files import PROFILE, SIMULATED

ROOT = Path(__file__).parents[2]
READERS: dict[str, tuple[Any, str]] = {
    "plan": ({"version": 1, "lengths": [512, 384, 128]}, "read-as-plan FILE"),
    "profile": (json.loads(PROFILE.to_json()), "plan --profile FILE --stages 2 --granularity 64"),
    "cache": (json.loads(PROFILE.to_json()), "read-as-cache FILE"),
    "trace": (json.loads(SIMULATED.to_json()), "timeline FILE --out out.svg"),
    "prediction": (json.loads(SIMULATED.to_json()), "timeline valid.json --against FILE --json"),
    "bench result": (RESULT, "bench --from FILE --html out.html"),
    "config": (DEEPSPEED, "plan --config FILE --model tiny --device h100 --stages 2 --sequence-length 64"),
    "model": (MODEL, "profile --config valid-config.json --model FILE --out out.json"),
    "schedule": (to_csv(build("seq1f1b", 2, 2, 2)), "show FILE"),
}
CASES = [(reader, name) for reader in READERS for name in HOSTILE]
FEW = ("/dev/zero", "a pipe without a writer", "a bomb", "a pickle", "empty lists", "commands to the terminal")


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    """A folder, and a function that lets a process in it run a reader."""
    folder = tmp_path_factory.mktemp("hostile")
    SIMULATED.save(folder / "valid.json")
    (folder / "valid-config.json").write_text(json.dumps(DEEPSPEED))
    processes: dict[bool, subprocess.Popen[str]] = {}

    def run(words: list[str]) -> Any:
        with_runtime = words[0] == "read-as-cache"
        if with_runtime not in processes:
            command = [sys.executable, "-m", "tests.fuzz.hostile", *["--runtime"] * with_runtime]
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            processes[with_runtime] = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        process = processes[with_runtime]
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps(words), file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    yield folder, run
    for process in processes.values():
        process.communicate()


def problem_of(reader: str, name: str, folder: Path, run: Any) -> str | None:
    """Return what is wrong with how a reader takes a file, or None."""
    valid, command = READERS[reader]
    path = folder / "hostile.json"
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)
    HOSTILE[name](path, valid)
    code, said, took_s, used_bytes = run([str(path) if word == "FILE" else word for word in command.split()])
    lines = [line for line in said.splitlines() if "error: " in line or "Traceback" in line]
    wrong = [
        (folder / MARK).exists() and "ran code",
        took_s > LIMIT_S and f"took {took_s:.1f} s",
        used_bytes > LIMIT_BYTES and f"took {used_bytes >> 20} MiB",
        code not in (0, 2) and f"ended with {code}",
        "Traceback" in said and "a traceback",
        code == 2 and len(lines) != 1 and f"{len(lines)} errors",
        not all(letter.isprintable() or letter == "\n" for letter in said) and "what a terminal obeys",
    ]
    problems = [each for each in wrong if each]
    return f"{reader}, {name}: {', '.join(map(str, problems))}: {said[-600:]!r}" if problems else None


@pytest.mark.parametrize(
    "names", [pytest.param(FEW, id="few"), pytest.param(tuple(HOSTILE), id="all", marks=pytest.mark.full)]
)
def test_hostile_files(names: tuple[str, ...], reading: tuple[Path, Any]) -> None:
    problems = [problem_of(reader, name, *reading) for reader in READERS for name in names]
    print(len(problems), "files")
    assert not any(problems), "\n".join(filter(None, problems))
