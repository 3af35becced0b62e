"""Files are written whole or not at all, and nothing in the package writes in another way."""

import ast
import errno
import gzip
import os
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import terapipe_ds
from terapipe_ds.files.atomic import check_writable, sync, write_atomically, write_text
from terapipe_ds.files.bounded import MAX_BYTES, read_bytes, unpacked
from terapipe_ds.files.strict_json import JsonError, parse_json
from terapipe_ds.plan import SlicePlan

PACKAGE = Path(terapipe_ds.__file__).parent
WRITING_METHODS = {"write_text", "write_bytes", "savefig", "tofile"}
WRITING_FUNCTIONS = {"json.dump", "pickle.dump", "torch.save", "np.save", "numpy.save", "np.savez", "numpy.savez"}
ALLOWED = {
    ("bench/report/plots.py", "figure.savefig(text"),  # into memory
    ("bench/report/plots.py", "figure.savefig(buffer"),
    ("timeline/picture.py", "figure.savefig(drawn"),
    ("files/atomic.py", "temporary.write_text(text"),
    ("files/atomic.py", "os.open(temporary"),
    ("files/bounded.py", "os.open(name, flags"),  # which `open` has chosen for reading
    ("runtime/failures/process_end.py", "os.open(f'/proc/self/fd/"),  # where stderr goes
}


def test_what_can_be_written_is_known_before(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("old")
    for path in (tmp_path / "new", there, Path("/dev/null")):
        check_writable(path)
    assert there.read_text() == "old" and list(tmp_path.iterdir()) == [there]
    for path in (tmp_path / "missing" / "new", there / "new", Path("/proc/new"), tmp_path / ("x" * 300)):
        with pytest.raises(OSError) as caught:
            check_writable(path)
        assert caught.value.filename == str(path)  # the name that the caller knows


def test_what_was_there_is_there_after_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_atomically(path, lambda temporary: temporary.write_text("half") + "full")
    with pytest.raises(OSError, match=r"^cannot write mode RGBA as JPEG$"):  # as pictures do, without a number
        write_atomically(path, mock.Mock(side_effect=OSError("cannot write mode RGBA as JPEG")))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no files below /dev")
def test_files_in_shared_memory_are_files() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        test_what_was_there_is_there_after_a_failure(Path(folder))


@pytest.mark.parametrize("durable", [False, True])
def test_who_reads_meanwhile_sees_all_of_the_old_file(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "picture.svg"
    path.write_text("old")
    with path.open() as reader:
        write_text(path, "new é", durable=durable)
        assert reader.read() == "old"
    assert path.read_bytes() == "new é".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    program = (
        "import os, signal, sys; from terapipe_ds.files.atomic import write_atomically\n"
        "def half(path): path.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_atomically(sys.argv[1], half)"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(path)], cwd=PACKAGE.parent, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert path.read_text() == "old"


def test_errors_name_the_file_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        write_text(tmp_path / "no folder" / "plan.json", "text")
    assert caught.value.filename == str(tmp_path / "no folder" / "plan.json")
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path, "text")


def test_links_are_followed_and_devices_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    link, target, pipe = tmp_path / "link", tmp_path / "target", tmp_path / "pipe"
    link.symlink_to(target)
    write_text(link, "text")
    assert link.is_symlink()
    assert target.read_text() == "text"
    write_text(os.devnull, "text")
    assert Path(os.devnull).is_char_device()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)


def test_what_takes_a_place_is_no_wider_than_what_was_there(tmp_path: Path) -> None:
    path, modes = tmp_path / "plan.json", []

    def write(temporary: Path) -> None:
        modes.append(stat.S_IMODE(temporary.stat().st_mode))
        temporary.write_text("new")

    for mode in (0o640, 0o600, 0o444, 0o664):
        path.write_text("old")
        path.chmod(mode)
        write_atomically(path, write)
        assert stat.S_IMODE(path.stat().st_mode) == mode
        path.unlink()
    assert modes == [0o600] * 4  # while it was written
    write_text(path, "new")
    other = tmp_path / "other"
    other.touch()
    assert path.stat().st_mode == other.stat().st_mode  # as the user's mask has it


def test_temporary_files_are_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two containers have the same process ids; and a stranger may leave a link where a file is to come."""
    path = tmp_path / "plan.json"

    def write(temporary: Path) -> None:
        write_text(path, "the other one, meanwhile")
        assert not temporary.read_text()
        temporary.write_text("this one")

    write_atomically(path, write)
    assert path.read_text() == "this one" and list(tmp_path.iterdir()) == [path]
    victim, names = tmp_path / "victim", iter("abc")
    victim.write_text("kept")
    monkeypatch.setattr(secrets, "token_hex", lambda size: next(names))
    (tmp_path / ".plan.json.a.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_text(path, "into the victim")
    assert victim.read_text() == "kept" and path.read_text() == "this one"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EINVAL, errno.EBADF])
def test_what_the_disk_does_not_have_is_an_error(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, of_folder = tmp_path / "latest", False
    path.write_text("old")
    flush = os.fsync

    def fail(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == of_folder:
            raise OSError(number, os.strerror(number))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    for act in (lambda: sync(path), lambda: write_text(path, "new", durable=True)):
        with pytest.raises(OSError) as caught:
            act()
        assert (caught.value.errno, caught.value.filename) == (number, str(path))
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    of_folder = True
    if number in (errno.EINVAL, errno.EBADF):  # file systems that cannot flush names
        sync(tmp_path)
        write_text(path, "new", durable=True)
        return
    for act, name in ((lambda: sync(tmp_path), tmp_path), (lambda: write_text(path, "new", durable=True), path)):
        with pytest.raises(OSError) as caught:
            act()
        assert (caught.value.errno, caught.value.filename) == (number, str(name))


def test_what_has_no_end_is_not_read_to_it(tmp_path: Path) -> None:
    pipe, large, bomb = tmp_path / "pipe", tmp_path / "large", gzip.compress(bytes(MAX_BYTES + 1))
    os.mkfifo(pipe)
    with large.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    for path, number in ((Path("/dev/zero"), errno.EFBIG), (large, errno.EFBIG), (pipe, errno.ESPIPE)):
        with pytest.raises(OSError) as caught:
            read_bytes(path)
        assert (caught.value.errno, caught.value.filename) == (number, str(path))
    with pytest.raises(OSError, match="too large"):
        unpacked(bomb, "result.json.gz")
    large.write_bytes(gzip.compress(b"text"))
    assert unpacked(read_bytes(large), large) == unpacked(b"text", large) == b"text"
    program = "from terapipe_ds.files.bounded import read_bytes; print(read_bytes('/dev/stdin').decode())"
    said = subprocess.run([sys.executable, "-c", program], input=b"piped", cwd=PACKAGE.parent, capture_output=True)
    assert said.stdout == b"piped\n", said.stderr


# -- nothing writes in another way ------------------------------------------------------------------------------


def bare_writes(source: str) -> Iterator[str]:
    """Calls that write a file in place: none of those that `write_atomically` is given."""
    tree = ast.parse(source)
    given = {
        inner
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "write_atomically"
        for argument in call.args
        for inner in ast.walk(argument)
    }
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and call not in given and _writes(call):
            yield ast.unparse(call)


def _writes(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    if name in WRITING_FUNCTIONS or (isinstance(call.func, ast.Attribute) and call.func.attr in WRITING_METHODS):
        return True
    if name != "open" and not name.endswith(".open"):
        return False
    if name == "os.open":
        return "O_RDONLY" not in ast.unparse(call) and not ast.unparse(call).startswith("os.open(os.devnull")
    is_method = isinstance(call.func, ast.Attribute) and name not in ("io.open", "gzip.open", "lzma.open")
    place = 0 if is_method else 1
    if not is_method and call.args and ast.unparse(call.args[0]) == "os.devnull":
        return False
    modes = [keyword.value for keyword in call.keywords if keyword.arg == "mode"] + call.args[place : place + 1]
    return any(not isinstance(mode, ast.Constant) or bool(set("wax+") & set(str(mode.value))) for mode in modes)


def test_every_file_is_written_by_the_helper() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {call}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for call in bare_writes(path.read_text(encoding="utf-8"))
        if not any(str(path.relative_to(PACKAGE)) == file and call.startswith(start) for file, start in ALLOWED)
    ]
    assert not found, "write by terapipe_ds.files.atomic, so that a killed process leaves no half: " + "; ".join(found)


@pytest.mark.parametrize("source", [
    "open(path, 'w')", "open(path, mode='ab')", "path.open('x')", "open(path, mode)", "Path(p).write_text(text)",
    "path.write_bytes(b'')", "os.open(path, os.O_WRONLY)", "json.dump(x, file)", "torch.save(x, path)",
    "figure.savefig(path)",
    "write_atomically(path, write); path.write_text('')",
])  # fmt: skip
def test_bare_writes_are_seen(source: str) -> None:
    good = "open(path); path.open('rb'); write_text(path, text); open(os.devnull, 'w')"
    assert len(list(bare_writes(f"{good}; write_atomically(path, lambda t: figure.savefig(t)); {source}"))) == 1


@pytest.mark.parametrize(("text", "reason"), [
    ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' occurs twice in one object"),
    (None, "it is None, and no text"),
    ("[1,", "EOF while parsing"),
    (b'"\xff"', "invalid unicode"),
    (f"[{'1,' * 1_000_001}1]", "it has 1,000,001 values, more than the 1,000,000 that are read"),
    ("[" * 300 + "]" * 300, "recursion limit exceeded"),
    (f"[{'[],' * 200_000}[]]", "it has 200,002 lists and objects, more than the 200,000 that are read"),
    (f"[{'9' * 5000}]", "number out of range"),
], ids=lambda each: str(each)[:20])  # fmt: skip
def test_what_is_no_usable_json_is_refused_with_the_reason(text: Any, reason: str) -> None:
    with pytest.raises(JsonError, match=reason):
        parse_json(text)
    assert parse_json(b'\xef\xbb\xbf{"a": [1, null]}') == {"a": [1, None]}
    plan = SlicePlan((3, 1))  # as editors on Windows write a file
    assert SlicePlan.from_json(b"\xef\xbb\xbf" + plan.to_json().encode() + b"\r\n") == plan
