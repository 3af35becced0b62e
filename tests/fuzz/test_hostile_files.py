"""Files of a stranger: no code of theirs runs, and what is refused is refused in one line, soon, in little memory."""

from __future__ import annotations

import functools
import gzip
import json
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from terapipe_ds import cli
from terapipe_ds.files.bounded import read_bytes
from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import build, to_csv
from tests.fuzz.test_fuzz_configs import DEEPSPEED, MODEL, RESULT
from tests.fuzz.test_fuzz_planning_files import KEY, PROFILE, SIMULATED

LIMIT_S, LIMIT_BYTES = 10, 2**30
MARK = "code-has-run"
MANY = 40 << 20
TARGETS = ("/dev/zero", "/dev/urandom", "/nowhere/at/all")
SIGNS = (b"\n", b",", b'"', b"[", b'{"a":', b"1", b"[],")
NUMBERS = (10**18, 10**400, 999_999, 0, -1, 1e308, 5e-324, float("nan"), float("inf"))


class Program:
    """What a pickle makes of itself: a command that leaves a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {MARK}",)


@functools.cache
def bomb() -> bytes:
    return gzip.compress(bytes(1 << 30), 1)


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


PLACES: dict[str, Callable[[Path], object]] = {
    **{target: lambda path, to=target: path.symlink_to(to) for target in TARGETS},
    "a link to itself": lambda path: path.symlink_to(path),
    "a folder": Path.mkdir,
    "a pipe without a writer": os.mkfifo,
    "a socket": bind,
    "a terabyte of nothing": lambda path: (path.touch(), os.truncate(path, 2**40)),
}
CONTENTS: dict[str, Callable[[bytes], bytes]] = {  # of what a valid file holds
    "nothing": lambda valid: b"",
    "zeros": lambda valid: bytes(MANY),
    "noise": lambda valid: os.urandom(1 << 20),
    "a pickle": lambda valid: pickle.dumps(Program()),
    "a packed pickle": lambda valid: gzip.compress(pickle.dumps(Program())),
    "a bomb": lambda valid: bomb(),
    "half a bomb": lambda valid: gzip.compress(bytes(1 << 20))[:-9],
    "a tag of YAML": lambda valid: f"!!python/object/apply:os.system ['touch {MARK}']".encode(),
    "an expression": lambda valid: f"__import__('os').system('touch {MARK}')".encode(),
    **{f"{sign!r} without an end": lambda valid, sign=sign: sign * (MANY // len(sign)) for sign in SIGNS},
    "too many lists": lambda valid: b"[%s[]]" % (b"[]," * (MANY // 3)),
    "lists, as many as may be": lambda valid: b"[%s[]]" % (b"[]," * 190_000),
    "objects, as many as may be": lambda valid: b"[%s{}]" % (b'{"a":0},' * 190_000),
    "numbers, as many as may be": lambda valid: b"[%s0]" % (b"0," * 990_000),
    "a key twice among many": lambda valid: b"{%s}" % b",".join(b'"%d":0' % (i % 989_999) for i in range(990_000)),
    "a fraction without an end": lambda valid: b"[1.%s]" % (b"3" * MANY),
    "a long text": lambda valid: b'["%s"]' % ("\U0001f600".encode() * (MANY // 4)),
    "many escapes": lambda valid: b'["%s"]' % (b"\\ud83d\\ude00" * (MANY // 12)),
    "half characters": lambda valid: b'["%s"]' % (b"\\ud800" * (MANY // 6)),
    "cut short": lambda valid: valid[:-2],
    "in two bytes a letter": lambda valid: valid.decode().encode("utf-16"),
    "twice": lambda valid: valid * 2,
    "deep inside": lambda valid: valid.replace(b"1", b"[" * 100_000 + b"1" + b"]" * 100_000),
}  # fmt: skip


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a document after `change` of each value, the inner ones first."""
    if isinstance(value, dict):
        value = {key: mapped(each, change) for key, each in value.items()}
    elif isinstance(value, list):
        value = [mapped(each, change) for each in value]
    return change(value)


def named(name: str) -> Callable[[Any], Any]:
    """Return how to put `name` in the place of every text, and of a key in each object."""
    change = lambda value: {**value, name: 1} if isinstance(value, dict) else name if isinstance(value, str) else value  # noqa: E731
    return lambda document: mapped(document, change)


def numbered(number: float) -> Callable[[Any], Any]:
    return lambda document: mapped(document, lambda value: number if type(value) in (int, float) else value)


def repeated(times: int) -> Callable[[Any], Any]:
    return lambda document: {key: value * times if type(value) is list else value for key, value in document.items()}


DOCUMENTS: dict[str, Callable[[Any], Any]] = {  # what is JSON, and of the right form
    **{f"{times} times": repeated(times) for times in (3000, 20_000, 100_000)},
    **{f"{number} everywhere": numbered(number) for number in NUMBERS},
    "orders for the terminal": named("\x1b]0;title\x07\x1b[2J\r"),
    "names of other files": named("../../../../etc/passwd.csv"),
    "long names": named("x" * (1 << 20)),
}  # fmt: skip
READERS: dict[str, tuple[Any, str]] = {
    "plan": ({"version": 1, "lengths": [512, 384, 128]}, "a plan FILE"),
    "profile": (json.loads(PROFILE.to_json()), "plan --profile FILE --stages 2 --granularity 64"),
    "cache": (json.loads(PROFILE.to_json()), "a cache FILE"),
    "trace": (json.loads(SIMULATED.to_json()), "timeline FILE --out out.svg"),
    "prediction": (json.loads(SIMULATED.to_json()), "timeline valid.json --against FILE --json"),
    "bench result": (RESULT, "bench --from FILE --html out.html"),
    "config": (DEEPSPEED, "plan --config FILE --model tiny --device h100 --stages 2 --sequence-length 64"),
    "model": (MODEL, "profile --config config.json --model FILE --out out.json"),
    "schedule": (to_csv(build("seq1f1b", 2, 2, 2)), "show FILE"),
}


def read(words: list[str]) -> int:
    """Run a command, or what reads a file without one, and return the exit code."""
    if words[:2] == ["a", "cache"]:
        from terapipe_ds.runtime.profiling.cache import read_cache

        read_cache(Path(words[2]), KEY)  # which warns of what it cannot use
        return 0
    if words[:2] != ["a", "plan"]:
        return cli.main(words)
    try:
        SlicePlan.from_json(read_bytes(words[2]))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def problems_of(words: list[str]) -> list[str]:
    """Read in a process of its own, which the system ends after LIMIT_S, and return what is wrong with that."""
    with open("output", "w+b") as output:
        pid = os.fork()
        if not pid:
            code: Any = 99
            try:
                signal.alarm(LIMIT_S)
                sys.stdout = sys.stderr = open(output.fileno(), "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
                base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                code = read(words)
                used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base << 10
                print(f"error: took {used >> 20} MiB" if used > LIMIT_BYTES else "")
            except SystemExit as ended:
                code = ended.code
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said = output.seek(0) or output.read().decode()
    errors = [line for line in said.splitlines() if "error: " in line]
    wrong = {
        f"took more than {LIMIT_S} s": code == -signal.SIGALRM,
        f"ended with {code}": code not in (0, 2),
        "ran code": Path(MARK).exists(),
        "several errors, or none": len(errors) != code // 2,
        "a traceback": "Traceback" in said,
        "orders for the terminal": not all(letter.isprintable() or letter == "\n" for letter in said),
    }
    return [f"{problem}: {said[-500:]}" for problem, is_so in wrong.items() if is_so]


FEW = ("/dev/zero", "a pipe without a writer", "a bomb", "a pickle", "too many lists", "orders for the terminal")
ALL = (*PLACES, *CONTENTS, *DOCUMENTS)


@pytest.mark.parametrize("names", [pytest.param(FEW, id="few"), pytest.param(ALL, id="all", marks=pytest.mark.full)])
@pytest.mark.parametrize("reader", READERS)
def test_hostile_files(reader: str, names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    valid, command = READERS[reader]
    text = valid if isinstance(valid, str) else json.dumps(valid)
    SIMULATED.save("valid.json")
    Path("config.json").write_text(json.dumps(DEEPSPEED))
    problems = {}
    for number, name in enumerate(names):
        path = Path(f"hostile{number}.json")
        if name in PLACES:
            PLACES[name](path)
        elif name in CONTENTS:
            path.write_bytes(CONTENTS[name](text.encode()))
        else:
            path.write_text(text.replace("F0.", "F\x1b9.") if text is valid else json.dumps(DOCUMENTS[name](valid)))
        if found := problems_of([str(path) if word == "FILE" else word for word in command.split()]):
            problems[name] = found
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    assert not problems, "\n".join(f"{reader}, {name}: {found}" for name, found in problems.items())
