"""The site: its navigation has every page, and the pages that are made of the source have all that the source has."""

import argparse
import importlib
import importlib.util
import inspect
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from terapipe_ds.cli import COMMANDS
from terapipe_ds.commands.options import options_of
from terapipe_ds.config import TeraPipeConfig

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", DOCS / "assets/site_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_navigation_has_all_pages(site: ModuleType) -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = re.findall(r"([\w/-]+\.md)$", navigation, re.MULTILINE)
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    made = {"reference/section.md", "reference/cli.md", *site.PROJECT.values()}
    assert len(named) == len(set(named))
    assert set(named) == pages | made


def test_the_section_page_has_all_keys(site: ModuleType) -> None:
    page = site.section_page()
    keys = set(TeraPipeConfig.model_fields)
    inner = {name: {"planner", "checkpoints", "links"} & {name} for name in keys}
    for name in keys:
        heading = rf"^## `{name}\." if inner[name] else rf"^## `{name}`$"
        assert re.search(heading, page, re.MULTILINE), name
    assert "- **default**: `64`" in page.partition("## `granularity_tokens`")[2].partition("\n## ")[0]
    assert '- **type**: `"mean_valid"` or `"mean"` or `"sum"`' in page


def test_the_command_line_page_has_all_options(site: ModuleType) -> None:
    page = site.cli_page()
    for name in COMMANDS:
        part = page.partition(f"\n## terapipe {name}\n")[2].partition("\n## ")[0]
        parser = argparse.ArgumentParser(add_help=False)
        options_of(importlib.import_module(f"terapipe_ds.commands.{name}")).add_to(parser)
        hidden = {action.dest for action in parser._actions if action.help == argparse.SUPPRESS}
        options = {word for action in parser._actions if action.dest not in hidden for word in action.option_strings}
        assert options and all(f"{option}" in part for option in options), name


SEARCHES = {
    "pipeline bubble": "schedules.md",
    "virtual stages": "schedules.md",
    "micro-batch": "how-it-works.md",
    "gradient accumulation": "how-it-works.md",
    "OOM": "memory.md",
    "out of memory": "memory.md",
    "context parallel": "sequence_parallel.md",
    "ring attention": "sequence_parallel.md",
    "gradient checkpointing": "configuration.md",
    "checkpoint": "checkpoints.md",
    "resume": "checkpoints.md",
    "Trainer": "trainer.md",
    "LoRA": "hugging_face.md",
    "fine-tuning": "tutorials/hugging_face.md",
    "packing": "tutorials/packed_documents.md",
    "hang": "failures.md",
    "SLURM": "several_machines.md",
    "benchmark": "bench.md",
    "MFU": "monitors.md",
    "NaN": "how-it-works.md",
    "accelerate": "trainer.md",
}
"""The page that the site's search shows first for these words."""


@pytest.mark.parametrize("query", SEARCHES)
def test_the_search_knows_the_words_of_readers(query: str) -> None:
    """Tags count a million times as much as text: more words of the query come first, then a shorter list."""
    settings = (ROOT / "mkdocs.yml").read_text()
    separator = re.search(r"separator: '(.*?)'", settings)
    assert separator is not None

    def words(text: str) -> list[str]:
        return [word.lower() for word in re.split(separator.group(1), text) if word]

    scores = {}
    for path in DOCS.rglob("*.md"):
        tags = re.match(r"---\ntags: \[(.*)\]\n", path.read_text())
        if tags is not None:
            named = words(tags.group(1))
            counts = [named.count(word) for word in words(query)]
            scores[path.relative_to(DOCS).as_posix()] = len(counts) - counts.count(0), sum(counts) / len(named)
    assert max(scores, key=scores.__getitem__) == SEARCHES[query], scores
    assert max(scores.values()) > (0, 0.0)


def test_links_that_leave_the_documents_lead_to_their_pages(site: ModuleType) -> None:
    turned = site.with_project_links("[a](../README.md#x) [b](../examples/a.py) [c](plan.md)", "index.md")
    assert turned == "[a](project/README.md#x) [b](../examples/a.py) [c](plan.md)"
    assert site.with_project_links("[a](../../patches/README.md)", "tutorials/a.md") == "[a](../project/patches.md)"
    page = site.project_page("README.md")
    assert "](../performance.md#" in page and "](../pictures/" in page and "](CONTRIBUTING.md)" in page


def test_the_public_names_are_in_the_reference() -> None:
    import terapipe_ds

    page = (DOCS / "reference/api.md").read_text()
    shown = set(re.findall(r"^::: [\w.]*\.(\w+)$", page, re.MULTILINE))
    names = set(terapipe_ds.__all__) - {"planner", "schedule", "__version__", "TeraPipeConfigError"}
    assert names <= shown


def test_the_reference_has_an_example_and_all_arguments_of_each_name() -> None:
    """Each argument stands in the docstring or below it on the page."""
    page = (DOCS / "reference/api.md").read_text()
    for path, text in re.findall(r"^::: ([\w.]+)$(.*?)(?=^::: |\Z)", page, re.MULTILINE | re.DOTALL):
        module, _, name = path.rpartition(".")
        value = getattr(importlib.import_module(module), name)
        assert "```python" in text, path
        engine = name == "TeraPipeEngine"
        members = re.findall(r"members: \[(.*)\]", text)[0].split(", ") if engine else []
        for function in [getattr(value, member) for member in members] or [value]:
            words = set(re.findall(r"\w+", f"{inspect.getdoc(function)} {text}"))
            arguments = set(inspect.signature(function).parameters) - {"self", "args", "kwargs"}
            assert name == "TeraPipeConfig" or arguments <= words, (path, arguments - words)
    config = page.partition("::: terapipe_ds.config.section.TeraPipeConfig")[2].partition("\n::: ")[0]
    assert "configuration.md#all-keys" in config


def test_pages_ask_for_nothing_from_the_network() -> None:
    """What a page loads is in the site: no font, script or style sheet comes from elsewhere."""
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in settings and "http" not in settings
    for path in (DOCS / "assets").glob("*.[cj]s*"):
        assert "http" not in path.read_text(), path


def test_a_picture_opens_and_a_number_stays_beside_its_unit(site: ModuleType) -> None:
    html = '<p>4 % <img alt="a" src="pictures/a.svg" /></p><table><td>12 s</td><td>8 % of 3 GiB, 5 stages</td></table>'
    shown = site.on_page_content(html, None, None, None)
    assert '<p>4 % <a class="picture" href="pictures/a.svg"><img alt="a" src="pictures/a.svg" /></a></p>' in shown
    assert "<td>12&nbsp;s</td><td>8&nbsp;% of 3&nbsp;GiB, 5 stages</td>" in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_of_commands_fit_the_page_and_may_be_pasted(name: str) -> None:
    module = importlib.import_module(f"terapipe_ds.commands.{name}")
    assert [line for line in module.EXAMPLES.splitlines() if len(line) > 96] == []
    parser = argparse.ArgumentParser()
    options_of(module).add_to(parser)
    commands = re.findall(rf"^  terapipe {name}\b(.*)$", re.sub(r" \\\n +", " ", module.EXAMPLES), re.MULTILINE)
    assert commands
    for command in commands:
        parser.parse_args(shlex.split(command.split(" > ")[0], comments=True))  # a stray word is an error
