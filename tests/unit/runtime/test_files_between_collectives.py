"""Where ranks meet, no rank may raise alone: file calls go through functions that gather results. Read from the source.

A rank that cannot read a file between two collectives would leave while the others wait for it. So in a function that
meets other ranks, a call that may raise OSError stands in what is handed to such a function (a lambda, a function
inside), in a block that tells all ranks of errors, or where the error is handled.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[3] / "terapipe_ds"

FILE_CALLS = {
    "copyfile", "copytree", "exists", "fsync", "getsize", "glob", "is_dir", "is_file", "is_symlink", "iterdir",
    "listdir", "load_file", "lstat", "makedirs", "mkdir", "open", "read_bytes", "read_text", "rglob", "rmdir", "rmtree",
    "safe_open", "save_file", "scandir", "stat", "symlink_to", "touch", "unlink", "write_bytes", "write_text",
}  # fmt: skip
OF_MODULES = {"os": {"replace", "rename", "open"}, "torch": {"load", "save"}}  # other names are those of values, too
MEETINGS = {"all_gather", "all_gather_object", "all_reduce", "barrier", "broadcast", "broadcast_object_list", "recv"}
MEETINGS |= {"recv_object_list", "send", "send_object_list", "new_group"}
STORES = {("runtime.agreement", "meet")}  # ranks meet in the store
TELL_ALL = {"refused_on_all_ranks", "_on_all_ranks"}  # blocks after which all ranks raise what one of them did
HANDLE = {"suppress", "attempt"}  # blocks that let no error of a file through
CAUGHT = {"OSError", "Exception", "BaseException"}
EXCEPT = {("costs.devices", "device_cards"), ("runtime.profiling.key", "cpu_name")}  # the package's own file, and /proc
WHOSE_PARENT_ENDS_ALL = ("bench.", "commands.")  # ranks that a parent process has started, and ends when one fails


class Function(NamedTuple):
    """A function of the package: its module, and the class that it is a method of."""

    module: str
    owner: str
    node: ast.FunctionDef

    @property
    def key(self) -> tuple[str, str]:
        return self.module, f"{self.owner}.{self.node.name}".lstrip(".")


class Call(NamedTuple):
    node: ast.Call
    is_told: bool  # its error is told to all ranks, or handled


class Source:
    """The functions of a package, and what each of them does by itself and by what it calls."""

    def __init__(self, package: Path) -> None:
        self.functions: dict[tuple[str, str], Function] = {}
        self._imports: dict[str, dict[str, tuple[str, str]]] = {}
        self._methods: dict[str, list[Function]] = {}
        for path in sorted(package.rglob("*.py")):
            module = ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__")
            tree = ast.parse(path.read_text())
            self._imports[module] = dict(_imported(tree))
            for owner, node in _defined(tree):
                function = Function(module, owner, node)
                self.functions[function.key] = function
                if owner:
                    self._methods.setdefault(node.name, []).append(function)
        self.meeting = self._closure(lambda f, call: _is_meeting(call.node) or f.key in STORES, only_untold=False)
        self.reading = self._closure(lambda _, call: _is_file_call(call.node), only_untold=True)

    def wrong(self) -> Iterator[str]:
        """Yield the places where a rank may raise alone between two meetings."""
        for key in sorted(self.meeting):
            if key[0].startswith(WHOSE_PARENT_ENDS_ALL):
                continue
            for call in _calls(self.functions[key].node):
                called = self._called(self.functions[key], call.node)
                is_file = _is_file_call(call.node) if called is None else called in self.reading - self.meeting
                if is_file and not call.is_told:
                    yield f"{'.'.join(key)}, line {call.node.lineno}: {ast.unparse(call.node.func)}"

    def _closure(self, does: Callable[[Function, Call], bool], only_untold: bool) -> set[tuple[str, str]]:
        """Return the functions that do something, or call one that does."""
        found: set[tuple[str, str]] = set()
        calls = {
            key: [(call, self._called(f, call.node)) for call in _calls(f.node) if not (only_untold and call.is_told)]
            for key, f in self.functions.items()
        }
        while True:
            more = {
                key
                for key, made in calls.items()
                if key not in found | (EXCEPT if only_untold else set())
                and any((to is None and does(self.functions[key], call)) or to in found for call, to in made)
            }
            if not more:
                return found
            found |= more

    def _called(self, function: Function, call: ast.Call) -> tuple[str, str] | None:
        """Return the function of the package that is called, as far as names tell: of methods only by one class."""
        match call.func:
            case ast.Name(id=name):
                module, name = self._imports[function.module].get(name, (function.module, name))
                for key in ((module, name), (module, f"{name}.__init__")):
                    if key in self.functions:
                        return key
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if (
                key := (function.module, f"{function.owner}.{name}")
            ) in self.functions:
                return key
            case ast.Attribute(attr=name) if len(self._methods.get(name, ())) == 1 and name not in FILE_CALLS:
                return self._methods[name][0].key
        return None


def _imported(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("terapipe_ds."):
            for alias in node.names:
                yield alias.asname or alias.name, ((node.module or "").removeprefix("terapipe_ds."), alias.name)


def _defined(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield "", node
        elif isinstance(node, ast.ClassDef):
            yield from ((node.name, each) for each in node.body if isinstance(each, ast.FunctionDef))


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_meeting(call: ast.Call) -> bool:
    match call.func:
        case ast.Attribute(value=ast.Name(id="torch_dist" | "distributed"), attr=name):
            return name in MEETINGS
    return False


def _is_file_call(call: ast.Call) -> bool:
    match call.func:
        case ast.Attribute(value=ast.Name(id=module), attr=name) if module in OF_MODULES:
            return name in OF_MODULES[module] | FILE_CALLS - {"open"} or (module, name) == ("os", "open")
        case ast.Attribute(attr="rmtree") if any(keyword.arg == "ignore_errors" for keyword in call.keywords):
            return False
    return _name(call.func) in FILE_CALLS | {"rename"}


def _calls(function: ast.FunctionDef) -> Iterator[Call]:
    """Yield the calls in the body itself: what functions inside it do is done by those to whom they are handed."""
    inside = {node.name for node in ast.walk(function) if isinstance(node, ast.FunctionDef) and node is not function}

    def walk(node: ast.AST, is_told: bool) -> Iterator[Call]:
        match node:
            case ast.FunctionDef() | ast.Lambda():
                return
            case ast.Try(handlers=handlers) if any(map(_handles, handlers)):
                for each in node.body:
                    yield from walk(each, True)
                rest = [*handlers, *node.orelse, *node.finalbody]
                for each in rest:
                    yield from walk(each, is_told)
                return
            case ast.With(items=items):
                names = {_name(item.context_expr.func) for item in items if isinstance(item.context_expr, ast.Call)}
                is_told = is_told or bool(names & (TELL_ALL | HANDLE))
            case ast.Call() if _name(node.func) not in inside:
                yield Call(node, is_told)
        for each in ast.iter_child_nodes(node):
            yield from walk(each, is_told)

    for statement in function.body:
        yield from walk(statement, False)


def _handles(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type] if handler.type else []
    is_caught = not kinds or any(_name(kind) in CAUGHT for kind in kinds)
    return is_caught and not any(isinstance(node, ast.Raise) for node in ast.walk(handler))


def test_no_rank_raises_alone_for_a_file_while_others_wait() -> None:
    source = Source(PACKAGE)
    assert {("runtime.checkpoints.save", "save_checkpoint"), ("runtime.register", "_section")} <= source.meeting
    assert {("files.bounded", "read_bytes"), ("runtime.checkpoints.save", "CheckpointPaths.commit")} <= source.reading
    assert list(source.wrong()) == []


TOLD = """
def told(folder, world):
    everyone = gather_results(lambda: folder.is_dir(), world)
    with contextlib.suppress(OSError):
        folder.unlink()
    try:
        folder.stat()
    except OSError:
        everyone = []
    return gather(everyone)
"""


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        (TOLD, []),
        ("def look(folder, world): return gather(folder.is_dir(), world)", ["look, line 3: folder.is_dir"]),
        (TOLD.replace("except OSError:", "except KeyError:"), ["told, line 9: folder.stat"]),
        (TOLD.replace("everyone = []", "raise"), ["told, line 9: folder.stat"]),
        ("def f(x):\n    g(x)\n    gather(x)\ndef g(x): os.replace(x, x)", ["f, line 4: g"]),
        ("class A:\n    def f(s, x): h(s.only_here(x))\n    def only_here(s, x): return open(x)\n"
         "def h(x): torch_dist.barrier()", ["A.f, line 4: s.only_here"]),
        ("def f(x):\n    def read(): return x.read_text()\n    return gather_results(read)", []),
    ],
)  # fmt: skip
def test_it_sees_what_is_wrong(body: str, wrong: list[str], tmp_path: Path) -> None:
    agreement = (PACKAGE / "runtime" / "agreement.py").read_text()
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "agreement.py").write_text(agreement)
    head = "from terapipe_ds.runtime.agreement import gather, gather_results\n\n"
    (tmp_path / "one.py").write_text(head + body)
    assert [line for line in Source(tmp_path).wrong() if line.startswith("one.")] == [f"one.{each}" for each in wrong]
