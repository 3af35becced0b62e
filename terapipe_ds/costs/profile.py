"""Hold a profile: measured seconds of every part and link, with the setting of the measurement, as one JSON file.

`runtime/profiling` writes it and `costs/fitted.py` fits it. It holds only for the measured setting: see `ProfileKey`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from terapipe_ds.files.atomic import write_text
from terapipe_ds.files.bounded import read_bytes
from terapipe_ds.files.strict_json import STRICT, JsonError, describe_error, parse_json
from terapipe_ds.messages import first_repeated, show_value

FORMAT, VERSION = "terapipe_ds.profile", 2
MEASURE_AGAIN = "measure again and replace it"

_Count = Annotated[int, Field(ge=1)]
_Index = Annotated[int, Field(ge=0)]
_Seconds = Annotated[float, Field(gt=0)]
_Ratio = Annotated[float, Field(ge=0)]
_Bytes = Annotated[int | float, Field(ge=0)]
_Versions = Annotated[Mapping[str, str], AfterValidator(lambda names: dict(sorted(names.items())))]


class ProfileError(ValueError):
    """Refuse a file that is no usable profile, or a profile of another run."""


@dataclass(frozen=True, config=STRICT)
class ProfileKey:
    """Say for which runs a profile is valid. `model` is for people; programs compare its fingerprint."""

    model_fingerprint: str
    model: str
    device: str
    dtype: str
    micro_batch: _Count  # rows of a micro-batch on one data-parallel rank
    tensor_parallel: _Count
    num_stages: _Count  # parts; `Profile` knows how many stages held them
    activation_checkpointing: bool
    sequence_length: _Count  # the longest slice plus prefix that was measured, in tokens
    attention_backend: str
    versions: _Versions = dataclasses.field(default_factory=dict)
    layers_fingerprint: str | None = None  # of the layers, however they are cut in parts; None: not noted

    @property
    def parameter_dtype(self) -> str:
        """Return the dtype of parameters; `dtype` adds the one of products if they differ."""
        return self.dtype.split(" ")[0]


@dataclass(frozen=True, config=STRICT)
class CostSample:
    """Hold the median seconds of a slice of `tokens` tokens after `prefix`, and the interquartile range over them."""

    tokens: _Count
    prefix: _Index
    forward_s: _Seconds
    backward_s: _Seconds
    forward_spread: _Ratio = 0.0
    backward_spread: _Ratio = 0.0
    repeats: _Count = 1
    weight_s: _Seconds | None = None  # of the backward, the seconds of W, where W was measured on its own
    attention_s: _Ratio | None = None  # of the forward, what a second one saves that takes attention from the first

    def __post_init__(self) -> None:
        if self.attention_s is not None and self.attention_s >= self.forward_s:
            raise ValueError(f"attention_s = {self.attention_s}: expected less than the forward, {self.forward_s} s")
        if self.weight_s is not None and self.weight_s > self.backward_s:
            raise ValueError(f"weight_s = {self.weight_s}: expected at most the whole backward, {self.backward_s} s")


@dataclass(frozen=True, config=STRICT)
class LinkSample:
    """Hold the median seconds of one message with `tokens` tokens of activations for the next part."""

    tokens: _Count
    send_s: _Seconds
    part_id: _Index | None = None  # the part that sends forward over this link; None: all links are alike
    spread: _Ratio = 0.0
    repeats: _Count = 1
    num_bytes: _Count | None = None  # of the message; None: not noted


@dataclass(frozen=True, config=STRICT)
class Overhead:
    """Hold the seconds of every F and B of `tokens` tokens beyond its layers: the engine's own work, and messages."""

    tokens: _Count
    forward_s: _Ratio
    backward_s: _Ratio


@dataclass(frozen=True, config=STRICT)
class LayerProfile:
    """Hold the seconds and bytes of one kind of layer on one rank; equal layers share one. None: not measured."""

    samples: Annotated[tuple[CostSample, ...], Field(min_length=1)]
    parameters: _Index
    trained_parameters: _Index  # with gradients; DeepSpeed counts these for its cuts
    output_bytes_per_token: _Bytes  # of its output, with all rows
    memory: dict[str, _Bytes | None] | None = None  # the fields of `planner.memory.PartMemory`
    attention_bytes_per_token: _Bytes = 0.0  # of results that a layer keeps for its second forward

    def __post_init__(self) -> None:
        _refuse_twice([(sample.tokens, sample.prefix) for sample in self.samples], "(tokens, prefix)")
        if self.trained_parameters > self.parameters:
            allowed = f"expected an integer from 0 to {self.parameters}"
            raise ValueError(f"trained_parameters = {self.trained_parameters}: {allowed}")


@dataclass(frozen=True, config=STRICT)
class LayerProfiles:
    """Hold the layers of the whole model: their kinds, the kind of each layer, and where the measured parts begin."""

    kinds: Annotated[tuple[LayerProfile, ...], Field(min_length=1)]
    kind_of: Annotated[tuple[_Index, ...], Field(min_length=1)]  # of each layer, an index of `kinds`
    bounds: Annotated[tuple[_Index, ...], Field(min_length=2)]  # layer numbers: part p has those from bounds[p] on

    def __post_init__(self) -> None:
        if max(self.kind_of) >= len(self.kinds):
            raise ValueError(f"kind_of = {max(self.kind_of)}: expected an index of the {len(self.kinds)} kinds")
        rising = all(start < stop for start, stop in itertools.pairwise(self.bounds))
        if (self.bounds[0], self.bounds[-1]) != (0, len(self.kind_of)) or not rising:
            raise ValueError(f"bounds = {list(self.bounds)}: expected rising layer numbers, 0 to {len(self.kind_of)}")


@dataclass(frozen=True, config=STRICT)
class PartProfile:
    """Hold the seconds and bytes of one part; None: not measured."""

    part_id: _Index
    samples: Annotated[tuple[CostSample, ...], Field(min_length=1)]
    step_s: _Seconds | None = None  # gradient reduction and optimizer step of its stage
    memory: dict[str, _Bytes | None] | None = None  # the fields of `planner.memory.PartMemory`
    overheads: tuple[Overhead, ...] = ()  # the share of the samples that is not its layers'

    def __post_init__(self) -> None:
        _refuse_twice([(sample.tokens, sample.prefix) for sample in self.samples], "(tokens, prefix)")
        _refuse_twice([overhead.tokens for overhead in self.overheads], "overheads: tokens")


@dataclass(frozen=True, config=STRICT)
class Profile:
    """Hold the measured costs of some or all parts, in the order of `part_id`.

    It raises pydantic.ValidationError for impossible times, repeated pairs and parts, and numbers that contradict.
    """

    key: ProfileKey
    parts: Annotated[tuple[PartProfile, ...], Field(min_length=1)]
    links: tuple[LinkSample, ...] = ()
    pipeline_stages: _Count | None = None  # stages that held the parts when measured; None: not noted
    layers: LayerProfiles | None = None  # None: layers were not timed, so that no other cut can be costed
    state_ranks: _Count | None = None  # that divided the optimizer's states when measured; None: not noted

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(sorted(self.parts, key=lambda part: part.part_id)))
        _refuse_twice([part.part_id for part in self.parts], "part_id")
        _refuse_twice([(link.tokens, link.part_id) for link in self.links], "links: (tokens, part_id)")
        measured = [part.samples for part in self.parts]
        measured += [kind.samples for kind in self.layers.kinds] if self.layers is not None else []
        reach = max(sample.tokens + sample.prefix for samples in measured for sample in samples)
        if reach > self.key.sequence_length:
            length = show_value(self.key.sequence_length)
            raise ValueError(f"key.sequence_length = {length}: expected what was measured, {show_value(reach)} tokens")
        if self.layers is not None and len(self.layers.bounds) != len(self.parts) + 1:
            raise ValueError(f"layers.bounds = {list(self.layers.bounds)}: expected {len(self.parts)} part(s)")
        stages, parts = self.pipeline_stages, self.key.num_stages
        if stages is not None and stages > parts:
            raise ValueError(f"pipeline_stages = {show_value(stages)}: expected 1 to the number of parts, {parts}")

    def require(self, expected: ProfileKey, ignore: Sequence[str] = ()) -> None:
        """Raise ProfileError with a line per field that differs, unless in `ignore`. A longer sequence will do."""
        lines = []
        for field in dataclasses.fields(ProfileKey):
            measured, wanted = getattr(self.key, field.name), getattr(expected, field.name)
            is_enough = field.name == "sequence_length" and measured > wanted
            if is_enough or measured == wanted or field.name in (*ignore, "model", "layers_fingerprint"):
                continue
            if field.name == "model_fingerprint":
                measured, wanted = (f"{key.model} ({key.model_fingerprint})" for key in (self.key, expected))
            if field.name == "versions":
                measured, wanted = (
                    ", ".join(map(" ".join, key.versions.items())) or "none" for key in (self.key, expected)
                )
            lines.append(
                f"\n  {field.name}: the profile has {measured}, this run {wanted}; measure on this "
                "run, or give its own profile"
            )
        if lines:
            raise ProfileError("the profile does not belong to this run:" + "".join(lines))

    def to_json(self) -> str:
        """Return the text of the file; `from_json` reads back an equal profile, every float exactly."""
        document = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        return json.dumps(document, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "the profile") -> Profile:
        """Read what `to_json` wrote, or raise ProfileError. Keys whose values have a default may be missing."""
        try:
            document = parse_json(text)
        except (JsonError, TypeError) as error:
            raise ProfileError(f"{source} is corrupt or cut short ({error}): {MEASURE_AGAIN}") from None
        if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
            raise ProfileError(f'{source} is not a profile (no "format": "{FORMAT}"): give the file that was measured')
        version = document.pop("version", None)
        if type(version) is not int or version != VERSION:
            is_newer = type(version) is int and version > VERSION
            remedy = "update terapipe_ds, or measure again" if is_newer else MEASURE_AGAIN
            raise ProfileError(f"{source} has version {show_value(version)}, this package reads {VERSION}: {remedy}")
        try:
            return _PROFILE.validate_json(json.dumps(document))
        except ValidationError as error:
            raise ProfileError(f"{source}: {describe_error(error, 'the file')}; {MEASURE_AGAIN}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file in one move: a reader sees the old file or the new one. It may raise ProfileError."""
        try:
            write_text(path, self.to_json())
        except OSError as error:
            raise ProfileError(f"cannot write the profile {path} ({error}): give a folder that exists") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read what `save` wrote, or raise ProfileError where there is no usable profile."""
        try:
            data = read_bytes(path)
        except OSError as error:
            raise ProfileError(f"cannot read the profile {path} ({error}): give the file that was measured") from error
        return cls.from_json(data, f"profile {path}")


_PROFILE = TypeAdapter(Profile)


def is_profile(path: str | os.PathLike[str]) -> bool:
    """Return whether a file declares itself a profile, whatever else is wrong with it."""
    try:
        document = parse_json(read_bytes(path))
    except (OSError, JsonError):
        return False
    return isinstance(document, dict) and document.get("format") == FORMAT


def _refuse_twice(items: Sequence[Any], what: str) -> None:
    if (item := first_repeated(items)) is not None:
        raise ValueError(f"{what} = {show_value(item)} occurs twice, expected once")
