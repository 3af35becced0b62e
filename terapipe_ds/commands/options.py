"""Declare the options of a command once, as a pydantic model that argparse parses and explains.

An error takes one line: the option, its value, and the allowed values. This module also holds the options that
describe a schedule, for all commands that take one.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import ChainMap
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar, Self, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SkipValidation, ValidationError

from terapipe_ds.files.atomic import check_writable, write_text
from terapipe_ds.files.user_json import CommandError
from terapipe_ds.messages import show_value
from terapipe_ds.schedule import SCHEDULE_NAMES, Schedule, build, load

Text = SkipValidation[str]
"""Text as the shell gave it: names of files need not be Unicode."""


def flag(name: str) -> str:
    """Return the option of a field as the user writes it; `as_json` would hide a method of pydantic without `as_`."""
    return f"--{name.removeprefix('as_').replace('_', '-')}"


STDOUT = "-"


class _Written(str):
    """Mark the name of a file that the command writes."""


def _file(*suffixes: str, why: str = "", or_stdout: bool = False) -> AfterValidator:
    """Return the check of a file that a command writes: its suffix, and whether it can be written (else OSError)."""

    def check(path: str, info: Any) -> str:
        option, file = flag(info.field_name), Path(path)
        if path == STDOUT:
            if or_stdout:
                return path
            raise CommandError(f"{option} {path}: this option writes a file; give the name of a file")
        if not file.name:
            raise CommandError(f"{option} {path!r} has no file name: give the name of a file")
        if suffixes and file.suffix.lower() not in suffixes:
            allowed = " or ".join(filter(None, (", ".join(suffixes[:-1]), suffixes[-1])))
            raise CommandError(f"{option} {path}: end the name in {allowed}{why}")
        if file.is_dir():
            raise CommandError(f"{option} {path} is a folder: give the name of a file")
        if not file.absolute().parent.is_dir():
            raise CommandError(f"{option} {path}: there is no such folder; give a path in one that exists")
        check_writable(path)
        for name, other in info.data.items():
            if isinstance(other, _Written) and os.path.realpath(other) == os.path.realpath(path):
                raise CommandError(f"{option} {path}: {flag(name)} writes this file too; give another name")
        return _Written(path)

    return AfterValidator(check)


def _names(text: str | list[str]) -> Any:
    return [part.strip() for part in (text if isinstance(text, str) else ",".join(map(str, text))).split(",")]


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
Output = Annotated[Text, _file()]
"""A file that can be written, found out before anything is computed for it."""
OrderFile = Annotated[Text, _file(".csv", why=", as the key terapipe.schedule wants it")]
"""An `Output` for a schedule as CSV."""
Picture = Annotated[Text, _file(".png", ".svg", ".pdf")]
"""An `Output` that matplotlib can draw to."""
JsonOutput = Annotated[Text, _file(".json", or_stdout=True)]
"""The value of `--json`: an `Output` for JSON, or `STDOUT`."""
Printed = Annotated[Text, _file(or_stdout=True)]
"""An `Output`, or `STDOUT`."""


def option(
    help: str, metavar: str | None = None, default: Any = None, *, group: str = "", flags: Any = (), **more: Any
) -> Any:
    """Declare a field of `Options`.

    Args:
        group: the title under which the help lists it, or a key of `Options.exclusive`.
        flags: the user's spelling where it differs from the field's name, without dashes for a positional argument.
        more: limits (`ge`, `gt`, `le`); keywords of argparse's `add_argument`.
    """
    limits = {name: more.pop(name) for name in ("ge", "gt", "le") if name in more}
    required = more.pop("required", False)  # `read` looks, which names all that are missing at once
    more |= {"help": help} | ({"metavar": metavar} if metavar else {})
    declared = {"group": group, "flags": flags, "parsing": more, "required": required}
    return Field(default, json_schema_extra=declared, **limits)


def switch(help: str, *flags: str, group: str = "") -> Any:
    """Declare a field that is False unless the option is present."""
    return option(help, default=False, action="store_true", flags=flags, group=group)


def json_option(what: str = "the result", *, group: str = "") -> Any:
    """Declare `--json [FILE]`, whose value is of type `JsonOutput | None`; all commands give it this one meaning."""
    help = f"print {what} as JSON instead of text; with FILE, write the JSON there and print the text"
    return option(help, "FILE", group=group, nargs="?", const=STDOUT)


def write_json(text_of: Callable[[], str], target: str | None) -> bool:
    """Write JSON to the target of `--json`, and return whether it replaces the text on stdout.

    `text_of` makes the JSON; nobody calls it without `--json`.
    """
    if target is None:
        return False
    if target == STDOUT:
        print(text_of())
        return True
    write_text(target, text_of() + "\n")
    return False


class Options(BaseModel):
    """Hold the options of one command; `model_fields_set` has the names of those that the user set."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    exclusive: ClassVar[Mapping[str, bool]] = {}
    """Groups that admit one of their options, and whether the user must give one."""
    helps: ClassVar[Mapping[str, str]] = {}
    """Other texts for the help of inherited fields."""
    _words: Sequence[str] = ()  # of the command line

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Add all options to a parser; its result omits those that the user does not set."""
        parser.set_defaults(options=cls)
        groups: dict[str, Any] = {"": parser}
        for name, field in cls.model_fields.items():
            declared: Any = field.json_schema_extra
            title = declared["group"]
            if title in cls.exclusive and title not in groups:
                groups[title] = parser.add_mutually_exclusive_group()
            elif title not in groups:
                groups[title] = parser.add_argument_group(title)
            flags = declared["flags"] or (flag(name),)
            dest = {"dest": name} if flags[0].startswith("-") else {}
            parsing = declared["parsing"] | {"help": cls.help_of(name)}
            groups[title].add_argument(*flags, default=argparse.SUPPRESS, **dest, **parsing)

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> Self:
        """Return the options that argparse has parsed; refuse all that are missing or invalid together."""
        given = {name: value for name, value in vars(arguments).items() if name in cls.model_fields}
        # argparse before Python 3.13 makes an empty list of the value of `--option=--`
        if empty := [name for name, value in given.items() if value in ([], "--")]:
            raise CommandError(f"{', '.join(map(cls.name_of, empty))}: expected one argument, not --; give a value")
        problems = cls._missing(given)
        try:
            options = cls(**given)
        except ValidationError as error:
            problems += map(cls._mistake, error.errors(include_url=False))
        if problems:
            raise CommandError("; ".join(problems))
        options._words = vars(arguments).get("words", ())
        return options

    @classmethod
    def _missing(cls, given: Container[str]) -> list[str]:
        """Return a message for each required option, and for each group that requires one of its options."""
        needed: dict[str, list[str]] = {}
        for name, field in cls.model_fields.items():
            declared: Any = field.json_schema_extra
            if cls.exclusive.get(declared["group"]):
                needed.setdefault(declared["group"], []).append(name)
            elif declared["required"]:
                needed[name] = [name]
        return [
            f"one of the arguments {' '.join(map(cls.name_of, names))} is required: give one"
            if len(names) > 1
            else f"{cls.name_of(names[0])} is missing: give {cls.help_of(names[0])}"
            for names in needed.values()
            if not any(name in given for name in names)
        ]

    @classmethod
    def _mistake(cls, mistake: Mapping[str, Any]) -> str:
        """Return one mistake that pydantic found, in the words of the command line."""
        context = mistake.get("ctx", {})
        if isinstance(context.get("error"), CommandError):  # its message is complete
            return str(context["error"])
        allowed = _ALLOWED.get(mistake["type"], "another value").format(**context)
        given = f"{cls.name_of(str(mistake['loc'][0]))} {_show(mistake['input'])}"
        return f"{given}: give {context.get('error', allowed)}"

    @classmethod
    def name_of(cls, name: str) -> str:
        """Return how the user writes the option of a field."""
        declared: Any = cls.model_fields[name].json_schema_extra
        spelling = str((declared["flags"] or (flag(name),))[0])
        return spelling if spelling.startswith("-") else spelling.upper()

    @classmethod
    def help_of(cls, name: str) -> str:
        """Return what the help says about the option of a field."""
        declared: Any = cls.model_fields[name].json_schema_extra
        return cls.helps.get(name, str(declared["parsing"]["help"]))

    @classmethod
    def in_options(cls, text: str) -> str:
        """Return a refusal of the library with options of the command in the place of the library's arguments."""

        def option_of(found: re.Match[str]) -> str:
            name = _ARGUMENTS.get(found[1], found[1])
            return f"{cls.name_of(name)}{' ' * bool(found[2])}" if name in cls.model_fields else found[0]

        return re.sub(r"(?:planner\.)?\b([a-z]+(?:_[a-z]+)+|[a-z]+(?= = ))( = )?", option_of, text)

    @property
    def words(self) -> Sequence[str]:
        return self._words

    @property
    def given(self) -> dict[str, Any]:
        """Return the options that the user set, in field order."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    def filled(self, *sources: Mapping[str, Any]) -> Self:
        """Return the options; one that the user did not set has its value from the first source that has one."""
        known = ChainMap(*map(dict, sources))
        missing = type(self).model_fields.keys() - self.model_fields_set
        return self.model_copy(update={name: known[name] for name in missing & known.keys()})

    def refuse_without(self, needed: str, *names: str) -> None:
        """Refuse options that mean nothing without another one, rather than ignore them."""
        for name in names:
            if name in self.model_fields_set and needed not in self.model_fields_set:
                with_it = self.name_of(needed)
                option = self.name_of(name)
                raise CommandError(f"{option} goes with {with_it} only: give {with_it}, or leave {option} out")


def options_of(command: ModuleType) -> type[Options]:
    """Return the options that a module of `commands` takes: the annotation of its function `run`."""
    options: type[Options] = get_type_hints(command.run)["options"]
    return options


_ARGUMENTS = {
    "global_batch_size": "global_batch",
    "granularity_tokens": "granularity",
    "num_micro_batches": "micro_batches",
    "num_slices": "slices",
    "num_stages": "stages",
}
"""The fields of options for arguments of the library with another name."""

_ALLOWED = {
    "bool_parsing": "yes or no",
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
    """Return a value as the user wrote it, where it can be printed so."""
    text = " ".join(value) if isinstance(value, list) else str(value)
    return text if text.isprintable() and 0 < len(text) <= 80 else show_value(value)


MAX_FORWARDS, MAX_STAGES, MAX_DEVICES = 1_000_000, 10_000, 65_536
_DETAILS = "policy=A or policy=B for dapple, max_live_slices=N, none or default for seq1f1b-interleaved-zb and zbv"


def _read_options(texts: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in ("policy", "max_live_slices") or not value:
            raise CommandError(f"--option {text!r}: give {_DETAILS}")
        if name in options:
            raise CommandError(f"--option {name} is given twice: give it once")
        is_number = value.isdecimal() and len(value) < 10
        options[name] = int(value) if is_number else None if value == "none" else value
    return options


ScheduleDetails = Annotated[dict[str, Any], BeforeValidator(_read_options)]


def details_option(group: str = "") -> Any:
    """Declare `--option`, whose value is of type `ScheduleDetails`."""
    flags = ("--option",)
    return option(f"of the schedule: {_DETAILS}", "NAME=VALUE", {}, group=group, flags=flags, action="append")


class ScheduleOptions(Options):
    """Describe a schedule by its name and counts, or name a file that holds all of it."""

    exclusive: ClassVar[Mapping[str, bool]] = {"source": True}

    schedule: Text | None = option(f"one of {', '.join(SCHEDULE_NAMES)}", "NAME", group="source")
    from_csv: Text | None = option("read a schedule: a row per stage, cells such as F0.3", "FILE", group="source")
    stages: int | None = option("pipeline stages", "K", ge=1, le=MAX_STAGES)
    micro_batches: int = option("micro-batches per step (default 1)", "M", default=1, ge=1, le=MAX_FORWARDS)
    chunks_per_stage: int = option("parts that each stage holds (default 1; zbv, chimera: 2)", "V", default=1, ge=1)
    schedule_options: ScheduleDetails = details_option()
    forward_only: bool = switch("the schedule of an evaluation")

    def load(self, path: str, *more: str) -> Schedule:
        """Return the schedule in a file; refuse options, `more` included, that describe a schedule too."""
        describing = {*ScheduleOptions.model_fields, *more} - {"from_csv"}
        for name in self.given:
            if name in describing:
                text = "does not go with --from-csv: the file says it all, leave it out"
                raise CommandError(f"{self.name_of(name)} {text}")
        return load(path)

    def build(self, num_slices: int | Sequence[int]) -> Schedule:
        """Return the schedule of the options; `num_slices` is one number, or one for each micro-batch."""
        num_units = num_slices * self.micro_batches if isinstance(num_slices, int) else sum(num_slices)
        counts = self.checked_stages(num_units), self.micro_batches, num_slices
        more = {"chunks_per_stage": self.chunks_per_stage, **self.schedule_options}
        return build(str(self.schedule), *counts, forward_only=self.forward_only, **more)

    def checked_stages(self, num_units: int) -> int:
        """Return the stages; refuse a batch of more forwards than a command can handle, in `num_units` slices."""
        if self.stages is None:
            raise CommandError("--stages is missing: give the number of pipeline stages")
        num_forwards = self.stages * num_units * self.chunks_per_stage
        if num_forwards > MAX_FORWARDS:
            raise CommandError(f"{num_forwards} forwards are too many: ask for at most {MAX_FORWARDS}")
        return self.stages


_LINE_EVERY_S = 10.0


class Progress:
    """Show a bar on stderr while a search runs, redrawn when it moves; where stderr is no terminal, a line per 10 s."""

    def __init__(self, hint: str = "") -> None:
        self._hint, self._shown = hint, ""
        self._is_terminal, self._line_at = sys.stderr.isatty(), time.monotonic() + _LINE_EVERY_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown and self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def callback(self, what: str, done: float, of: float) -> None:
        """Show the name of a search's step, the amount done, and the total; the search calls it."""
        share = min(done / of, 1.0) if of else 1.0
        if not self._is_terminal:
            if time.monotonic() >= self._line_at:
                self._line_at = time.monotonic() + _LINE_EVERY_S
                print(f"terapipe: {what}, {share:.0%} of this phase{self._hint}", file=sys.stderr, flush=True)
            return
        text = f"{'#' * round(20 * share):20} {share:4.0%} {what}{self._hint}"
        if text != self._shown:
            # without wrapping: a second row of a narrow terminal would stay
            print(f"\r\x1b[K\x1b[?7l{text}\x1b[?7h", end="", file=sys.stderr, flush=True)
            self._shown = text
