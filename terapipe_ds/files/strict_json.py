"""Read JSON strictly from files that may be edited, cut short or mistaken for others; explain every refusal."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from terapipe_ds.messages import first_repeated, show_key, show_value

MAX_CONTAINERS, MAX_VALUES = 200_000, 1_000_000  # timelines of 120,000 events; a small object takes 600 bytes

_MAX_HJSON = 2**20  # its parser is slow

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""How the records of files are validated: no other types, no unknown keys, finite numbers."""

_Model = TypeVar("_Model", bound=BaseModel)
_ANYTHING = TypeAdapter(Any)


class JsonError(ValueError):
    """Tell why a text is no JSON, or no usable one; the reader adds the file and the fix."""


def parse_json(text: str | bytes) -> Any:
    """Return the document of a JSON text without repeated keys, half characters and extreme depth.

    Raise JsonError for others: bytes that are no UTF-8, numbers of thousands of digits, millions of values.
    """
    if not isinstance(text, str | bytes):
        raise JsonError(f"it is {show_value(text)}, and no text")
    try:
        data = text.encode() if isinstance(text, str) else text.removeprefix(codecs.BOM_UTF8)
        # The characters before values bound the memory that the values take; few of them are part of texts
        containers, values = data.count(b"{") + data.count(b"["), data.count(b",")
        for number, limit, what in ((containers, MAX_CONTAINERS, "lists and objects"), (values, MAX_VALUES, "values")):
            if number > limit:
                raise JsonError(f"it has {number:,} {what}, more than the {limit:,} that are read")
        _ANYTHING.validate_json(data)  # no half characters; at most 200 levels, so that walking them needs little stack
        return json.loads(data, object_pairs_hook=_without_duplicates)
    except JsonError:
        raise
    except ValidationError as error:
        raise JsonError(error.errors()[0]["msg"].removeprefix("Invalid JSON: ")) from None
    except ValueError as error:
        raise JsonError(str(error)) from None


def parse_hjson(data: bytes) -> Any:
    """Return the document of a JSON with comments and trailing commas, as DeepSpeed reads it by `hjson`.

    Raise JsonError as `parse_json`, and ImportError if DeepSpeed, which brings hjson, is not installed.
    """
    import hjson

    data = data.removeprefix(codecs.BOM_UTF8)
    if len(data) > _MAX_HJSON or not data.lstrip().startswith((b"{", b"#", b"/")):  # hjson takes many other texts
        raise JsonError("it is no object with comments")
    try:
        return parse_json(json.dumps(hjson.loads(data.decode(), object_pairs_hook=_without_duplicates)))
    except IndexError:  # of hjson, which looks for the end beyond the text
        raise JsonError("a comment that begins with /* does not end") from None
    except (ValueError, RecursionError, OverflowError) as error:
        raise JsonError(str(error)) from None


def parse_as(model: type[_Model], text: str | bytes) -> _Model:
    """Return the content of a JSON text as a value of `model`, read strictly: no value is converted to another type.

    Raise JsonError if the text is no JSON, or with the first value that does not fit and its place.
    """
    try:
        parse_json(text)
        data = text.removeprefix(codecs.BOM_UTF8) if isinstance(text, bytes) else text  # pydantic refuses the mark
        return model.model_validate_json(data, strict=True)
    except JsonError as error:
        raise JsonError(f"the text is no JSON: {error}") from None
    except ValidationError as error:
        raise JsonError(describe_error(error)) from None


def describe_error(error: ValidationError, whole: str = "the file") -> str:
    """Return the first complaint of pydantic as `parts[0].tokens = 0: expected greater than or equal to 1`.

    It names all keys that one object lacks. `whole` is the name of the document, for its top level.
    """
    complaints = error.errors(include_url=False)
    complaint = complaints[0]
    # "<...>" tags a member of a union
    place, kind = [key for key in complaint["loc"] if not str(key).startswith("<")], complaint["type"]
    if kind == "missing":
        beside = [other["loc"] for other in complaints if other["type"] == kind]
        absent = ", ".join(str(loc[-1]) for loc in beside if loc[:-1] == complaint["loc"][:-1])
        return f"{_dotted(place[:-1]) or whole} lacks {absent}"
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{_dotted(place[:-1]) or whole} has an unknown key {show_value(place[-1])}"
    if kind == "value_error":  # from one of our own checks, with its own text
        return f"{_dotted(place) or whole}: {complaint['ctx']['error']}"
    expected = re.sub(r"^\w+ should (be|have) ", "", complaint["msg"])
    return f"{_dotted(place) or whole} = {show_value(complaint['input'])}: expected {expected}"


def _dotted(place: Sequence[int | str]) -> str:
    shown = (f"[{key}]" if isinstance(key, int) else f".{show_key(key, 40)}" for key in place)
    return "".join(shown).removeprefix(".")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        twice = first_repeated(name for name, _ in pairs)
        raise JsonError(f"the key {show_value(twice)} occurs twice in one object")
    return document
