"""Who may import whom. Four rings; a module imports its own ring and the ones inside it, never one outside.

The rules are read from the source with `ast`, imports inside functions included; nothing needs installing.
"""

import ast
import dataclasses
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "terapipe_ds"

# The longest prefix counts.
RINGS = {
    "config": 0, "plan": 0, "strategy": 0, "version": 0,
    "messages": 0, "costs": 0, "compat": 0, "files": 0, "schedule": 0, "planner": 0,
    "simulator": 0, "timeline": 0,
    "attention": 1, "dict_batch": 1, "losses": 1,
    "runtime": 2, "run": 2,
    "models": 3, "integrations": 3, "bench": 3,
    "": 3, "cli": 3, "__main__": 3, "commands": 3, "doctor": 3,
}  # fmt: skip
# In a folder, what is listed may import only what is listed after it. What is not listed is there for all of these.
WINGS = {
    "runtime": (
        "register", "engine", "checkpoints", "verify", "planning", "profiling", "layers", "links", "batch",
        "layout", "failures",
    ),
}  # fmt: skip
MOST_NAMES = {"runtime": 13}
LAZY = ("cli", "__main__", "commands", "doctor")  # `--help` is fast: at import these are ring 0, in functions ring 3

# Third parties: the first ring that may import them. What is not listed is not a dependency of the package.
THIRD_PARTIES = {
    "numpy": 0, "pydantic": 0, "argcomplete": 0, "hjson": 0, "matplotlib": 0, "plotly": 0,
    "torch": 1, "flash_attn": 1, "transformer_engine": 1, "tqdm": 1,
    "torch.distributed": 2, "deepspeed": 2, "xxhash": 2,
    "megatron": 3, "jinja2": 3, "transformers": 3, "safetensors": 3, "peft": 3,
    "accelerate": 3, "trl": 3, "huggingface_hub": 3,
}  # fmt: skip
DEFERRED_ONLY = (
    "argcomplete", "hjson", "matplotlib", "plotly", "jinja2", "flash_attn", "transformer_engine", "megatron", "apex",
    "transformers", "safetensors", "peft", "accelerate", "trl", "huggingface_hub",
)  # fmt: skip
# Packages that are there for optional third parties: they import these freely.
EXTRAS = {"models.megatron": ("megatron",),
          "models.hugging_face": ("transformers", "safetensors", "peft", "huggingface_hub"),
          "integrations.trainer": ("transformers", "accelerate", "trl")}  # fmt: skip
COMPAT_ONLY = ("packaging", "importlib.metadata", "apex", "pkg_resources")  # what looks at versions
FORBIDDEN = {"models": ("runtime",)}  # beyond the rings


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module, as written somewhere in `module`."""

    module: str  # relative to the package: "runtime.engine", "" for the package itself
    target: str  # absolute: "terapipe_ds.plan", "torch.distributed"
    line: int
    deferred: bool  # inside a function, or for type checkers alone: not run when the module is imported


def is_lazy(module: str) -> bool:
    return module == "" or is_or_is_in(module, LAZY)


def ring_of(module: str) -> int | None:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        ring = RINGS.get(".".join(parts[:length]))
        if ring is not None:
            return ring
    return None


def modules_in(package: Path) -> dict[str, Path]:
    """Dotted name inside the package -> file."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def imports_in(module: str, path: Path, modules: set[str], exports: dict[str, str]) -> Iterator[Import]:
    package = ("terapipe_ds." + module).rstrip(".").split(".")
    if not _is_face(path):
        package.pop()

    def meant(source: str, name: str) -> str:
        """`from terapipe_ds import plan` means the module, `import register` where it comes from."""
        if source == "terapipe_ds" and name in exports:
            return exports[name]
        full = f"{source}.{name}"
        if full.startswith("terapipe_ds."):
            return full if full.removeprefix("terapipe_ds.") in modules else source
        return full if full in THIRD_PARTIES or full in COMPAT_ONLY else source

    def targets(node: ast.AST) -> list[str]:
        match node:
            case ast.Import():
                return [alias.name for alias in node.names]
            case ast.ImportFrom():
                base = package[: len(package) - node.level + 1] if node.level else []
                source = ".".join([*base, *filter(None, [node.module])])
                return [meant(source, alias.name) for alias in node.names]
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                return [name]
            case ast.Attribute(value=ast.Name(id="torch"), attr="distributed"):
                return ["torch.distributed"]  # `import torch` makes it reachable without another import
        return []

    def walk(node: ast.AST, deferred: bool) -> Iterator[Import]:
        yield from (Import(module, target, getattr(node, "lineno", 0), deferred) for target in targets(node))
        for_types = node.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) else []
        for child in ast.iter_child_nodes(node):
            yield from walk(child, deferred or isinstance(node, FUNCTIONS) or child in for_types)

    return walk(parsed(path), deferred=False)


def lazy_exports(package: Path) -> dict[str, str]:
    """The table `_EXPORTS` of the package's `__init__`: public name -> module."""
    for node in parsed(package / "__init__.py").body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_EXPORTS":
            return dict(ast.literal_eval(node.value))
    return {}


@functools.cache
def imports_of(package: Path) -> list[Import]:
    modules, exports = modules_in(package), lazy_exports(package)
    return [each for module, path in modules.items() for each in imports_in(module, path, {*modules}, exports)]


def is_or_is_in(name: str, parents: tuple[str, ...]) -> bool:
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


def breach(found: Import) -> str | None:
    """What is wrong with an import, or None."""
    module, target = found.module, found.target
    ring = 0 if is_lazy(module) and not found.deferred else ring_of(module)
    if ring is None:
        return "the module has no ring: add it to RINGS"
    if not is_or_is_in(module, ("compat",)) and is_or_is_in(target, COMPAT_ONLY):
        return "only compat looks at versions and optional packages"
    if target.partition(".")[0] == "terapipe_ds":
        return _breach_inside(module, ring, target.removeprefix("terapipe_ds").lstrip("."))
    return _breach_outside(module, ring, target, found.deferred)


def _breach_inside(module: str, ring: int, target: str) -> str | None:
    if target == "" or (is_lazy(module) and is_lazy(target)):
        return None
    if is_lazy(target):
        return f"{target} is for users, not for the package"
    if is_or_is_in(target, FORBIDDEN.get(module.partition(".")[0], ())):
        return f"{module.partition('.')[0]}/ never imports {target}"
    target_ring = ring_of(target)
    if target_ring is None:
        return f"{target} has no ring: add it to RINGS"
    return f"ring {ring} imports ring {target_ring}" if target_ring > ring else None


def _breach_outside(module: str, ring: int, target: str, deferred: bool) -> str | None:
    if target.partition(".")[0] in sys.stdlib_module_names and not is_or_is_in(target, ("importlib.metadata",)):
        return None
    if is_or_is_in(module, ("compat",)):
        return None if deferred or is_or_is_in(target, ("importlib.metadata",)) else "compat imports inside functions"
    extras = next((EXTRAS[name] for name in EXTRAS if is_or_is_in(module, (name,))), ())
    if not deferred and is_or_is_in(target, DEFERRED_ONLY) and not is_or_is_in(target, extras):
        return f"{target} is optional: import it inside the function that needs it"
    owner = next((name for name in sorted(THIRD_PARTIES, key=len, reverse=True) if is_or_is_in(target, (name,))), None)
    if owner is None:
        return f"{target} is not a dependency of the package"
    return f"ring {ring} imports {target} (ring {THIRD_PARTIES[owner]})" if THIRD_PARTIES[owner] > ring else None


def breaches(package: Path) -> list[str]:
    """One line per breach: `runtime/engine.py:12: ...`."""
    files = modules_in(package)
    lines = []
    for found in imports_of(package):
        wrong = breach(found)
        if wrong is not None:
            place = files[found.module].relative_to(package)
            lines.append(f"{place}:{found.line}: imports {found.target}: {wrong}")
    return lines


def test_every_module_has_a_ring_and_does_not_break_it() -> None:
    assert breaches(PACKAGE) == []
    assert [module for module in modules_in(PACKAGE) if ring_of(module) is None] == []


# --- wings, and circles

Arrows = set[tuple[str, str]]


@functools.cache
def arrows(package: Path) -> Arrows:
    """Return (importer, imported) of all modules of the package, faces (`__init__`) among the imported only."""
    files = modules_in(package)
    inside = ((each.module, each.target.removeprefix("terapipe_ds.")) for each in imports_of(package))
    return {(one, other) for one, other in inside if other in files and one != other and not _is_face(files[one])}


def _is_face(path: Path) -> bool:
    return path.name == "__init__.py"


def circle(links: Arrows) -> set[str]:
    """Return nodes that reach one another; empty where there are none."""
    graph = graphlib.TopologicalSorter[str]()
    for one, other in sorted(links):
        graph.add(one, other)
    try:
        graph.prepare()
    except graphlib.CycleError as error:
        return set(error.args[1])
    return set()


def entries(links: Arrows, folder: str) -> Arrows:
    """Return the arrows between the files and folders that lie in `folder`; "" is the package."""
    prefix = folder and folder + "."

    def entry(module: str) -> str | None:
        return module.removeprefix(prefix).partition(".")[0] if module.startswith(prefix) else None

    pairs = {(entry(one), entry(other)) for one, other in links}
    return {(one, other) for one, other in pairs if one and other and one != other}


def wing_breaches(links: Arrows, folder: str) -> list[str]:
    """Return the arrows in `folder` that lead up: from a wing to one before it, or from the ground to a wing."""
    order = WINGS[folder]
    place = {name: index for index, name in enumerate(order)}
    low = len(order)
    return sorted(
        f"{one} imports {other}" for one, other in entries(links, folder) if place.get(one, low) > place.get(other, low)
    )


FOLDERS = [module for module, path in modules_in(PACKAGE).items() if _is_face(path)]  # "" is the package itself


def test_no_two_files_import_one_another() -> None:
    files = modules_in(PACKAGE)
    assert circle({(one, other) for one, other in arrows(PACKAGE) if not _is_face(files[other])}) == set()


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_two_entries_of_a_folder_import_one_another(folder: str) -> None:
    assert circle(entries(arrows(PACKAGE), folder)) == set()


@pytest.mark.parametrize("folder", WINGS)
def test_a_wing_imports_only_wings_after_it(folder: str) -> None:
    assert wing_breaches(arrows(PACKAGE), folder) == []


@pytest.mark.parametrize("folder", MOST_NAMES)
def test_a_folder_has_few_names(folder: str) -> None:
    inside = [module.removeprefix(folder + ".") for module in modules_in(PACKAGE) if module.startswith(folder + ".")]
    names = {module.partition(".")[0] for module in inside}
    assert len(names) <= MOST_NAMES[folder], sorted(names)
    assert set(WINGS[folder]) <= names


def test_an_engine_is_not_anything() -> None:
    """What a function wants of an engine is said by a type. ruff's SLF looks for private attributes of others."""
    untyped = [
        f"{path.relative_to(PACKAGE)}:{argument.lineno}"
        for path in PACKAGE.rglob("*.py")
        for argument in ast.walk(parsed(path))
        if isinstance(argument, ast.arg) and argument.arg.endswith("engine") and ast.unparse(argument)[-5:] == ": Any"
    ]
    assert not untyped


def test_circles_and_breaches_are_found() -> None:
    up, down = ("runtime.links.a", "runtime.engine.b"), ("runtime.engine.c", "runtime.links.d")
    links = {up, ("runtime.engine.b", "runtime.log"), ("a.x", "a.y"), ("a.y", "a.x")}
    assert circle(links) == {"a.x", "a.y"}
    assert wing_breaches(links, "runtime") == ["links imports engine"]
    found = wing_breaches(links | {("runtime.log", "runtime.batch.c")}, "runtime")
    assert found == ["links imports engine", "log imports batch"]
    assert circle(entries(links | {down}, "runtime")) == {"links", "engine"}


# --- the walk itself

EXPORTS = '_EXPORTS = {"register": "terapipe_ds.runtime.register", "SlicePlan": "terapipe_ds.plan"}\n'
INNER = ("plan", "compat", "schedule.action", "attention.sliced")
FILES = (*INNER, "runtime.register", "models.gpt", "cli", "run", "bench.report")


def made_up(root: Path, module: str, source: str) -> list[str]:
    """The breaches of a package in which `module` has that source and every other file is empty."""
    package = root / "terapipe_ds"
    for name in FILES:
        path = package.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in (path.parent, package):
            (parent / "__init__.py").touch()
        path.touch()
    (package / "__init__.py").write_text(EXPORTS)
    path = package.joinpath(*module.split(".")).with_suffix(".py")
    path.write_text(source)
    return breaches(package)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("plan", "import torch"),
        ("plan", "def f():\n    import torch"),
        ("plan", "f = lambda: __import__('torch')"),
        ("plan", "import importlib\ndef f():\n    return importlib.import_module('torch.nn')"),
        ("plan", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("plan", "try:\n    import deepspeed\nexcept ImportError:\n    pass"),
        ("plan", "import matplotlib.pyplot as plt"),
        ("bench.report", "from studies import predict"),
        ("plan", "import importlib.metadata"),
        ("plan", "def f():\n    from packaging.version import Version"),
        ("plan", "from terapipe_ds import register"),
        ("plan", "from . import attention"),
        ("plan", "import terapipe_ds.cli"),
        ("schedule.action", "from ..attention.sliced import sliced_attention"),
        ("compat", "import apex"),
        ("attention.sliced", "import deepspeed"),
        ("attention.sliced", "from torch import distributed"),
        ("attention.sliced", "import torch\ndef f():\n    torch.distributed.barrier()"),
        ("attention.sliced", "import flash_attn"),
        ("attention.sliced", "def f():\n    import apex"),
        ("runtime.register", "from terapipe_ds.models.gpt import GPTConfig"),
        ("runtime.register", "def f():\n    import megatron.core"),
        ("run", "from terapipe_ds.models import gpt"),
        ("models.gpt", "from terapipe_ds.runtime import register"),
        ("models.gpt", "def f():\n    from terapipe_ds import register"),
        ("models.gpt", "import megatron.core"),
        ("cli", "import torch"),
        ("cli", "from terapipe_ds import register"),
        ("newcomer", "import os"),
    ],
)
def test_a_made_up_breach_is_found(tmp_path: Path, module: str, source: str) -> None:
    found = made_up(tmp_path, module, source)
    assert found
    assert all(line.startswith(module.replace(".", "/") + ".py:") for line in found)


ALLOWED = [
    ("plan", "from __future__ import annotations\nimport json, os.path"),
    ("plan", "import numpy as np\nfrom pydantic import BaseModel"),
    ("plan", "from terapipe_ds import SlicePlan, compat\nfrom .schedule import action\nimport terapipe_ds"),
    ("plan", "def draw():\n    import matplotlib.pyplot as plt"),
    ("plan", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from matplotlib.axes import Axes"),
    ("compat", "import importlib.metadata\ndef f():\n    import deepspeed, apex.optimizers"),
    ("attention.sliced", "import torch\nfrom terapipe_ds import plan\ndef f():\n    import flash_attn"),
    ("runtime.register", "import deepspeed, torch.distributed\nfrom terapipe_ds.attention import sliced"),
    ("models.gpt", "import torch, deepspeed\nfrom terapipe_ds.attention import sliced"),
    ("bench.report", "from terapipe_ds.runtime import register\nfrom terapipe_ds.models import gpt"),
    ("__main__", "from terapipe_ds.cli import main"),
    ("cli", "def f():\n    from terapipe_ds.runtime import register\n    import torch"),
]


@pytest.mark.parametrize(("module", "source"), ALLOWED)
def test_what_is_allowed_is_not_a_breach(tmp_path: Path, module: str, source: str) -> None:
    assert made_up(tmp_path, module, source) == []


def test_a_breach_is_shown_with_file_and_line(tmp_path: Path) -> None:
    assert made_up(tmp_path, "schedule.action", "import os\n\nimport torch\n") == [
        "schedule/action.py:3: imports torch: ring 0 imports torch (ring 1)"
    ]


# --- what an import really loads


def run_python(source: str) -> str:
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


HEAVY = "import sys; print([m for m in ('torch', 'deepspeed', 'matplotlib') if m in sys.modules])"


@pytest.mark.parametrize("source", [
    "import terapipe_ds.cli, terapipe_ds.config.section, terapipe_ds.costs.model_sizes, terapipe_ds.compat",
    "import terapipe_ds as t; t.SlicePlan, t.TeraPipeConfig, t.schedule.build, t.planner, t.simulate, t.plan_strategy",
])  # fmt: skip
def test_planning_loads_neither_torch_nor_deepspeed(source: str) -> None:
    assert run_python(f"{source}; {HEAVY}") == "[]"


def test_the_package_alone_loads_nothing_at_all() -> None:
    names = "('terapipe_ds', 'numpy', 'pydantic')"
    source = f"import terapipe_ds, sys; print([m for m in sys.modules if m.startswith({names})])"
    assert run_python(source) == "['terapipe_ds']"


def test_the_measure_sees_torch() -> None:
    assert "torch" in run_python(f"import sys; sys.modules['torch'] = sys; {HEAVY}")


def test_public_names() -> None:
    import terapipe_ds

    classes = {"SlicePlan", "TeraPipeConfig", "TeraPipeConfigError", "Timeline", "Cluster", "LayerChain", "Strategy"}
    entries = {"topology_of", "skeleton", "initialize", "lay_out", "register", "unregister"}
    entries |= {"from_config", "from_pretrained", "save_pretrained"}
    names = classes | entries | {"plan_slices", "plan_strategy", "planner", "schedule", "simulate"}
    assert set(terapipe_ds.__all__) == names | {"__version__"}
    assert names <= set(dir(terapipe_ds))
    assert terapipe_ds.__version__ == "0.1.0"
    with pytest.raises(AttributeError, match="module 'terapipe_ds' has no attribute 'registr'"):
        terapipe_ds.registr  # noqa: B018


def test_every_public_name_can_be_had() -> None:
    pytest.importorskip("deepspeed")
    import terapipe_ds

    assert not [name for name in terapipe_ds.__all__ if getattr(terapipe_ds, name) is None]
