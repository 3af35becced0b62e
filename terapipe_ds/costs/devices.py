"""Read device cards: the data sheets of hardware that one does not have (`data/devices.json`)."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from terapipe_ds.files.bounded import read_bytes
from terapipe_ds.files.strict_json import STRICT, JsonError, describe_error, parse_json
from terapipe_ds.messages import look_up, show_value

FILE = Path(__file__).parents[1] / "data" / "devices.json"
ITEM_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}
_SPELLINGS = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}

_Positive = Annotated[float, Field(gt=0)]
_Fraction = Annotated[float, Field(gt=0, le=1)]
_Count = Annotated[
    int,
    Field(ge=1),
    BeforeValidator(lambda count: int(count) if isinstance(count, float) and count % 1 == 0 else count),
]  # 80e9 is a number of bytes, too


class DeviceError(ValueError):
    """Refuse an unknown device, a dtype that it lacks, or numbers that no device has."""


@dataclass(frozen=True, config=STRICT)
class LinkCard:
    """Describe one direction of one device's link."""

    bandwidth_bytes_per_s: _Positive
    latency_s: Annotated[float, Field(ge=0)]
    source: str = ""


@dataclass(frozen=True, config=STRICT)
class DeviceCard:
    """Describe one device. `dataclasses.replace` gives it other numbers than the shipped ones."""

    name: str
    title: str
    peak_flops: Mapping[str, _Positive | None]  # dense FLOP/s by dtype; None where the device lacks it
    memory_bandwidth_bytes_per_s: _Positive
    memory_bytes: _Count
    kernel_floor_s: _Positive  # seconds of the smallest kernel
    matmul_efficiency: _Fraction  # of the peak that real kernels reach
    attention_efficiency: _Fraction
    bandwidth_efficiency: _Fraction
    devices_per_node: _Count
    node_link: LinkCard
    network_link: LinkCard
    source: str = ""
    aliases: tuple[str, ...] = ()
    attention_backward_efficiency: _Fraction | None = None  # None: as `attention_efficiency`
    kernel_source: str = ""  # of the three efficiencies
    host_link: LinkCard | None = None  # of one device to its host, while all devices of the node use theirs
    host_memory_bytes: _Count | None = None  # of a node; None: nobody limits it
    context_bytes: _Count | None = None  # of a CUDA process before its first tensor; None: neither CUDA nor NCCL

    def __post_init__(self) -> None:
        if not set(self.peak_flops) <= set(ITEM_BYTES) or not {"bf16", "fp16", "fp32"} & set(self.dtypes):
            given = show_value(dict(self.peak_flops))
            raise ValueError(f"peak_flops = {given}: give {', '.join(ITEM_BYTES)}, and not null for all but tf32")

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu-core"

    @property
    def reachable_bytes_per_s(self) -> float:
        """Return the rate at which real kernels move the bytes of the memory."""
        return self.memory_bandwidth_bytes_per_s * self.bandwidth_efficiency

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Return the dtypes in which the device computes."""
        return tuple(name for name, peak in self.peak_flops.items() if peak is not None)

    def resolve_dtype(self, dtype: str) -> str:
        """Return `dtype` as `peak_flops` spells it, or raise DeviceError; "auto" is the first of bf16, fp16, fp32."""
        if dtype == "auto":
            return next(name for name in ("bf16", "fp16", "fp32") if name in self.dtypes)
        name = _SPELLINGS.get(dtype, dtype) if isinstance(dtype, str) else ""
        if name not in self.dtypes:
            raise DeviceError(
                f"dtype = {show_value(dtype)}: {self.title} has no such arithmetic; give one of "
                f"{', '.join(self.dtypes)}, or auto"
            )
        return name


def device_card(name: str) -> DeviceCard:
    """Return the card of that name or alias, or in a file of that name; DeviceError has the nearest name and all names.

    A file ends with .json, and has one card as `data/devices.json` has them.
    """
    if isinstance(name, str) and name.endswith(".json"):
        return _card_of_file(name)
    cards = device_cards()
    by_name = {alias: card for card in cards.values() for alias in (card.name, *card.aliases)}
    return look_up(name, by_name, "device", [*cards, "or the .json of your own"], DeviceError)


def _card_of_file(path: str) -> DeviceCard:
    try:
        return _CARD.validate_json(json.dumps(parse_json(read_bytes(path))))
    except OSError as error:
        problem = str(error.strerror)
    except JsonError as error:
        problem = str(error)
    except ValidationError as error:
        problem = describe_error(error, "the card")
    raise DeviceError(f"{path}: {problem}; give the JSON of a device card: docs/strategy.md has an example")


@functools.cache
def device_cards() -> dict[str, DeviceCard]:
    """Return all shipped cards by name."""
    cards = [_CARD.validate_json(json.dumps(card)) for card in json.loads(FILE.read_bytes())["devices"]]
    return {card.name: card for card in cards}


def peak_of_card(device: str, dtype: str) -> float | None:
    """Return the peak of a device by the name that its driver gives; None if the name does not identify one card."""
    words = set(device.lower().replace("-", " ").split())
    if {"pcie", "nvl", "mig", "laptop", "d"} & words:  # their peaks differ from the cards'
        return None
    of_family = {name.removeprefix("rtx-").split("-")[0]: card for name, card in device_cards().items()}
    name = _SPELLINGS.get(dtype, dtype)
    return next((card.peak_flops.get(name) for family, card in of_family.items() if family in words), None)


_CARD = TypeAdapter(DeviceCard)
