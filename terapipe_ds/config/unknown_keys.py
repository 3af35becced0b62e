"""Refuse misspelt keys of the `terapipe` section and values that its models do not take.

DeepSpeed ignores sections that it does not know, and all that they hold.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from terapipe_ds.config.values import SECTION, TeraPipeConfigError, shown_value
from terapipe_ds.messages import closest, nearest, show_key, show_value

Path = tuple[Any, ...]  # of a key, which need not be a word
Models = Mapping[Path, type[BaseModel]]


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
    known = {key: (*parent, key) for parent, model in models.items() for key in model.model_fields}
    close = closest(show_key(path[-1]).strip().lower(), known)
    hint = f"known keys: {', '.join(models[path[:-1]].model_fields)}"
    if close is not None:
        hint = f"did you mean {'.'.join([SECTION, *known[close]])}?"
    return f"{shown_value(value, *map(show_key, path))}: unknown key; {hint}"
