"""Where ranks meet, no rank may raise alone: file calls go through functions that gather results. Read from the source.

A rank that cannot read a file between two collectives would leave while the others wait for it. So in a function that
meets other ranks, a call that may raise OSError stands in what is handed to such a function (a lambda, a function
inside), in a block that tells all ranks of errors, or where the error is handled.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "terapipe_ds"

FILE_CALLS = {
    "copyfile", "copytree", "exists", "fsync", "getsize", "glob", "is_dir", "is_file", "is_symlink", "iterdir",
    "listdir", "load_file", "lstat", "makedirs", "mkdir", "open", "os.replace", "read_bytes", "read_text", "rename",
    "rglob", "rmdir", "rmtree", "safe_open", "save_file", "scandir", "stat", "symlink_to", "torch.load", "torch.save",
    "touch", "unlink", "write_bytes", "write_text",
}  # fmt: skip
MEETINGS = {  # of torch_dist
    "all_gather", "all_gather_object", "all_reduce", "barrier", "broadcast", "broadcast_object_list", "new_group",
    "recv", "recv_object_list", "send", "send_object_list",
}  # fmt: skip
MEET = ("runtime.agreement", "meet")  # in the store
TOLD = {"refused_on_all_ranks", "_on_all_ranks", "suppress", "attempt"}  # blocks: all ranks raise it, or none does
CAUGHT = {"OSError", "Exception", "BaseException"}
OWN = {("costs.devices", "device_cards"), ("runtime.profiling.key", "cpu_name")}  # the package's own file, and /proc
WHOSE_PARENT_ENDS_ALL = ("bench.", "commands.")  # ranks that a parent process has started, and ends when one fails

Key = tuple[str, str]  # a module, and a function or Class.method in it


class Source:
    """The functions of a package, and what each of them does by itself and by what it calls."""

    def __init__(self, package: Path) -> None:
        self._functions: dict[Key, ast.FunctionDef] = {}
        self._imports: dict[str, dict[str, Key]] = {}
        self._methods: dict[str, list[Key]] = {}
        for path in sorted(package.rglob("*.py")):
            module = ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__")
            tree = ast.parse(path.read_text())
            self._imports[module] = {
                alias.asname or alias.name: (str(node.module).removeprefix("terapipe_ds."), alias.name)
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            }
            for owner in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
                for node in (each for each in owner.body if isinstance(each, ast.FunctionDef)):
                    key = module, f"{getattr(owner, 'name', '')}.{node.name}".lstrip(".")
                    self._functions[key] = node
                    self._methods.setdefault(node.name, []).extend([key] * (owner is not tree))
        self._calls = {key: [*self._calls_of(key)] for key in self._functions}
        meetings = {f"torch_dist.{name}" for name in MEETINGS}
        self.meeting = self._closure(lambda key, name, _: key == MEET or name in meetings)
        self.reading = self._closure(lambda key, name, told: not told and key not in OWN and name in FILE_CALLS, False)

    def wrong(self) -> Iterator[str]:
        """Yield the places where a rank may raise alone between two meetings."""
        for key in sorted(self.meeting):
            for line, name, called, is_told in self._calls[key]:
                is_file = name in FILE_CALLS if called is None else called in self.reading - self.meeting
                if is_file and not is_told and not key[0].startswith(WHOSE_PARENT_ENDS_ALL):
                    yield f"{'.'.join(key)}, line {line}: {name}"

    def _closure(self, does: Callable[[Key, str, bool], bool], also_told: bool = True) -> set[Key]:
        """Return the functions that do something, or call one that does."""
        found: set[Key] = set()
        while True:
            more = {
                key
                for key, calls in self._calls.items()
                for _, name, called, told in calls
                if (does(key, name, told) if called is None else called in found and (also_told or not told))
            }
            if more <= found:
                return found
            found |= more

    def _calls_of(self, key: Key) -> Iterator[tuple[int, str, Key | None, bool]]:
        """Yield the calls in the body itself: what functions inside it do is done by those to whom they are handed."""
        function = self._functions[key]
        inside = {node.name for node in ast.walk(function) if isinstance(node, ast.FunctionDef)} - {function.name}

        def walk(node: ast.AST, is_told: bool) -> Iterator[tuple[int, str, Key | None, bool]]:
            parts = [(each, is_told) for each in ast.iter_child_nodes(node)]
            match node:
                case ast.FunctionDef() | ast.Lambda():
                    return
                case ast.Try(body=body, handlers=handlers):
                    parts = [(each, is_told or (each in body and any(map(_handles, handlers)))) for each, _ in parts]
                case ast.With(items=items):
                    is_block = any(_name(getattr(item.context_expr, "func", None)) in TOLD for item in items)
                    parts = [(each, is_told or is_block) for each, _ in parts]
                case ast.Call(func=func, keywords=keywords) if _name(func) not in inside:
                    is_mild = any(keyword.arg == "ignore_errors" for keyword in keywords)
                    name, owner = _name(func), _name(getattr(func, "value", None))
                    if owner in ("os", "torch", "torch_dist") and name not in FILE_CALLS:
                        name = f"{owner}.{name}"
                    yield node.lineno, name, self._called(key, func), is_told or is_mild
            for each, told in parts:
                yield from walk(each, told)

        for statement in function.body:
            yield from walk(statement, False)

    def _called(self, key: Key, func: ast.expr) -> Key | None:
        """Return the function of the package that is called, as far as names tell: of methods only by one class."""
        module, name = key[0], _name(func)
        if isinstance(func, ast.Name):
            module, name = self._imports[module].get(name, (module, name))
            candidates = [(module, name), (module, f"{name}.__init__")]
        else:
            methods = self._methods.get(name, [])
            candidates = (
                [(module, f"{key[1].partition('.')[0]}.{name}")]
                if _name(getattr(func, "value", func)) == "self"
                else []
            )
            candidates += methods if len(methods) == 1 and name not in FILE_CALLS else []
        return next((each for each in candidates if each in self._functions), None)


def _name(node: ast.AST | None) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _handles(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(_name(kind) in CAUGHT for kind in kinds) and not any(isinstance(n, ast.Raise) for n in ast.walk(handler))


def test_no_rank_raises_alone_for_a_file_while_others_wait() -> None:
    source = Source(PACKAGE)
    assert {("runtime.checkpoints.save", "save_checkpoint"), ("runtime.register", "_section")} <= source.meeting
    assert {("files.bounded", "read_bytes"), ("runtime.checkpoints.save", "CheckpointPaths.commit")} <= source.reading
    assert list(source.wrong()) == []


TOLD_TO_ALL = """def told(folder, world):
    everyone = gather_results(lambda: folder.is_dir(), world)
    with contextlib.suppress(OSError):
        folder.unlink()
    try:
        folder.stat()
    except OSError:
        everyone = []
    return gather(everyone)
"""


@pytest.mark.parametrize(("body", "wrong"), [
    (TOLD_TO_ALL, []),
    ("def look(folder): return gather(folder.is_dir())", ["look, line 2: is_dir"]),
    (TOLD_TO_ALL.replace("except OSError:", "except KeyError:"), ["told, line 7: stat"]),
    (TOLD_TO_ALL.replace("everyone = []", "raise"), ["told, line 7: stat"]),
    ("def f(x):\n    g(x)\n    gather(x)\ndef g(x): os.replace(x, x)", ["f, line 3: g"]),
    ("class A:\n    def f(s, x): h(s.here(x))\n    def here(s, x): return open(x)\n"
     "def h(x): torch_dist.barrier()", ["A.f, line 3: here"]),
    ("def f(x):\n    def read(): return x.read_text()\n    return gather_results(read)", []),
])  # fmt: skip
def test_it_sees_what_is_wrong(body: str, wrong: list[str], tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "agreement.py").write_text((PACKAGE / "runtime" / "agreement.py").read_text())
    (tmp_path / "one.py").write_text(f"from terapipe_ds.runtime.agreement import gather, gather_results\n{body}")
    assert [line for line in Source(tmp_path).wrong() if line.startswith("one.")] == [f"one.{each}" for each in wrong]
