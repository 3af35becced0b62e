"""Describe the mistakes in single keys of a `terapipe` section: misspelt or unknown keys, and wrong values."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from terapipe_ds.config.values import SECTION, TeraPipeConfigError, shown_value
from terapipe_ds.messages import nearest, nearest_of, show_key, show_value

Path = tuple[Any, ...]  # of a key, which need not be a word
Models = Mapping[Path, type[BaseModel]]


def refuse_misspelt_section(ds_config: Mapping[str, Any]) -> None:
    """Refuse a section that DeepSpeed would silently ignore: the run would go on without slices."""
    for key, value in ds_config.items():
        is_other = isinstance(key, str) and key != SECTION and isinstance(value, dict)
        if is_other and nearest_of(key.strip().lower(), [SECTION], cutoff=0.8):
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
        allowed = models[path[:-1]].model_fields[str(path[-1])].description
        names = re.findall(r'"([a-z_-]+)"', str(allowed)) or re.findall(r"[\w-]+", str(allowed).removeprefix("one of"))
        hint = nearest(value, names) if isinstance(value, str) else ""
        problems[path] = f"{shown_value(value, *path)}: must be {allowed}{hint}"
    return problems


def unknown_key(path: Path, value: Any, models: Models) -> str:
    """Return the problem of an unknown key, with the nearest known one."""
    known = {key: (*parent, key) for parent, model in models.items() for key in model.model_fields}
    near = nearest_of(show_key(path[-1]).strip().lower(), known)
    hint = f"known keys: {', '.join(models[path[:-1]].model_fields)}"
    if near:
        hint = f"did you mean {'.'.join([SECTION, *known[near]])}?"
    return f"{shown_value(value, *map(show_key, path))}: unknown key; {hint}"
