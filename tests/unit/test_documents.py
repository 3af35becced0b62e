"""The documents: commands run as printed or at least parse, and links, paths, keys and names exist."""

import argparse
import ast
import contextlib
import dataclasses
import glob
import importlib
import importlib.util
import itertools
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import terapipe_ds
from terapipe_ds import cli
from terapipe_ds.commands.options import options_of
from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.config.conflicts import CONFLICTS
from terapipe_ds.schedule import SCHEDULE_NAMES
from terapipe_ds.timeline import Timeline, timeline_file_name
from tests.test_imports import MOST_NAMES, RINGS, WINGS

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "patches/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PROGRAMS = ("terapipe", "python", "deepspeed", "make", "pip", "git", "cd")
READERS = "train.py"  # a script of the reader's own
FOREIGN = {"tests/unit/runtime/pipe", "tests/unit/pipe", "tests/unit/checkpoint/test_pipeline.py"}  # of DeepSpeed
FOLDERS = {path.name for path in (*ROOT.iterdir(), *(ROOT / "terapipe_ds").iterdir()) if path.is_dir()} - {"out"}
in_each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


class Block(NamedTuple):
    """A fenced or indented block."""

    language: str
    text: str


def blocks(document: Path) -> list[Block]:
    text = document.read_text(encoding="utf-8")
    fenced = [Block(*match.groups()) for match in _FENCED.finditer(text)]
    indented = re.findall(r"(?<=\n\n)(?:    .*\n|\n(?=    ))+", _FENCED.sub("", text))
    return fenced + [Block("", re.sub("^    ", "", text, flags=re.MULTILINE)) for text in indented]


_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def spans(document: Path) -> list[str]:
    """Return the inline code."""
    return re.findall(r"`([^`]+)`", _FENCED.sub("", document.read_text(encoding="utf-8")))


def without_variables(words: list[str]) -> list[str]:
    """Return a command without the assignments in front of it."""
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return words


def commands(document: Path) -> Iterator[tuple[list[str], str]]:
    """Yield the words of the commands of all blocks, without comments, and what the document prints below each.

    In a block that begins with a program, each line is a command.
    """
    for block in blocks(document):
        text = block.text.replace("\\\n", " ")
        if text.startswith("$ "):
            line, _, output = text.removeprefix("$ ").partition("\n")
            yield shlex.split(line), output
            continue
        lines = [line for line in text.strip().splitlines() if not line.startswith("#")]
        first = without_variables(lines[0].split()) if lines else []
        if not block.language and first and first[0] in PROGRAMS:
            for line in filter(None, lines):
                words = shlex.split(line, comments=True)
                for is_and, group in itertools.groupby(words, "&&".__eq__):
                    if not is_and:
                        yield without_variables(list(group)), ""


# --- what a command is checked by


class Parsed(BaseException):
    """Ends a program whose options were parsed."""


@contextlib.contextmanager
def only_parsing(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> Iterator[None]:
    """Let a program that is started inside parse `words`, and end it there; fail if it does not come so far."""
    depth = 0

    def ending(parse: Any) -> Any:
        def parse_and_end(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            parsed = parse(*args, **kwargs)
            depth -= 1
            if depth == 0:
                assert not isinstance(parsed, tuple) or parsed[1] == [], words  # of parse_known_args: what is unknown
                raise Parsed
            return parsed

        return parse_and_end

    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", words)
        for name in ("parse_args", "parse_known_args"):
            patch.setattr(argparse.ArgumentParser, name, ending(getattr(argparse.ArgumentParser, name)))
        with pytest.raises((Parsed, SystemExit)) as end:
            yield
        assert getattr(end.value, "code", 0) == 0, words  # 0 after --help, 2 where a word was refused


def check(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a command names a program, option, target, module or file that does not exist."""
    program, *rest = words
    assert program in PROGRAMS, words
    for word in rest:
        check_path(word, ROOT)
    if program == "terapipe":
        with only_parsing(monkeypatch, words):
            cli.main(rest)
    elif program == "python":
        check_python(rest, monkeypatch)
    elif program == "deepspeed":
        check_launch(rest, monkeypatch)
    elif program == "make":
        check_make(rest)
    elif program == "pip":
        check_extras(rest)


def check_python(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if words[:2] == ["-m", "pytest"]:
        file, option, expression = words[2:]
        assert option == "-k"
        assert expression in (ROOT / file).read_text()
    elif words[0] == "-m":
        name = words[1]
        assert importlib.util.find_spec(name) is not None, name
        if name.partition(".")[0] != "torch":
            with only_parsing(monkeypatch, words[1:]):
                runpy.run_module(name, run_name="__main__")
    else:
        with only_parsing(monkeypatch, words):
            monkeypatch.syspath_prepend(str(ROOT / Path(words[0]).parent))
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")


def check_launch(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.launcher.runner import parse_args

    from terapipe_ds.run import split_arguments

    launch = parse_args(words)
    if launch.module:
        assert launch.user_script == "terapipe_ds.run"
        assert split_arguments(launch.user_args)[1] == READERS
    elif launch.user_script != READERS and "parse" in (ROOT / launch.user_script).read_text():
        check_python([launch.user_script, *launch.user_args], monkeypatch)


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, assigned, _ = word.partition("=")
        assert (f"$({name})" if assigned else f"\n{name}:") in makefile, f"make {word}"


def check_extras(words: list[str]) -> None:
    extras = re.findall(r'^        "(\w+)": \[', (ROOT / "setup.py").read_text(), re.MULTILINE)
    for word in words:
        for extra in re.findall(r"\[([\w,]+)\]", word):
            assert set(extra.split(",")) <= set(extras), word


def check_path(path: str, folder: Path) -> None:
    """Fail where a path begins with one of our folders and leads nowhere."""
    if re.fullmatch(r"[\w.-]+(/[\w.*-]+)*/?", path) and path.partition("/")[0] in FOLDERS and "/" in path:
        bases = (folder, ROOT, ROOT / "terapipe_ds")
        assert path in FOREIGN or any(list(base.glob(path.rstrip("/"))) for base in bases), path


@in_each_document
def test_every_command_parses(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, _ in commands(document):
        check(words, monkeypatch)


@in_each_document
def test_every_command_in_a_sentence_exists(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sentence a command may lack arguments: its name and its options must exist."""
    for span in spans(document):
        words = without_variables(shlex.split(span) if span.startswith((*PROGRAMS, "TERAPIPE_")) else [])
        if len(words) < 2 or words[0] not in PROGRAMS or "..." in span:
            continue
        if words[0] == "terapipe":
            assert words[1] in cli.COMMANDS, span
            options = {word for word in words if word.startswith("--")}
            assert options <= set(re.findall(r"--[\w-]+", help_of(words[1]))), span
        else:
            check(words, monkeypatch)


def help_of(command: str) -> str:
    parser = argparse.ArgumentParser()
    options_of(importlib.import_module(f"terapipe_ds.commands.{command}")).add_to(parser)
    return parser.format_help()


# --- what runs

RUN = ("show", "simulate", "timeline")
PLANNED = ("tutorials",)  # documents whose `terapipe plan` runs where an output is printed below it


@in_each_document
def test_fast_commands_run_as_printed(
    document: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    plans = document.parent.name in PLANNED
    runnable = [
        (words, output)
        for words, output in commands(document)
        if words[0] == "terapipe" and (words[1] in RUN or (plans and output and words[1] == "plan"))
    ]
    if runnable:
        make_traces(tmp_path)
    for words, output in runnable:
        capsys.readouterr()
        assert cli.main([name for word in words[1:] for name in sorted(glob.glob(word)) or [word]]) == 0  # as a shell
        shown = capsys.readouterr().out
        assert not output or shown.strip() == output.strip()


@pytest.mark.full
@in_each_document
def test_plans_are_found(
    document: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run every plan and strategy that needs no file. One that fits nowhere is there to show what the error says."""
    monkeypatch.chdir(tmp_path)
    for words, _ in commands(document):
        is_plan = words[0] == "terapipe" and words[1] in ("plan", "strategy")
        if is_plan and not {"--profile", "--config", "--help"} & set(words):
            code = cli.main(words[1:])
            assert code == 0 or "no plan fits in" in capsys.readouterr().err, words


def make_traces(folder: Path) -> None:
    """Write what the timelines of the documents are drawn from: a prediction and a measured step."""
    plan = ["--schedule", "seq1f1b", "--stages", "4", "--micro-batches", "2", "--slices", "512,384,128", "--unit"]
    (folder / "traces").mkdir()
    file = folder / "traces/predicted-1024-tokens-2-micro-batches.json"
    assert cli.main(["simulate", *plan, "--timeline", str(file)]) == 0
    predicted = Timeline.load(file)
    for rank in range(predicted.num_stages):
        events = tuple(event for event in predicted.events if event.stage_id == rank)
        own = dataclasses.replace(predicted, events=events, critical_path=())
        (folder / "traces" / timeline_file_name(3, rank)).write_text(own.to_json())


@in_each_document
def test_python_imports_what_exists(document: Path) -> None:
    for block in blocks(document):
        if block.language != "python":
            continue
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("terapipe_ds"):
                assert all(is_there(f"{node.module}.{alias.name}") for alias in node.names), ast.unparse(node)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "terapipe_ds":
                assert is_there(ast.unparse(node)), ast.unparse(node)


def test_the_plan_of_the_readme_is_drawn_against_stock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"^terapipe (plan .*?--picture \S+)$", text, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(command.replace("\\\n", " "))) == 0
    (picture,) = tmp_path.glob("*.svg")
    assert f"](docs/pictures/{picture.name})" in text
    shapes = [path.read_text().count("<path") for path in (picture, ROOT / "docs/pictures" / picture.name)]
    assert shapes[0] == shapes[1] > 50
    drawn = picture.read_text()
    assert "<!-- makespan 7.172 s" in drawn and "<!-- makespan 3.742 s" in drawn


def test_the_picture_of_the_readme_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (drawing,) = [block.text for block in blocks(ROOT / "docs/bench.md") if block.language == "python"]
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.chdir(tmp_path)
    exec(compile(drawing, "docs/bench.md", "exec"), {})
    (picture,) = tmp_path.glob("*.svg")
    assert f"docs/pictures/{picture.name}" in (ROOT / "README.md").read_text()
    shapes = picture.read_text().count("<path")
    assert shapes == (ROOT / "docs/pictures" / picture.name).read_text().count("<path") > 50


# --- links, paths, names


def anchors(document: Path) -> set[str]:
    """Return the anchors of the headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", _FENCED.sub("", document.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@in_each_document
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"`[^`]*`", "", _FENCED.sub("", document.read_text(encoding="utf-8")))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = document.parent / name if name else document
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@in_each_document
def test_paths_and_names_exist(document: Path) -> None:
    for span in spans(document):
        check_path(span, document.parent)
        for name in re.findall(r"\bterapipe_ds(?:\.\w+)+", span):
            assert is_there(name), span


def test_every_kept_result_is_named() -> None:
    named = "".join(path.read_text() for path in DOCUMENTS)
    assert [path.name for path in (ROOT / "docs/results").iterdir() if path.name not in named] == []


def is_there(name: str) -> bool:
    """Return whether a dotted name is a module or in the source of one; importing megatron-core takes seconds."""
    path = ROOT.joinpath(*name.split("."))
    if path.is_dir() or path.with_suffix(".py").exists():
        return True
    module, attribute = path.parent, path.name
    source = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    return source.exists() and re.search(rf"\b{attribute}\b", source.read_text(encoding="utf-8")) is not None


def test_sources_mention_documents_that_exist() -> None:
    for folder in ("terapipe_ds", "studies", "examples", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            for name in re.findall(r"\b(?:docs|patches)/[\w-]+\.md\b", path.read_text(encoding="utf-8")):
                assert (ROOT / name).exists(), f"{path}: {name}"


@in_each_document
def test_code_blocks_fit_the_page(document: Path) -> None:
    lines = [line for block in blocks(document) for line in block.text.splitlines()]
    assert [line for line in lines if len(line) > 96] == []


@in_each_document
def test_links_have_titles(document: Path) -> None:
    """A link's text says what is there; a name of a file does not."""
    texts = re.findall(r"(?<!!)\[([^\]]+)\]\((?!https?:)[^)]+\.md[^)]*\)", document.read_text(encoding="utf-8"))
    assert [text for text in texts if re.fullmatch(r"`?[\w./-]+\.md`?", text)] == []


@in_each_document
def test_headings_are_nouns(document: Path) -> None:
    headings = re.findall(r"^#+ (.*)", _FENCED.sub("", document.read_text(encoding="utf-8")), re.MULTILINE)
    questions = r"(what|where|how|which|who|whom|why|when|whether|if|is)\b"
    assert [heading for heading in headings if re.match(questions, heading, re.IGNORECASE)] == []


@in_each_document
def test_install_lines_name_the_repository(document: Path) -> None:
    """No index has the package, so that every line takes it from a clone or from the one address of the README."""
    text = document.read_text(encoding="utf-8")
    lines = re.findall(r"pip install [\"']?(?:terapipe_ds|\.(?=[\s\[\"']))[^`\n]*", text)
    own = r"pip install (\"terapipe_ds(\[[\w,]+\])? @ git\+\$REPOSITORY\"|'?\.(\[[\w,]+\])?'?)"
    assert [line for line in lines if not re.match(own, line)] == []
    assert text.count("REPOSITORY=") == (document in (ROOT / "README.md", ROOT / "docs/index.md"))


def test_the_install_line_installs(tmp_path: Path) -> None:
    """The README's line, with the address of a local repository."""
    line = next(text for text in (ROOT / "README.md").read_text().splitlines() if text.startswith("pip install"))
    words = shlex.split(line.replace("$REPOSITORY", f"file://localhost{ROOT}").replace("[hf]", ""))
    if not (ROOT / ".git").exists():
        pytest.skip("these sources are no git repository")
    alone = ["--no-deps", "--no-build-isolation", "--no-compile", "--quiet", "--target", str(tmp_path)]
    command = [sys.executable, "-m", *words, *alone]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "terapipe_ds" / "cli.py").exists()


def test_the_index_has_all_documents() -> None:
    targets = re.findall(r"\]\(([\w/-]+\.md)", (ROOT / "docs/index.md").read_text())
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages == {*targets, "index.md"}


def test_the_readme_is_short_and_says_how_to_test() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 170
    assert "\nmake test " in text


# --- the section


@in_each_document
def test_json_is_right(document: Path) -> None:
    for block in blocks(document):
        text = block.text.strip()
        if block.language != "json" and not text.startswith('"'):
            continue
        data = json.loads(text if text.startswith("{") else f"{{{text}}}")
        if "strategy" in data.get("terapipe", {}):  # a file that no document has
            assert TeraPipeConfig(**data["terapipe"]).enabled
        elif "terapipe" in data:
            assert TeraPipeConfig.from_deepspeed(data).enabled
        if "planner" in data:
            TeraPipeConfig(enabled=True, **data)


def test_the_configuration_lists_all_keys_with_their_defaults() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| `(.+?)` \|", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE)
    config = TeraPipeConfig()
    defaults = {name: getattr(config, name) for name in TeraPipeConfig.model_fields}
    for section in ("planner", "checkpoints", "links"):
        inner = defaults.pop(section)
        defaults |= {f"{section}.{name}": getattr(inner, name) for name in type(inner).model_fields}
    assert {key: json.loads(default) for key, default in rows} == defaults


def test_the_configuration_lists_all_schedules_and_conflicts() -> None:
    names = set(spans(ROOT / "docs/configuration.md"))
    assert set(SCHEDULE_NAMES) <= names
    for conflict in CONFLICTS:
        *parents, key = conflict.key.split(".")
        assert conflict.key in names or key in names or parents[-1] in names, conflict.key
    assert f"[{len(SCHEDULE_NAMES)} schedules]" in (ROOT / "README.md").read_text()


def test_the_reference_has_all_public_names() -> None:
    reference = (ROOT / "docs/reference/api.md").read_text()
    assert [name for name in terapipe_ds.__all__ if not re.search(rf"\b{name}\b", reference)] == []


def test_contributing_has_the_rings_and_wings() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = [re.findall(r"`(\w+)/?`", row) for row in re.findall(r"^\| \d \| (.*?) \|", text, re.MULTILINE)]
    told = {name: ring for ring, names in enumerate(rows) for name in names}
    assert told == {name: ring for name, ring in RINGS.items() if name}
    wings = text.partition("| wing | what it does |")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^\| `(\w+)/?` \|", wings, re.MULTILINE)) == WINGS["runtime"]
    assert f"`runtime/` has at most\n{MOST_NAMES['runtime']} names." in text
