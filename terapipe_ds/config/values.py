"""Define the values that keys of the `terapipe` section may hold."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from terapipe_ds.costs.wire_formats import BackwardFormat, ForwardFormat
from terapipe_ds.files.strict_json import STRICT
from terapipe_ds.messages import show_value
from terapipe_ds.schedule import SCHEDULE_NAMES

SECTION = "terapipe"
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


Int64 = Annotated[int, Field(ge=-_MAX_INT, le=_MAX_INT)]
Positive = Annotated[int, Field(ge=1, le=_MAX_INT)]
Index = Annotated[int, Field(ge=0, le=_MAX_INT)]
NonEmpty = Annotated[str, Field(min_length=1)]
_NO_FOLDERS = {"off", "none", "null", "false", "no"}  # other keys have "off"; a folder of that name is "./off"
_HOME = AfterValidator(os.path.expanduser)  # no shell reads a JSON and replaces `~`
Folder = Annotated[NonEmpty, _only(lambda name: name.lower() not in _NO_FOLDERS), _HOME]
Timeout = Annotated[float, Field(gt=0, le=_MAX_TIMEOUT_S)]
TIMEOUT_FORM = f"a number of seconds > 0, at most {_MAX_TIMEOUT_S:.0f}"
ScheduleName = Annotated[str, Field(pattern=rf"^({'|'.join(SCHEDULE_NAMES)}|search|auto|.+\.csv)$"), _HOME]
StrategyFile = Annotated[str, Field(pattern=r"^.+\.json$"), _HOME]
_Profile = Annotated[str, Field(pattern=r"^(measure|.+\.json)$"), _HOME]
Lengths = Annotated[tuple[Positive, ...], Field(min_length=1)]
LengthsOfEach = Annotated[tuple[Lengths, ...], Field(min_length=1), _only(lambda lists: len(set(map(sum, lists))) == 1)]
Indices = Annotated[tuple[Index, ...], Field(min_length=1), _only(lambda value: len(set(value)) == len(value))]
Bounds = Annotated[
    tuple[Index, ...], Field(min_length=2), _only(lambda value: [0, *sorted({*value} - {0})] == [*value])
]
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
