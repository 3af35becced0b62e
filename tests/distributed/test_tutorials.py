"""Test the programs of the tutorials and the shortest examples, run as printed on two stages."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.distributed.harness import rank_pool

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"


def program(name: str) -> dict[str, Any]:
    """Return the names of a tutorial's Python blocks, run one after the other as one program."""
    page = TUTORIALS / f"{name}.md"
    names: dict[str, Any] = {"__name__": f"tutorials.{name}"}
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        exec(compile(block, str(page), "exec"), names)
    return names


def losses_of(name: str, *, folder: list[str]) -> list[float]:
    return program(name)["train"](20, *folder)


def run_same_as_whole() -> None:
    """Run the example, which asserts what it shows."""
    example = ROOT / "examples" / "same_as_whole.py"
    with mock.patch.object(sys, "path", [str(example.parent), *sys.path]):
        runpy.run_path(str(example))["main"]()


def falls(losses: list[float]) -> bool:
    """Return whether the loss falls from guessing among 64 tokens, ln 64 = 4.16, to less than half of it."""
    return 3.5 < losses[0] < 5 and losses[-1] < 2


@pytest.mark.parametrize("name", ["packed_documents", "strategy"])
def test_programs_without_ranks(name: str) -> None:
    program(name)  # they assert what they show


def test_my_pipeline_module_learns_to_count() -> None:
    for losses in rank_pool(2).run(losses_of, name="pipeline_module", folder=[]):
        assert falls(losses), losses


@pytest.mark.full
def test_a_llama_learns_to_count(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf: pip install terapipe_ds[hf]")
    for losses in rank_pool(2).run(losses_of, name="hugging_face", folder=[str(tmp_path)]):
        assert falls(losses), losses
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).config.num_hidden_layers == 2


def test_slices_train_as_the_plain_loop_of_the_example() -> None:
    rank_pool(2).run(run_same_as_whole)
