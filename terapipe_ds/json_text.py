"""JSON from files that somebody may have edited, cut short or mistaken for others: read strictly, refused in words."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from terapipe_ds.plan import show_value

MAX_DEPTH = 64  # nothing of ours is nested half as deeply, and what is much deeper overflows the stack of who walks it


_Model = TypeVar("_Model", bound=BaseModel)


class JsonError(ValueError):
    """Why a text is no JSON, or none that can be used; readers say which file it is and what to give."""


def parse_json(text: str | bytes) -> Any:
    """What ``json.loads`` gives, where every key stands once, text can be written again and nothing is too deep.

    Raises:
        JsonError: anything else: bad JSON, bytes that are no UTF, numbers of thousands of digits.
    """
    try:
        document = json.loads(text, object_pairs_hook=_without_duplicates)
    except JsonError:
        raise
    except RecursionError:
        raise JsonError("it is nested too deeply") from None
    except ValueError as error:
        raise JsonError(str(error)) from None
    _check(document)
    return document


def parse_as(model: type[_Model], text: str | bytes) -> _Model:
    """Return what a JSON text holds as a value of ``model``, read strictly: no value is converted to another type.

    Raises:
        JsonError: the text is no JSON, or a value does not fit; the message names the first such value and its place.
    """
    try:
        parse_json(text)
    except JsonError as error:
        raise JsonError(f"the text is no JSON: {error}") from None
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise JsonError(_first_problem(error)) from None


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    loc = [key for key in first["loc"] if not str(key).startswith("<")]  # "<...>" tags a member of a union
    keys = [f"[{key}]" if isinstance(key, int) else f".{_show_key(key)}" for key in loc]
    place = "".join(keys).removeprefix(".")
    if first["type"] == "missing":
        return f"{place} is missing"
    reason = first.get("ctx", {}).get("error", first["msg"])  # an error that our own check raised, in its own words
    return f"{place} = {show_value(first['input'], 40)}: {reason}" if place else str(reason)


def _show_key(key: str) -> str:
    return key if key.isprintable() and len(key) <= 40 else show_value(key, 40)


def is_writable(text: str) -> bool:
    """False for text with lone surrogates, which JSON can spell and no file or terminal takes."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise JsonError(f"the key {show_value(twice)} stands twice in one object")
    return document


def _check(document: Any) -> None:
    """Depth and text of everything in ``document``, level by level."""
    level = [document]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value
                inner += value.values()
            elif isinstance(value, list):
                inner += value
            elif isinstance(value, str) and not value.isascii() and not is_writable(value):
                raise JsonError(f"the text {show_value(value)} has half a character (a lone surrogate)")
        if not inner:
            return
        level = inner
    raise JsonError(f"it is nested more than {MAX_DEPTH} levels deep")
