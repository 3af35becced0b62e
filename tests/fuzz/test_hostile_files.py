"""Files of a stranger: no code of theirs runs, and what is refused is refused in one line, soon, in little memory."""

import argparse
import functools
import gzip
import importlib
import io
import json
import os
import pickle
import resource
import shutil
import signal
import socket
import subprocess
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.universal_checkpoint import load_hp_checkpoint_state
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from terapipe_ds import cli
from terapipe_ds.files.bounded import read_bytes
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.checkpoints.choose import choose_checkpoint, look_at_contents
from terapipe_ds.runtime.checkpoints.manifest import MANIFEST, Manifest, checksum_of
from terapipe_ds.runtime.checkpoints.strict_pickles import strict_loading
from terapipe_ds.runtime.profiling.cache import read_cache
from terapipe_ds.schedule import build, to_csv
from tests.fuzz.outcome import counts
from tests.fuzz.test_fuzz_configs import DEEPSPEED, MODEL, RESULT
from tests.fuzz.test_fuzz_planning_files import KEY, PROFILE, SIMULATED

for name in ("bench.report.page", "commands.bench", "commands.plan", "commands.user_model", "timeline.picture"):
    importlib.import_module(f"terapipe_ds.{name}")  # once, and not in each process that reads a file

LIMIT_S, LIMIT_BYTES = 10, 2**30
MARK = "code-has-run"
MANY = 40 << 20
SIGNS = (b"\n", b",", b'"', b"[", b'{"a":', b"1", b"[],")
NUMBERS = (10**18, 10**400, 999_999, 0, -1, 1e308, 5e-324, float("nan"), float("inf"))


class Program:
    """Pickled as a call that leaves a file."""

    def __init__(self, function: Callable[..., Any] = os.system, *args: Any) -> None:
        self.call = function, args or (f"touch {MARK}",)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


PLACES: dict[str, Callable[[Path], object]] = {
    **{target: lambda path, to=target: path.symlink_to(to) for target in ("/dev/zero", "/dev/urandom", "/nowhere")},
    "a link to itself": lambda path: path.symlink_to(path),
    "a folder": Path.mkdir,
    "a pipe without a writer": os.mkfifo,
    "a socket": lambda path: socket.socket(socket.AF_UNIX).bind(path.name),
    "a terabyte of nothing": lambda path: (path.touch(), os.truncate(path, 2**40)),
}
CONTENTS: dict[str, Callable[[bytes], bytes]] = {  # of what a valid file holds
    "nothing": lambda valid: b"",
    "zeros": lambda valid: bytes(MANY),
    "noise": lambda valid: os.urandom(1 << 20),
    "a pickle": lambda valid: pickle.dumps(Program()),
    "a packed pickle": lambda valid: gzip.compress(pickle.dumps(Program())),
    "a bomb": lambda valid: gzip.compress(bytes(1 << 20)) * 1024,
    "a tag of YAML": lambda valid: f"!!python/object/apply:os.system ['touch {MARK}']".encode(),
    "an expression": lambda valid: f"__import__('os').system('touch {MARK}')".encode(),
    **{f"{sign!r} without an end": lambda valid, sign=sign: sign * (MANY // len(sign)) for sign in SIGNS},
    "too many lists": lambda valid: b"[%s[]]" % (b"[]," * (MANY // 3)),
    "objects, as many as may be": lambda valid: b"[%s{}]" % (b'{"a":0},' * 190_000),
    "numbers, as many as may be": lambda valid: b"[%s0]" % (b"0," * 990_000),
    "a key twice among many": lambda valid: b"{%s}" % b",".join(b'"%d":0' % (i % 989_999) for i in range(990_000)),
    "a fraction without an end": lambda valid: b"[1.%s]" % (b"3" * MANY),
    "a long text": lambda valid: b'["%s"]' % ("\U0001f600".encode() * (MANY // 4)),
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


def repeated(times: int) -> Callable[[Any], Any]:
    return lambda document: {key: value * times if type(value) is list else value for key, value in document.items()}


DOCUMENTS: dict[str, Callable[[Any], Any]] = {  # what is JSON, and of the right form
    **{f"{times} times": repeated(times) for times in (3000, 20_000, 100_000)},
    **{
        f"{number} everywhere": lambda it, n=number: mapped(it, lambda x: n if type(x) in (int, float) else x)
        for number in NUMBERS
    },
    "orders for the terminal": named("\x1b]0;title\x07\x1b[2J\r"),
    "names of other files": named("../../../../etc/passwd.csv"),
    "long names": named("x" * (1 << 20)),
}  # fmt: skip
LIST = Manifest(tag="tag", global_steps=1, is_latest=True, files={"a.pt": 1})
READERS: dict[str, tuple[Any, str]] = {  # a valid file, and what reads one
    "plan": ({"version": 1, "lengths": [512, 384, 128]}, "a plan FILE"),
    "profile": (json.loads(PROFILE.to_json()), "plan --profile FILE --stages 2 --granularity 64"),
    "cache": (json.loads(PROFILE.to_json()), "a cache FILE"),
    "trace": (json.loads(SIMULATED.to_json()), "timeline FILE --out out.svg"),
    "prediction": (json.loads(SIMULATED.to_json()), "timeline valid.json --against FILE --json"),
    "bench result": (RESULT, "bench --from FILE --html out.html"),
    "config": (DEEPSPEED, "plan --config FILE --model tiny --device h100 --stages 2 --sequence-length 64"),
    "model": (MODEL, "profile --config config.json --model FILE --out out.json"),
    "schedule": (to_csv(build("seq1f1b", 2, 2, 2)), "show FILE"),
    "checkpoint": (b"", "a checkpoint saved/tag/mp_rank_00_model_states.pt FILE"),
    "list of a checkpoint": (LIST.model_dump(), f"a checkpoint saved/tag/{MANIFEST} FILE"),
    "latest": ("tag", "a checkpoint saved/latest FILE"),
}


# -- checkpoints


def archive(code: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return what `torch.save` writes, around a pickle, with a storage of 20 numbers."""
    entries, file = {"data.pkl": code, "version": b"3\n", "byteorder": b"little", "data/0": bytes(80)}, io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as packed:
        for name, content in entries.items():
            packed.writestr(f"archive/{name}", content)
    return file.getvalue()


def legacy(code: bytes) -> bytes:
    """Return what it wrote before version 1.6."""
    return b"".join(pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {})) + code + pickle.dumps([], 2)


def tensor(numbers: int, size: int) -> bytes:
    """Return a pickle of a tensor whose storage has `numbers`, as it says."""
    text, whole = lambda t: b"X%c\0\0\0" % len(t) + t, lambda n: b"\x8a\x08" + n.to_bytes(8, "little")
    storage = b"(%sctorch\nFloatStorage\n%s%s%stQ" % (text(b"storage"), text(b"0"), text(b"cpu"), whole(numbers))
    rest = b"K\0(%st(K\1t\x89ccollections\nOrderedDict\n)RtR." % whole(size)
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + rest


CODES = {  # which torch alone would take minutes or gigabytes for, or read
    "an array of 8 GiB": b"cbuiltins\nbytearray\n(\x8a\x05\0\0\0\0\2tR.",
    "bytes that double": b"c_codecs\nencode\nq\0X\1\0\0\0xX\6\0\0\0latin1\x86Rq\2X\3\0\0\0hexq\1%s."
    % (b"h\0h\2h\1\x86Rq\2" * 30),
    "tuples of tuples": b"N%sq\xff}h\xffK\1s." % b"".join(b"q%ch%c\x86" % (k, k) for k in range(60)),
    "a long name": b"cx\n%s\n." % (b"y" * (1 << 20)),
    "a name for the terminal": b"c\x1b]0;title\7\nname\n.",
    "a long text": b"X\xff\xff\xff\xff.",
    **{f"{sign!r} without an end": sign * MANY for sign in (b"}", b"(", b"N", b")")},
    "deep lists": b"]" * 900_000 + b"a" * 899_999 + b".",
    "a storage of terabytes": tensor(2**40, 20),
    "a tensor of terabytes": tensor(20, 2**40),
}
CALLS: dict[str, Program] = {
    "system": Program(),
    "eval": Program(eval, f"open({MARK!r}, 'w')"),
    "call": Program(subprocess.call, ["touch", MARK]),
    "partial": Program(functools.partial(open, MARK, "w")),
    "save": Program(torch.save, 1, MARK),
}
HIDDEN: dict[str, Callable[[Any], Any]] = {
    "alone": lambda value: value,
    "in a dict": lambda value: {"module": value},
    "in a state": lambda value: {"optimizer": {"state": {0: [value]}}},
    "beside a tensor": lambda value: [torch.ones(2), (value,)],
}
OLD, NEW = {"_use_new_zipfile_serialization": False}, {"pickle_protocol": 4}
FORMS: dict[str, Any] = {"zip": {}, "legacy": OLD, "protocol 4": NEW}


def saved(value: Any, **options: Any) -> bytes:
    torch.save(value, file := io.BytesIO(), **options)
    return file.getvalue()


STATES: dict[str, Callable[[bytes], bytes]] = {
    **{f"{name}, zip": lambda valid, code=code: archive(b"\x80\2" + code) for name, code in CODES.items()},
    **{f"{name}, legacy": lambda valid, code=code: legacy(b"\x80\2" + code) for name, code in CODES.items()},
    **{
        f"{call} {place}, {form}": lambda valid, v=value, h=hide, o=options: saved(h(v), **o)
        for call, value in CALLS.items() for place, hide in HIDDEN.items() for form, options in FORMS.items()
    },
    "compressed": lambda valid: archive(b"\x80\2" + b"N" * MANY + b".", zipfile.ZIP_DEFLATED),
}  # fmt: skip


def read_checkpoint(place: Path, path: Path) -> int:
    """Load a checkpoint of which a stranger has written one file, by our reader and by those of DeepSpeed."""
    folder, states = Path("saved"), Path("saved/tag/mp_rank_00_model_states.pt")
    states.parent.mkdir(parents=True)
    torch.save({"a": torch.ones(2)}, states)
    if place != states:
        files, sums = {states.name: states.stat().st_size}, {states.name: checksum_of(states)}
        Manifest(tag="tag", global_steps=1, is_latest=True, files=files, checksums=sums).write(states.parent)
    place.unlink(missing_ok=True)
    path.replace(place)
    try:
        chosen = choose_checkpoint(folder, None if place.name == "latest" else "tag")
        damage, _ = look_at_contents(folder, chosen, True, False)
        if damage is not None:
            raise ValueError(damage)
    except (OSError, ValueError) as error:
        print("".join(f"error: {line}\n" for line in str(error).splitlines()))
        is_small = states.is_file() and states.stat().st_size < 1 << 14
        if place == states and is_small and MARK in str(states.read_bytes()):
            refused_by_deepspeed(states)
        return 2
    print(chosen.note)
    return 0


def refused_by_deepspeed(states: Path) -> None:
    mapping = argparse.Namespace(_hp_mapping=argparse.Namespace())
    for read in (
        lambda: TorchCheckpointEngine().load(str(states)),
        lambda: load_hp_checkpoint_state(mapping, str(states.rename(states.with_name("exp_avg.pt")).parent), 0, 1),
    ):
        with strict_loading(), pytest.raises(pickle.UnpicklingError):
            read()


# -- what reads a file


def read(words: list[str]) -> int:
    """Run a command, or what reads a file without one, and return the exit code."""
    if words[0] != "a":
        return cli.main(words)
    if words[1] == "checkpoint":
        return read_checkpoint(Path(words[2]), Path(words[3]))
    if words[1] == "cache":
        read_cache(Path(words[2]), KEY)  # which warns of what it cannot use
        return 0
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


FEW = {
    "/dev/zero", "a pipe without a writer", "a bomb", "a pickle", "too many lists", "orders for the terminal",
    "bytes that double, zip", "an array of 8 GiB, zip", "tuples of tuples, legacy", "a long name, zip",
    "system in a state, zip",
}  # fmt: skip


def hostile(reader: str, path: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what a stranger may put at `path`: its name, and how to write it."""
    valid, _ = READERS[reader]
    data = valid if isinstance(valid, bytes) else (valid if isinstance(valid, str) else json.dumps(valid)).encode()
    for name, place in PLACES.items():
        yield name, lambda place=place: place(path)
    for name, content in (CONTENTS | (STATES if reader == "checkpoint" else {})).items():
        yield name, lambda content=content: path.write_bytes(content(data))
    for name, change in DOCUMENTS.items() if isinstance(valid, dict) else ():
        yield name, lambda change=change: path.write_text(json.dumps(change(valid)))
    if reader == "schedule":
        yield "orders for the terminal", lambda: path.write_bytes(data.replace(b"F0.", b"F\x1b9."))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    "is_all", [pytest.param(False, id="few"), pytest.param(True, id="all", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("reader", READERS)
def test_hostile_files(reader: str, is_all: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, problems = Path("hostile.json"), {}
    for number, (name, write) in enumerate(hostile(reader, path)):
        if not is_all and name not in FEW:
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        SIMULATED.save("valid.json")
        Path("config.json").write_text(json.dumps(DEEPSPEED))
        write()
        counts[f"hostile {reader}"] += 1
        if found := problems_of([str(path) if word == "FILE" else word for word in READERS[reader][1].split()]):
            problems[name] = found
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(folder)
    assert not problems, "\n".join(f"{reader}, {name}: {found}" for name, found in problems.items())
