"""A program may set torch's default device: what the engine makes says its device. Read from the source."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "terapipe_ds"
FACTORIES = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros"}


def test_tensors_are_made_on_a_device() -> None:
    files = [path for folder in ("attention", "losses", "runtime") for path in (PACKAGE / folder).rglob("*.py")]
    calls = [
        (node, f"{path.relative_to(PACKAGE)}:{node.lineno} {ast.unparse(node)}")
        for path in [*files, PACKAGE / "dict_batch.py"]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in FACTORIES}
    ]
    assert len(calls) > 40
    assert [text for node, text in calls if not {"device", "out"} & {each.arg for each in node.keywords}] == []
