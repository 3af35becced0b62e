"""Write the pages of the site that are made of the source, and turn links that leave `docs/` to pages of the site.

`mkdocs.yml` names this file as a hook. The functions that make pages need no mkdocs, so that tests can look at them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]

# What lies outside of docs/: its page on the site.
PROJECT = {
    "README.md": "project/README.md",
    "CHANGELOG.md": "project/CHANGELOG.md",
    "CONTRIBUTING.md": "project/CONTRIBUTING.md",
    "SECURITY.md": "project/SECURITY.md",
    "patches/README.md": "project/patches.md",
}


# --- the section


def type_text(annotation: Any) -> str:
    """Return how a person writes the type of a key in JSON."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_text(one) for one in arguments))
    if origin is Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in arguments)
    if origin in (tuple, list):
        return f"list of {type_text(arguments[0])}"
    if origin is dict:
        return f"object of {type_text(arguments[1])}"
    names = {bool: "true or false", int: "integer", float: "number", str: "text", type(None): "null"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, default and what is allowed of each key, those of inner sections after their own name."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from keys_of(inner, f"{prefix}{name}.")
            continue
        default = json.dumps(field.get_default(call_default_factory=True))
        yield f"{prefix}{name}", type_text(inner), default, field.description or ""


def meanings() -> dict[str, str]:
    """Return what the table of `docs/configuration.md` says of each key, with links that hold in `docs/reference/`."""
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w.]+)` \| `.+?` \| (.*) \|$", text, re.MULTILINE))
    own = {key: text.replace("](#", "](configuration.md#") for key, text in rows.items()}
    return {key: re.sub(r"\]\((?!https?:)([\w-]+\.md)", r"](../\1", text) for key, text in own.items()}


def section_page() -> str:
    """Return the page of all keys, made of the model that reads them."""
    from terapipe_ds.config import TeraPipeConfig

    said = meanings()
    lines = [
        "# The section, key by key",
        "",
        "Made of the model that reads the section (`terapipe_ds/config/section.py`) when this site is built. "
        "[The section in prose](../configuration.md) has examples and lists conflicting settings.",
    ]
    for name, kind, default, allowed in keys_of(TeraPipeConfig):
        lines += ["", f"## `{name}`", "", said[name][0].upper() + said[name][1:] + "."]
        lines += ["", f"- **type**: {kind}", f"- **default**: `{default}`"]
        lines += [f"- **allowed**: {allowed}"] if allowed != kind else []
    return "\n".join(lines) + "\n"


# --- the command line


def cli_page() -> str:
    """Return the page of all commands and their options, made of the parsers."""
    from terapipe_ds.cli import COMMANDS
    from terapipe_ds.commands.options import options_of

    lines = ["# Command line", "", "Made of the parsers when this site is built: what `--help` says, as a page."]
    for name in COMMANDS:
        module = importlib.import_module(f"terapipe_ds.commands.{name}")
        parser = argparse.ArgumentParser(prog=f"terapipe {name}", add_help=False)
        options_of(module).add_to(parser)
        lines += ["", f"## terapipe {name}", "", prose(module.DESCRIPTION)]
        for group in parser._action_groups:
            actions = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
            if actions:
                lines += ["", f"**{group.title}**" + (f": {prose(group.description)}" if group.description else ""), ""]
                lines += ["| option | meaning |", "|---|---|", *(row_of(action) for action in actions)]
        lines += ["", "```", *module.EXAMPLES.rstrip().splitlines(), "```"]
    return "\n".join(lines) + "\n"


def row_of(action: argparse.Action) -> str:
    """Return the row of an option in the table of its group."""
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    if action.choices is not None and not action.metavar:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    shown = ", ".join(action.option_strings) or str(value)
    if action.option_strings and action.nargs != 0:
        shown += f" {' '.join(value) if isinstance(value, tuple) else value}"
    text = (action.help or "") % {**vars(action), "prog": "terapipe"}
    return f"| `{shown}` | {prose(text)} |".replace("\n", " ")


def prose(text: str) -> str:
    """Return a help text as Markdown: its options as code, and nothing that would end a cell of a table."""
    pieces = text.replace("|", "\\|").split("`")  # every other piece is code already
    pieces[::2] = [re.sub(r"(?<![\w-])(--[a-z][\w-]*)", r"`\1`", piece.replace("<", "&lt;")) for piece in pieces[::2]]
    return "`".join(pieces)


# --- what lies outside of docs/


def project_page(source: str) -> str:
    """Return a file of the repository as a page: its links lead to the pages of the site."""
    folder = Path(source).parent

    def moved(match: re.Match[str]) -> str:
        target, anchor = match.group(1), match.group(2) or ""
        path = (folder / target).as_posix()
        if path in PROJECT:
            return f"]({Path(PROJECT[path]).name}{anchor})"
        return f"](../{path.removeprefix('../').removeprefix('docs/')}{anchor})"

    text = (ROOT / source).read_text(encoding="utf-8")
    return re.sub(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)", moved, text)


def with_project_links(text: str, page: str) -> str:
    """Return a page of docs/ with its links to files outside of docs/ turned to their pages."""
    up = "../" * page.count("/")

    def moved(match: re.Match[str]) -> str:
        return f"]({up}{PROJECT[match.group(1)]}" if match.group(1) in PROJECT else match.group(0)

    return re.sub(rf"\]\({re.escape(up)}\.\./([\w/]+\.md)", moved, text)


# --- what mkdocs calls


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let the pages' sources be imported."""
    sys.path.insert(0, str(ROOT))  # here, because mkdocs takes back what a hook changes while it is read
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of the source."""
    from mkdocs.structure.files import File

    made = {"reference/section.md": section_page(), "reference/cli.md": cli_page()}
    made |= {page: project_page(source) for source, page in PROJECT.items()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links that leave docs/, and let the search show other pages before the changelog, which has every word."""
    if page.file.src_uri == PROJECT["CHANGELOG.md"]:
        page.meta["search"] = {"boost": 0.1}
    return with_project_links(markdown, page.file.src_uri)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark options, keep units of tables beside their numbers, and let a click on a picture open it."""
    html = html.replace("<code>--", '<code class="option">--')  # a browser would break it after a hyphen
    html = re.sub(r"<td.*?</td>", lambda cell: re.sub(r"(?<=\d) (?=%|m?s\b|[GMT]i?B\b)", "&nbsp;", cell.group()), html)
    return re.sub(r'<img [^>]*src="([^"]+)"[^>]*>', r'<a class="picture" href="\1">\g<0></a>', html)
