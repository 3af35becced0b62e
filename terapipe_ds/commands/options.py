"""The options of a command: declared once, as a pydantic model, for argparse to parse and to explain.

What is refused, is refused in one line: the option, its value, what is allowed.
"""

from __future__ import annotations

import argparse
from collections import ChainMap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SkipValidation,
    ValidationError,
    ValidationInfo,
)
from pydantic.fields import FieldInfo

from terapipe_ds.commands import CommandError, check_output
from terapipe_ds.messages import show_value

Text = SkipValidation[str]
"""Text as the shell gave it: names of files need not be Unicode."""


def flag(name: str) -> str:
    """Return the option of a field as the user writes it."""
    return f"--{name.replace('_', '-')}"


def _writable(path: str, info: ValidationInfo) -> str:
    check_output(path, flag(str(info.field_name)))
    return path


def _drawable(path: str, info: ValidationInfo) -> str:
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise CommandError(f"{flag(str(info.field_name))} {path}: end the name in .png, .svg or .pdf")
    return _writable(path, info)


def _names(text: str | list[str]) -> Any:
    return [part.strip() for part in text.split(",")] if isinstance(text, str) else text


def _numbers(text: str | list[str]) -> tuple[int, ...]:
    try:
        numbers = tuple(map(int, _names(text)))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        raise ValueError("give integers >= 1")
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

    title: str
    kind: Literal["titled", "at most one", "exactly one"] = "titled"

    def add_to(self, parser: argparse.ArgumentParser) -> Any:
        """Return argparse's counterpart."""
        if self.kind == "titled":
            return parser.add_argument_group(self.title)
        return parser.add_mutually_exclusive_group(required=self.kind == "exactly one")


def option(
    help: str,
    metavar: str | None = None,
    *,
    default: Any = None,
    group: Group | None = None,
    flags: tuple[str, ...] | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    **parsing: Any,
) -> Any:
    """Declare a field of `Options`: its limits, and what argparse is told of it.

    Args:
        flags: how the user writes it, where that is not the name of the field; `()` for a positional argument.
        parsing: as `add_argument` of argparse takes it.
    """
    told: Any = {"group": group, "flags": flags, "parsing": {"help": help, "metavar": metavar, **parsing}}
    return Field(default, ge=ge, gt=gt, le=le, json_schema_extra=told)


class Options(BaseModel):
    """The options of one command; `model_fields_set` has the names of those that were given."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Add all options to a parser; it leaves those that are not given out of its result."""
        groups: dict[Group, Any] = {}
        for name, field in cls.model_fields.items():
            told: Any = field.json_schema_extra
            group, flags = told["group"], told["flags"]
            if group is not None and group not in groups:
                groups[group] = group.add_to(parser)
            parsing = {"default": argparse.SUPPRESS, **told["parsing"]}
            if field.annotation is bool:
                parsing["action"] = "store_true"
                del parsing["metavar"]
            if flags == ():
                names = [name]
            else:
                names = flags or [flag(name)]
                parsing["dest"] = name
            groups.get(group, parser).add_argument(*names, **parsing)

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> Self:
        """Return the options that argparse has parsed.

        Raises:
            CommandError: the first option that cannot be, with its value and what is allowed.
        """
        try:
            return cls(**{name: value for name, value in vars(arguments).items() if name in cls.model_fields})
        except ValidationError as error:
            raise refusal(error, cls, lambda path, value: f"{cls.name_of(path[0])} {_show(value)}") from None

    @classmethod
    def name_of(cls, name: str) -> str:
        """Return how the user writes the option of a field."""
        told: Any = cls.model_fields[name].json_schema_extra
        return name if told["flags"] == () else (told["flags"] or [flag(name)])[0]

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
                raise CommandError(f"{self.name_of(name)} goes with {self.name_of(needed)} only: leave it out")


def refusal(
    error: ValidationError, model: type[BaseModel], shown: Callable[[tuple[str, ...], Any], str]
) -> CommandError:
    """Return the first mistake that pydantic has found, in one line: `shown(path, value)`, then what is allowed."""
    mistake = error.errors(include_url=False)[0]
    cause = mistake.get("ctx", {}).get("error")
    if isinstance(cause, CommandError):  # which says it all
        return cause
    path: tuple[str, ...]
    path, field = (str(mistake["loc"][0]),), model.model_fields[str(mistake["loc"][0])]
    for part in mistake["loc"][1:]:
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            path, field = (*path, str(part)), inner.model_fields[str(part)]
    allowed = f"give {_allowed(field)}" if cause is None else str(cause)
    return CommandError(f"{shown(path, mistake['input'])}: {allowed}")


def _allowed(field: FieldInfo) -> str:
    """Return what values a field takes, in words."""
    kinds = {field.annotation, *get_args(field.annotation)}
    if get_origin(field.annotation) is Literal:
        return f"one of {', '.join(get_args(field.annotation))}"
    if not kinds & {int, float}:
        return "an object"
    limits = [
        f"{sign} {getattr(limit, name)}"
        for limit in field.metadata
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "and at most"))
        if getattr(limit, name, None) is not None
    ]
    return " ".join(["an integer" if int in kinds else "a finite number", *limits])


def _show(value: Any) -> str:
    """Return a value as the user wrote it, where that can be read."""
    text = " ".join(value) if isinstance(value, list) else str(value)
    return text if text.isprintable() and 0 < len(text) <= 80 else show_value(value)
