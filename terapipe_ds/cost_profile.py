"""The profile: measured seconds of every part and link, with what they were measured on, as one JSON file.

``runtime/profiler.py`` writes it, ``cost_model.py`` fits it. A profile is only good for the very thing that was
measured, so it says what that was (:class:`ProfileKey`) and :meth:`Profile.require` refuses anything else.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from terapipe_ds.cost_profile_checks import (
    MEASURE_AGAIN,
    ProfileError,
    bad,
    check_fields,
    check_float,
    records,
    refuse_twice,
)
from terapipe_ds.files import write_text
from terapipe_ds.json_text import JsonError, parse_json
from terapipe_ds.plan import show_value

__all__ = ["CostSample", "LayerShare", "LinkSample", "PartProfile", "Profile", "ProfileError", "ProfileKey"]

FORMAT, VERSION = "terapipe_ds.profile", 1

_Record = TypeVar("_Record")


@dataclass(frozen=True)
class ProfileKey:
    """What the numbers of a profile are valid for.

    ``model_fingerprint`` is compared, ``model`` is for people. ``layers_fingerprint``: of the layers, however they are
    cut in parts; None in profiles of earlier versions. ``num_stages`` counts the parts; :class:`Profile` knows how many
    stages held them. ``sequence_length`` is the longest slice plus prefix that was measured, in tokens; ``micro_batch``
    the rows of a micro-batch on one data-parallel rank.
    """

    model_fingerprint: str
    model: str
    device: str
    dtype: str
    micro_batch: int
    tensor_parallel: int
    num_stages: int
    activation_checkpointing: bool
    sequence_length: int
    attention_backend: str
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layers_fingerprint: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "key")
        if not isinstance(self.versions, Mapping) or not all(
            isinstance(text, str) for pair in self.versions.items() for text in pair
        ):
            raise bad("key.versions", self.versions, "names and versions as text, such as {'torch': '2.13.0'}")
        object.__setattr__(self, "versions", dict(sorted(self.versions.items())))

    @property
    def num_layers(self) -> int | None:
        """Of all parts, from ``model`` where that is a list such as "1 Embedding, 4 DecoderLayer"; None elsewhere."""
        texts = [text for text in self.model.split(", ") if not text.startswith("slices in multiples of ")]
        counts = [re.fullmatch(r"([0-9]{1,9}) \S+", text) for text in texts]
        return sum(int(count[1]) for count in counts if count) if counts and all(counts) else None

    def __hash__(self) -> int:
        return hash((self.model_fingerprint, self.device, self.dtype, *self.versions.items()))


@dataclass(frozen=True)
class CostSample:
    """Medians over ``repeats`` runs of one slice of ``tokens`` tokens after ``prefix`` tokens, in seconds.

    A spread is the interquartile range over the median. ``weight_s``: of the backward, what W takes where it was
    measured on its own.
    """

    tokens: int
    prefix: int
    forward_s: float
    backward_s: float
    forward_spread: float = 0.0
    backward_spread: float = 0.0
    repeats: int = 1
    weight_s: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, f"sample ({show_value(self.tokens)}, {show_value(self.prefix)})")
        if self.weight_s is not None and self.weight_s > self.backward_s:
            raise bad("weight_s", self.weight_s, f"at most the whole backward, {self.backward_s} s")


@dataclass(frozen=True)
class LinkSample:
    """Median seconds of one message that carries ``tokens`` tokens of activations to the next part.

    ``part_id``: the part that sends forward over this link; None: the same for all links. ``num_bytes``: of the
    message; None: not noted.
    """

    tokens: int
    send_s: float
    part_id: int | None = None
    spread: float = 0.0
    repeats: int = 1
    num_bytes: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, f"link sample of {show_value(self.tokens)} tokens")


@dataclass(frozen=True)
class LayerShare:
    """What one layer is of its part: of the seconds of its forward and its backward, and in parameters of a rank.

    ``trained_parameters``: those that have gradients; None: not noted.
    """

    forward: float
    backward: float
    parameters: int
    trained_parameters: int | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            check_float(f"layer share: {name}", getattr(self, name), zero=True)
        if type(self.parameters) is not int or self.parameters < 0:
            raise bad("layer share: parameters", self.parameters, "an integer >= 0")
        trained = self.trained_parameters
        if trained is not None and (type(trained) is not int or not 0 <= trained <= self.parameters):
            raise bad("layer share: trained_parameters", trained, f"an integer from 0 to {self.parameters}, or null")

    @property
    def trained(self) -> int:
        """The parameters that DeepSpeed counts where it cuts; all of them where those that train were not noted."""
        return self.parameters if self.trained_parameters is None else self.trained_parameters


@dataclass(frozen=True)
class PartProfile:
    """What one part takes. ``step_s``: gradient reduction and optimizer step of its stage; None: not measured.
    ``layer_shares``: of each of its layers, so that costs of another cut can be told; None: not measured."""

    part_id: int
    samples: tuple[CostSample, ...]
    step_s: float | None = None
    layer_shares: tuple[LayerShare, ...] | None = None

    def __post_init__(self) -> None:
        where = f"part {show_value(self.part_id)}"
        check_fields(self, where)
        object.__setattr__(self, "samples", records(CostSample, self.samples, f"{where}: samples"))
        if not self.samples:
            raise ProfileError(f"{where} has no samples: {MEASURE_AGAIN}")
        refuse_twice([(s.tokens, s.prefix) for s in self.samples], f"{where}: (tokens, prefix) =")
        if self.layer_shares is not None:
            shares = records(LayerShare, self.layer_shares, f"{where}: layer_shares")
            object.__setattr__(self, "layer_shares", shares)
            for name in ("forward", "backward"):
                total = sum(getattr(share, name) for share in shares)
                if not math.isclose(total, 1.0, abs_tol=1e-6):
                    raise bad(f"{where}: layer_shares, sum of {name}", total, "1")


@dataclass(frozen=True)
class Profile:
    """Measured costs of some or all parts; see the module.

    ``pipeline_stages``: how many stages held the parts while they were measured, each of them one or several; None: not
    noted, as in profiles of earlier versions.

    Raises:
        ProfileError: a time that is not positive and finite, a pair or a part that stands twice, samples beyond
            ``key.sequence_length``, more stages than parts.
    """

    key: ProfileKey
    parts: tuple[PartProfile, ...]
    links: tuple[LinkSample, ...] = ()
    pipeline_stages: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.key, ProfileKey):
            raise bad("key", self.key, "a ProfileKey")
        parts = sorted(records(PartProfile, self.parts, "parts"), key=lambda part: part.part_id)
        object.__setattr__(self, "parts", tuple(parts))
        object.__setattr__(self, "links", records(LinkSample, self.links, "links"))
        if not parts:
            raise ProfileError(f"a profile without parts: {MEASURE_AGAIN}")
        refuse_twice([part.part_id for part in parts], "part_id")
        refuse_twice([(link.tokens, link.part_id) for link in self.links], "links: (tokens, part_id) =")
        reach = max(sample.tokens + sample.prefix for part in parts for sample in part.samples)
        if reach > self.key.sequence_length:
            raise bad("key.sequence_length", self.key.sequence_length, f"what was measured, {reach} tokens")
        stages, most = self.pipeline_stages, self.key.num_stages
        if stages is not None and (type(stages) is not int or not 1 <= stages <= most):
            raise bad("pipeline_stages", stages, f"an integer from 1 to the number of parts, {most}, or null")

    # -- what it is valid for ----------------------------------------------------------------------------------------

    def mismatches(self, expected: ProfileKey, ignore: Sequence[str] = ()) -> list[str]:
        """One line per field of the key that differs from ``expected``, with both values and what to do.

        A profile of a longer sequence serves a shorter one. Fields named in ``ignore`` are not compared.
        """
        lines = []
        for field in dataclasses.fields(ProfileKey):
            measured, wanted = getattr(self.key, field.name), getattr(expected, field.name)
            if field.name in (*ignore, "model", "layers_fingerprint") or measured == wanted:
                continue
            if field.name == "sequence_length" and measured > wanted:
                continue
            if field.name == "model_fingerprint":
                measured, wanted = (f"{key.model} ({key.model_fingerprint})" for key in (self.key, expected))
            lines.append(f"{field.name}: the profile has {_plain(measured)}, this run {_plain(wanted)}; {_REMEDY}")
        return lines

    def require(self, expected: ProfileKey, ignore: Sequence[str] = ()) -> None:
        """Refuse a profile of something else.

        Raises:
            ProfileError: lists :meth:`mismatches`.
        """
        lines = self.mismatches(expected, ignore)
        if lines:
            raise ProfileError("the profile does not belong to this run:\n  " + "\n  ".join(lines))

    @classmethod
    def gather(cls, profiles: Iterable[Profile]) -> Profile:
        """One profile of what each stage measured of its own parts; the keys must be equal.

        Raises:
            ProfileError: keys that differ, a part that two have, or a part that none has.
        """
        profiles = list(profiles)
        if not profiles:
            raise ProfileError("no profiles to gather: give one per stage")
        first = profiles[0]
        for other in profiles[1:]:
            if other.key != first.key:
                lines = other.mismatches(first.key) or first.mismatches(other.key) or ["model: the descriptions differ"]
                raise ProfileError("stages measured different things:\n  " + "\n  ".join(lines))
            if other.pipeline_stages != first.pipeline_stages:
                sides = f"{show_value(first.pipeline_stages)} and {show_value(other.pipeline_stages)}"
                raise ProfileError(f"stages measured different things:\n  pipeline_stages: {sides}; {_REMEDY}")
        parts = tuple(part for profile in profiles for part in profile.parts)
        links = tuple(dict.fromkeys(link for profile in profiles for link in profile.links))
        whole = cls(first.key, parts, links, first.pipeline_stages)
        ids = [part.part_id for part in whole.parts]
        if ids != list(range(len(ids))):
            raise ProfileError(f"the gathered parts are {ids}: give every part from 0 on, without a gap")
        return whole

    # -- the file ----------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The text of the file; :meth:`from_json` reads back an equal profile, every float exactly."""
        document = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        return json.dumps(document, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "the profile") -> Profile:
        """What :meth:`to_json` wrote. ``source`` names it in messages.

        Raises:
            ProfileError: anything else.
        """
        try:
            document = parse_json(text)
        except (JsonError, TypeError) as error:
            raise ProfileError(f"{source} is corrupt or cut short ({error}): {MEASURE_AGAIN}") from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ProfileError(f'{source} is not a profile (no "format": "{FORMAT}"): give the file that was measured')
        version = document.get("version")
        if type(version) is not int or version != VERSION:
            newer = type(version) is int and version > VERSION
            remedy = "update terapipe_ds, or measure again" if newer else MEASURE_AGAIN
            raise ProfileError(f"{source} has version {show_value(version)}, this package reads {VERSION}: {remedy}")
        try:
            return _profile({name: document[name] for name in document if name not in ("format", "version")})
        except ProfileError as error:
            raise ProfileError(f"{source}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file in one move: whoever reads meanwhile sees the old one or the new one, never a half.

        Raises:
            ProfileError: the file cannot be written.
        """
        try:
            write_text(path, self.to_json())
        except OSError as error:
            raise ProfileError(f"cannot write the profile {path} ({error}): give a folder that exists") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read what :meth:`save` wrote.

        Raises:
            ProfileError: no such file, or not a usable profile.
        """
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise ProfileError(f"cannot read the profile {path} ({error}): give the file that was measured") from error
        return cls.from_json(data, f"profile {path}")


_REMEDY = "measure on this run, or give its own profile"


def _profile(document: dict[str, Any]) -> Profile:
    # these came later than the format and may be missing
    document = {"pipeline_stages": None} | document
    key, parts, links = (document.get(name) for name in ("key", "parts", "links"))
    _check_keys(Profile, document, "the file")
    key = {"layers_fingerprint": None} | key if isinstance(key, dict) else key
    links = [{"num_bytes": None} | link if isinstance(link, dict) else link for link in _as_list(links, "links")]
    parts = [_part(part, n) if isinstance(part, dict) else part for n, part in enumerate(_as_list(parts, "parts"))]
    return Profile(
        _from_dict(ProfileKey, key, "key"),
        tuple(_list_of(PartProfile, parts, "parts")),
        tuple(_list_of(LinkSample, links, "links")),
        document["pipeline_stages"],
    )


def _part(document: dict[str, Any], part_id: int) -> dict[str, Any]:
    """With records; shares of layers came later than the format and may be missing, and what of them is trained."""
    shares, where = document.get("layer_shares"), f"parts[{part_id}]"
    if shares is not None:
        if isinstance(shares, list):
            shares = [{"trained_parameters": None} | each if isinstance(each, dict) else each for each in shares]
        shares = _list_of(LayerShare, shares, f"{where}.layer_shares")
    samples = _list_of(CostSample, document.get("samples"), f"{where}.samples")
    return {**document, "samples": samples, "layer_shares": shares}


def _list_of(record: type[_Record], values: Any, where: str) -> list[_Record]:
    return [_from_dict(record, value, f"{where}[{n}]") for n, value in enumerate(_as_list(values, where))]


def _as_list(values: Any, where: str) -> list[Any]:
    if not isinstance(values, list):
        raise bad(where, values, "a list")
    return values


def _from_dict(record: type[_Record], document: Any, where: str) -> _Record:
    _check_keys(record, document, where)
    try:
        return record(**document)
    except ProfileError as error:
        raise ProfileError(f"{where}: {error}") from None


def _check_keys(record: Any, document: Any, where: str) -> None:
    if not isinstance(document, dict):
        raise bad(where, document, "an object")
    known = [field.name for field in dataclasses.fields(record)]
    missing, unknown = [name for name in known if name not in document], sorted(set(document) - set(known))
    if missing or unknown:
        found = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has unknown {', '.join(unknown)}"] * bool(unknown)
        raise ProfileError(f"{where} {' and '.join(found)}: {MEASURE_AGAIN}")


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {version}" for name, version in value.items()) or "none"
    return str(value)
