"""The options of a command: declared once, as a pydantic model, for argparse to parse and to explain.

What is refused, is refused in one line: the option, its value, what is allowed.
"""

from __future__ import annotations

import argparse
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SkipValidation, ValidationError

from terapipe_ds.commands import CommandError, check_output
from terapipe_ds.messages import show_value

Text = SkipValidation[str]
"""Text as the shell gave it: names of files need not be Unicode."""


def flag(name: str) -> str:
    """Return the option of a field as the user writes it."""
    return f"--{name.replace('_', '-')}"


def _writable(path: str, info: Any) -> str:
    check_output(path, flag(info.field_name))
    return path


def _drawable(path: str, info: Any) -> str:
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise CommandError(f"{flag(info.field_name)} {path}: end the name in .png, .svg or .pdf")
    return _writable(path, info)


def _names(text: str | list[str]) -> Any:
    return [part.strip() for part in text.split(",")] if isinstance(text, str) else text


def _numbers(text: str | list[str]) -> tuple[int, ...]:
    try:
        numbers = tuple(map(int, _names(text)))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        raise ValueError("integers >= 1")
    return numbers


Names = Annotated[tuple[Text, ...], BeforeValidator(_names)]
"""Names with commas between them."""
Numbers = Annotated[tuple[int, ...], BeforeValidator(_numbers)]
"""Integers >= 1, with commas between them or a word each."""
Output = Annotated[Text, AfterValidator(_writable)]
"""A file that can be written, found out before anything is computed for it."""
Picture = Annotated[Text, AfterValidator(_drawable)]
"""An `Output` that matplotlib can draw to."""


class Group(NamedTuple):
    """Options that the help lists under a title, or of which at most one, or exactly one, is given."""

    title: str = ""
    kind: Literal["titled", "at most one", "exactly one"] = "titled"

    def add_to(self, parser: argparse.ArgumentParser) -> Any:
        """Return argparse's counterpart: the parser itself for what has no title."""
        if self.kind != "titled":
            return parser.add_mutually_exclusive_group(required=self.kind == "exactly one")
        return parser.add_argument_group(self.title) if self.title else parser

    def option(self, help: str, metavar: str | None = None, default: Any = None, **more: Any) -> Any:
        """Declare a field of `Options`.

        Args:
            more: limits (`ge`, `gt`, `le`); `flags`, what the user writes where that is not the name of the field, with
                dashes for an option, without for a positional argument; what `add_argument` of argparse takes.
        """
        limits = {name: more.pop(name) for name in ("ge", "gt", "le") if name in more}
        told: Any = {"group": self, "flags": more.pop("flags", None)}
        told["parsing"] = {"help": help, **({"metavar": metavar} if metavar else {}), **more}
        return Field(default, json_schema_extra=told, **limits)

    def switch(self, help: str, *flags: str) -> Any:
        """Declare a field that is False unless the option is given."""
        return self.option(help, default=False, action="store_true", flags=flags)


option, switch = Group().option, Group().switch


class Options(BaseModel):
    """The options of one command; `model_fields_set` has the names of those that were given."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Add all options to a parser; it leaves those that are not given out of its result."""
        groups: dict[Group, Any] = {}
        for name, field in cls.model_fields.items():
            told: Any = field.json_schema_extra
            group: Group = told["group"]
            if group not in groups:
                groups[group] = group.add_to(parser)
            flags = told["flags"] or (flag(name),)
            dest = {"dest": name} if flags[0].startswith("-") else {}
            groups[group].add_argument(*flags, default=argparse.SUPPRESS, **dest, **told["parsing"])

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> Self:
        """Return the options that argparse has parsed.

        Raises:
            CommandError: the first option that cannot be, with its value and what is allowed.
        """
        try:
            return cls(**{name: value for name, value in vars(arguments).items() if name in cls.model_fields})
        except ValidationError as error:
            mistake = error.errors(include_url=False)[0]
            context = mistake.get("ctx", {})
            if isinstance(context.get("error"), CommandError):  # which says it all
                raise context["error"] from None
            allowed = _ALLOWED.get(mistake["type"], "another value").format(**context)
            given = f"{cls.name_of(str(mistake['loc'][0]))} {_show(mistake['input'])}"
            raise CommandError(f"{given}: give {context.get('error', allowed)}") from None

    @classmethod
    def name_of(cls, name: str) -> str:
        """Return how the user writes the option of a field."""
        told: Any = cls.model_fields[name].json_schema_extra
        return str((told["flags"] or (flag(name),))[0])

    @property
    def given(self) -> dict[str, Any]:
        """The options that were given, in the order of the fields."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    def filled(self, *sources: Mapping[str, Any]) -> Self:
        """Return the options where one that was not given has the value of the first source that knows it."""
        known = ChainMap(*map(dict, sources))
        missing = type(self).model_fields.keys() - self.model_fields_set
        return self.model_copy(update={name: known[name] for name in missing & known.keys()})

    def refuse_without(self, needed: str, *names: str) -> None:
        """Refuse options that mean nothing without another one, rather than ignore them."""
        for name in names:
            if name in self.model_fields_set and needed not in self.model_fields_set:
                with_it = self.name_of(needed)
                raise CommandError(f"{self.name_of(name)} goes with {with_it} only: give {with_it}, or leave it out")


_ALLOWED = {
    "int_parsing": "an integer",
    "int_parsing_size": "a smaller integer",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "greater_than_equal": "a number >= {ge}",
    "greater_than": "a number > {gt}",
    "less_than_equal": "a number <= {le}",
    "literal_error": "{expected}",
}
"""The words for what pydantic expects."""


def _show(value: Any) -> str:
    """Return a value as the user wrote it, where that can be read."""
    text = " ".join(value) if isinstance(value, list) else str(value)
    return text if text.isprintable() and 0 < len(text) <= 80 else show_value(value)
