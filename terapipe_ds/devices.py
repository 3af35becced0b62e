"""Device cards: what data sheets say about hardware that one does not have (``data/devices.json``)."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from terapipe_ds.plan import show_value

FILE = Path(__file__).parent / "data" / "devices.json"
ITEM_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}
_SPELLINGS = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}


class DeviceError(ValueError):
    """A device nobody described, a dtype that it lacks, or numbers that no device has."""


@dataclass(frozen=True)
class LinkCard:
    """One direction of one device's link."""

    bandwidth_bytes_per_s: float
    latency_s: float
    source: str = ""

    def __post_init__(self) -> None:
        _check_positive(self, "link")


@dataclass(frozen=True)
class DeviceCard:
    """One device. ``peak_flops``: dense FLOP/s by dtype, None where the device lacks it. Efficiencies: the fraction
    of a peak that real kernels reach. ``kernel_floor_s``: what the smallest kernel takes. For other numbers than the
    shipped ones: ``dataclasses.replace``."""

    name: str
    title: str
    peak_flops: Mapping[str, float | None]
    memory_bandwidth_bytes_per_s: float
    memory_bytes: int
    kernel_floor_s: float
    matmul_efficiency: float
    attention_efficiency: float
    bandwidth_efficiency: float
    devices_per_node: int
    node_link: LinkCard
    network_link: LinkCard
    source: str = ""
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_positive(self, f"device {self.name!r}")

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes it computes in."""
        return tuple(name for name, peak in self.peak_flops.items() if peak is not None)

    def resolve_dtype(self, dtype: str) -> str:
        """``dtype`` in the spelling of ``peak_flops``; "auto": bf16 where there is, else fp16, else fp32.

        Raises:
            DeviceError: the device does not have it.
        """
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
    """The card of that name or alias, whatever the case of its letters.

    Raises:
        DeviceError: no card has it; the message has the nearest name and all names.
    """
    cards = device_cards()
    by_name = {alias: card for card in cards.values() for alias in (card.name, *card.aliases)}
    wanted = name.lower() if isinstance(name, str) else ""
    if wanted in by_name:
        return by_name[wanted]
    nearest = difflib.get_close_matches(wanted, by_name, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise DeviceError(f"unknown device {show_value(name)}; {hint}Known: {', '.join(cards)}")


@functools.cache
def device_cards() -> dict[str, DeviceCard]:
    """All shipped cards by name."""
    document = json.loads(FILE.read_text(encoding="utf-8"))
    cards = []
    for entry in document["devices"]:
        links = {name: LinkCard(**entry[name]) for name in ("node_link", "network_link")}
        cards.append(DeviceCard(**{**entry, **links, "aliases": tuple(entry["aliases"])}))
    return {card.name: card for card in cards}


def _check_positive(card: DeviceCard | LinkCard, where: str) -> None:
    for field in dataclasses.fields(card):
        value = getattr(card, field.name)
        if field.type in ("int", "float") and not (isinstance(value, int | float) and 0 < value < math.inf):
            raise DeviceError(f"{where}: {field.name} = {show_value(value)}; give a finite number > 0")
        if field.name.endswith("efficiency") and value > 1:
            raise DeviceError(f"{where}: {field.name} = {value}; give a fraction of the peak, at most 1")
