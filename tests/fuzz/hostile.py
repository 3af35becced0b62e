"""Files of a stranger, and a process that reads them: `python -m tests.fuzz.hostile` runs a reader per line of JSON."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

LIMIT_S, LIMIT_BYTES = 10, 2**30
MARK = "code-has-run"
MANY = 40 << 20  # bytes


class Program:
    """What a pickle makes of itself: a command that leaves a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {MARK}",)


def _link(target: str) -> Callable[[Path, Any], None]:
    return lambda path, valid: path.symlink_to(target)


def _bytes(data: Callable[[Any], bytes]) -> Callable[[Path, Any], None]:
    return lambda path, valid: (path.write_bytes(data(valid)), None)[1]


def _text(data: Callable[[str], str]) -> Callable[[Path, Any], None]:
    """Of a valid document as text."""
    return _bytes(lambda valid: data(valid if isinstance(valid, str) else json.dumps(valid)).encode())


def _sparse(path: Path, valid: Any) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def _socket(path: Path, valid: Any) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))  # names of sockets are short


def _within(value: Any, number: Any) -> Any:
    """Return a document with `number` in the place of every number."""
    if isinstance(value, dict):
        return {key: _within(each, number) for key, each in value.items()}
    if isinstance(value, list):
        return [_within(each, number) for each in value]
    return number if isinstance(value, int | float) and not isinstance(value, bool) else value


def _long(value: Any, times: int) -> Any:
    """Return a document whose lists repeat themselves."""
    if isinstance(value, dict):
        return {key: _long(each, times) for key, each in value.items()}
    if isinstance(value, list):
        return [_long(each, 1) for each in value] * times
    return value


def _renamed(value: Any, name: str) -> Any:
    """Return a document with `name` in the place of every text and as one more key."""
    if isinstance(value, dict):
        return {**{key: _renamed(each, name) for key, each in value.items()}, name: 1}
    if isinstance(value, list):
        return [_renamed(each, name) for each in value]
    return name if isinstance(value, str) else value


def _structured(change: Callable[[Any], Any]) -> Callable[[Path, Any], None]:
    def make(path: Path, valid: Any) -> None:
        text = valid.replace("F0.", "F99999999.") if isinstance(valid, str) else json.dumps(change(valid))
        path.write_text(text, encoding="utf-8", errors="surrogatepass")

    return make


NUMBERS = (10**18, 10**400, 999_999, 0, -1, 1e308, 5e-324, float("nan"), float("inf"))
HOSTILE: dict[str, Callable[[Path, Any], Any]] = {
    "/dev/zero": _link("/dev/zero"),
    "/dev/urandom": _link("/dev/urandom"),
    "a link to itself": lambda path, valid: path.symlink_to(path),
    "a link to nothing": _link("/nowhere/at/all"),
    "a folder": lambda path, valid: path.mkdir(),
    "a pipe without a writer": lambda path, valid: os.mkfifo(path),
    "a socket": _socket,
    "a terabyte of nothing": _sparse,
    "nothing": _bytes(lambda valid: b""),
    "zeros": _bytes(lambda valid: bytes(MANY)),
    "noise": _bytes(lambda valid: os.urandom(1 << 20)),
    "empty lines": _bytes(lambda valid: b"\n" * MANY),
    "commas": _bytes(lambda valid: b"," * MANY),
    "quotes": _bytes(lambda valid: b'"' * MANY),
    "a pickle": _bytes(lambda valid: pickle.dumps(Program())),
    "a pickle in a bomb": _bytes(lambda valid: gzip.compress(pickle.dumps(Program()))),
    "a bomb": _bytes(lambda valid: gzip.compress(bytes(1 << 30), 1)),
    "half a bomb": _bytes(lambda valid: gzip.compress(bytes(1 << 20))[:-9]),
    "a tag of YAML": _bytes(lambda valid: f"!!python/object/apply:os.system ['touch {MARK}']".encode()),
    "an expression": _bytes(lambda valid: f"__import__('os').system('touch {MARK}')".encode()),
    "brackets": _bytes(lambda valid: b"[" * MANY),
    "braces": _bytes(lambda valid: b'{"a":' * (MANY // 5)),
    "empty lists": _bytes(lambda valid: b"[" + b"[]," * (MANY // 3) + b"[]]"),
    "empty lists, fewer": _bytes(lambda valid: b"[" + b"[]," * 490_000 + b"[]]"),
    "small objects, fewer": _bytes(lambda valid: b"[" + b'{"a":0},' * 490_000 + b"{}]"),
    "numbers": _bytes(lambda valid: b"[" + b"0," * (MANY // 2) + b"0]"),
    "numbers, fewer": _bytes(lambda valid: b"[" + b"0," * 2_900_000 + b"0]"),
    "a key twice": _bytes(lambda valid: b"{%s}" % b",".join(b'"%d":0' % (i % 2_899_999) for i in range(2_900_000))),
    "a number without an end": _bytes(lambda valid: b"1" * MANY),
    "a fraction without an end": _bytes(lambda valid: b"[1." + b"3" * MANY + b"]"),
    "a text without an end": _bytes(lambda valid: b'["' + "\U0001f600".encode() * (MANY // 4) + b'"]'),
    "escapes without an end": _bytes(lambda valid: b'"' + b"\\ud83d\\ude00" * (MANY // 12) + b'"'),
    "half characters": _bytes(lambda valid: b'["' + b"\\ud800" * (MANY // 6) + b'"]'),
    "cut short": _text(lambda text: text[:-2]),
    "in two bytes a letter": _bytes(lambda valid: json.dumps(valid).encode("utf-16")),
    "twice": _text(lambda text: text * 2),
    "deep inside": _text(lambda text: text.replace("1", "[" * 100_000 + "1" + "]" * 100_000)),
    "many of all": _structured(lambda valid: _long(valid, 3000)),
    "very many of all": _structured(lambda valid: _long(valid, 20_000)),
    "most of all": _structured(lambda valid: _long(valid, 100_000)),
    **{f"{number} everywhere": _structured(lambda valid, number=number: _within(valid, number)) for number in NUMBERS},
    "commands to the terminal": _structured(lambda valid: _renamed(valid, "\x1b]0;title\x07\x1b[2J\r")),
    "names of other files": _structured(lambda valid: _renamed(valid, "../../../../etc/passwd.csv")),
    "a very long name": _structured(lambda valid: _renamed(valid, "x" * (1 << 20))),
}  # fmt: skip


def read_as_cache(path: str) -> None:
    """Read a profile of a cache. A file that cannot be used is a warning, and is measured again."""
    from terapipe_ds.costs.profile import ProfileKey
    from terapipe_ds.runtime.profiling.cache import read_cache

    read_cache(Path(path), ProfileKey("f", "m", "cpu", "fp32", 1, 2, 2, False, 64, "flash"))


def read_as_plan(path: str) -> None:
    """Read a slice plan, which no command does."""
    from terapipe_ds.files.bounded import read_bytes
    from terapipe_ds.plan import SlicePlan

    try:
        SlicePlan.from_json(read_bytes(path))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _run(words: list[str]) -> int:
    readers = {"read-as-cache": read_as_cache, "read-as-plan": read_as_plan}
    if words[0] in readers:
        readers[words[0]](words[1])
        return 0
    from terapipe_ds import cli

    return cli.main(words)


def _child(words: list[str], output: int) -> None:
    """Run one reader to its end; LIMIT_S after its start the system ends it."""
    signal.alarm(LIMIT_S)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code: Any = 99
    try:
        code = _run(words)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    with suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Run a reader per line of stdin, a JSON list of words, and print what became of it."""
    import terapipe_ds.cli
    import terapipe_ds.costs.fitted
    import terapipe_ds.planner
    import terapipe_ds.timeline.compare

    if "--runtime" in sys.argv:
        import terapipe_ds.runtime.profiling.cache  # noqa: F401
    base_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    for line in sys.stdin:
        output = os.open("output", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        start_s = time.monotonic()
        pid = os.fork()
        if not pid:
            _child(json.loads(line), output)
        _, status, usage = os.wait4(pid, 0)
        os.close(output)
        said = Path("output").read_bytes()[-3000:].decode("utf-8", "replace")
        used = max(0, (usage.ru_maxrss << 10) - base_bytes)
        code = os.waitstatus_to_exitcode(status)
        print(json.dumps([code, said, time.monotonic() - start_s, used]), flush=True)


if __name__ == "__main__":
    main()
