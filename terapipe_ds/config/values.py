"""Define the values that keys of the `terapipe` section may hold, and the errors for other values and other keys."""

from __future__ import annotations

import functools
import itertools
import operator
import os
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from terapipe_ds.costs.wire_formats import BackwardFormat, ForwardFormat
from terapipe_ds.files.strict_json import STRICT
from terapipe_ds.messages import closest, nearest, show_key, show_value
from terapipe_ds.schedule import SCHEDULE_NAMES

SECTION = "terapipe"
Path = tuple[Any, ...]  # of a key, which need not be a word
Models = Mapping[Path, type[BaseModel]]
_MAX_INT = 2**63 - 1  # torch's int64
_MAX_TIMEOUT_S = 30 * 24 * 3600.0  # longer waits overflow the timeouts of some platforms


class TeraPipeConfigError(ValueError):
    """Refuse a config; `problems` has one line per mistake with its key, value and fix."""

    def __init__(self, *problems: str) -> None:
        heading = [f"{len(problems)} problems with the DeepSpeed config:"] if len(problems) > 1 else []
        super().__init__("\n  - ".join([*heading, *problems]))
        self.problems = problems


def lists_to_tuples(value: Any) -> Any:
    """Return a list, and the lists in it, as tuples, and anything else unchanged."""
    return tuple(map(lists_to_tuples, value)) if isinstance(value, list) else value


def tuples_to_lists(value: Any) -> Any:
    """Return a tuple, and the tuples in it, as lists, as a person writes them."""
    return list(map(tuples_to_lists, value)) if isinstance(value, tuple) else value


def _only(fits: Callable[[Any], bool]) -> AfterValidator:
    """Return the check of a value for which `fits` is true."""

    def check(value: Any) -> Any:
        if not fits(value):
            raise ValueError
        return value

    return AfterValidator(check)


def _is_rising_from_0(value: tuple[int, ...]) -> bool:
    return value[0] == 0 and all(start < stop for start, stop in itertools.pairwise(value))


Int64 = Annotated[int, Field(ge=-_MAX_INT, le=_MAX_INT)]
Positive = Annotated[int, Field(ge=1, le=_MAX_INT)]
Index = Annotated[int, Field(ge=0, le=_MAX_INT)]
NonEmpty = Annotated[str, Field(min_length=1)]
Folder = Annotated[NonEmpty, AfterValidator(os.path.expanduser)]  # no shell reads a JSON and replaces `~`
Timeout = Annotated[float, Field(gt=0, le=_MAX_TIMEOUT_S)]
TIMEOUT_FORM = f"a number of seconds > 0, at most {_MAX_TIMEOUT_S:.0f}"
ScheduleName = Annotated[str, Field(pattern=rf"^({'|'.join(SCHEDULE_NAMES)}|search|auto|.+\.csv)$")]
_Profile = Annotated[str, Field(pattern=r"^(measure|.+\.json)$")]
Lengths = Annotated[tuple[Positive, ...], Field(min_length=1)]
LengthsOfEach = Annotated[tuple[Lengths, ...], Field(min_length=1), _only(lambda lists: len(set(map(sum, lists))) == 1)]
Indices = Annotated[tuple[Index, ...], Field(min_length=1), _only(lambda value: len(set(value)) == len(value))]
Bounds = Annotated[tuple[Index, ...], Field(min_length=2), _only(_is_rising_from_0)]
Recompute = Literal["off", "full", "auto"] | Indices | None


class StrictModel(BaseModel):
    """Hold an object of the section; a field's `description` lists its allowed values and ends the error messages."""

    model_config = STRICT | ConfigDict(frozen=True)


class PlannerConfig(StrictModel):
    """Hold `terapipe.planner`: how the planner chooses slices when `slices` is "auto"."""

    profile: _Profile = Field(default="measure", description='"measure", or a path that ends in .json')
    cache_dir: Folder | None = Field(default=None, description="the path of a directory, or null")
    memory_limit_gb: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="a finite number > 0, or null"
    )


class CheckpointsConfig(StrictModel):
    """Hold `terapipe.checkpoints`: whether checkpoint files may hold pickles."""

    allow_pickle: bool = Field(default=False, description="true or false: whether loaded files may run code")


class LinksConfig(StrictModel):
    """Hold `terapipe.links`: the formats of activations and gradients between stages; null is exact."""

    forward: ForwardFormat | None = Field(default=None, description='null (exact), "bf16", "fp8" or "int8"')
    backward: BackwardFormat | None = Field(
        default=None, description='null (exact) or "bf16": with less, gradients are too coarse to train with'
    )
    exact_until_part: Index = Field(
        default=0, description="an integer >= 0: links that begin at an earlier part stay exact"
    )

    @property
    def is_exact(self) -> bool:
        """Return whether all messages travel in the dtype of the layers."""
        return self.forward is None and self.backward is None


def shown_value(value: Any, *path: Any) -> str:
    """Return `terapipe.KEY = VALUE`, the beginning of a message; only names of files are never cut short."""
    limit = 4096 if path[-1:] in (("strategy",), ("profile",)) else 80
    return f"{'.'.join([SECTION, *map(str, path)])} = {show_value(value, limit)}"


def refuse_misspelt_section(ds_config: Mapping[str, Any]) -> None:
    """Refuse a section that DeepSpeed would silently ignore: the run would go on without slices."""
    for key, value in ds_config.items():
        is_other = isinstance(key, str) and key != SECTION and isinstance(value, dict)
        if is_other and closest(key.strip().lower(), [SECTION], cutoff=0.8):
            shown = f"{show_key(key)} = {show_value(value)}"
            raise TeraPipeConfigError(f"{shown}: unknown section; did you mean {SECTION}?")


@functools.cache
def models_of(root: type[BaseModel]) -> Models:
    """Return the models of the section and of its objects, by the path of their key."""
    objects = {(name,): field.annotation for name, field in root.model_fields.items()}
    inner = {path: type_ for path, type_ in objects.items() if isinstance(type_, type) and issubclass(type_, BaseModel)}
    return {(): root} | inner


def take_known(section: dict[Any, Any], models: Models, problems: dict[Path, str], path: Path = ()) -> dict[str, Any]:
    """Return `section` without its unknown keys, and add these to `problems`. A key need not be a string."""
    known: dict[str, Any] = {}
    for key, value in section.items():
        if key not in models[path].model_fields:
            problems[*path, key] = unknown_key((*path, key), value, models)
        else:
            is_model = (*path, key) in models and isinstance(value, dict)
            known[key] = take_known(value, models, problems, (*path, key)) if is_model else value
    return known


def problems_of(error: ValidationError, section: Any, models: Models) -> dict[Path, str]:
    """Return pydantic's errors, one per key: a union fails once per member, a list once per entry."""
    problems = {}
    for detail in error.errors(include_input=False, include_context=False, include_url=False):
        location = detail["loc"]
        path = location[:2] if location[:1] in models and len(location) > 1 else location[:1]
        value = functools.reduce(operator.getitem, path, section)
        allowed = str(models[path[:-1]].model_fields[str(path[-1])].description)
        hint = nearest(value, _names_in(allowed)) if isinstance(value, str) else ""
        problems[path] = f"{shown_value(value, *path)}: must be {allowed}{hint}"
    return problems


def _names_in(allowed: str) -> list[str]:
    """Return the names among the allowed values; other words describe."""
    listed = allowed.removeprefix("one of ")
    return re.findall(r'"([\w-]+)"', allowed) if listed == allowed else re.split(", (?:or )?", listed)


def unknown_key(path: Path, value: Any, models: Models) -> str:
    """Return the problem of an unknown key, with the nearest known one."""
    known = {key: (*parent, key) for parent, model in models.items() for key in model.model_fields}
    close = closest(show_key(path[-1]).strip().lower(), known)
    hint = f"known keys: {', '.join(models[path[:-1]].model_fields)}"
    if close is not None:
        hint = f"did you mean {'.'.join([SECTION, *known[close]])}?"
    return f"{shown_value(value, *map(show_key, path))}: unknown key; {hint}"
