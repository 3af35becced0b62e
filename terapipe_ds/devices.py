"""Device cards: what data sheets say about hardware that one does not have (``data/devices.json``)."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terapipe_ds.json_text import JsonError, parse_json
from terapipe_ds.plan import show_value

FILE = Path(__file__).parent / "data" / "devices.json"
FORMAT, VERSION = "terapipe_ds.devices", 1
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
        _check_positive(self, f"device {show_value(self.name)}")
        _check_peaks(self)

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
    return read_cards(FILE.read_bytes())


def read_cards(text: str | bytes) -> dict[str, DeviceCard]:
    """The cards in the text of a file such as ``data/devices.json``, by name.

    Raises:
        DeviceError: anything else, or a name that stands twice.
    """
    try:
        document = parse_json(text)
    except JsonError as error:
        raise DeviceError(f"device cards: no JSON ({error}); give a file such as {FILE.name}") from None
    entries = document.get("devices") if isinstance(document, dict) else None
    if not isinstance(entries, list) or document.get("format") != FORMAT or document.get("version") != VERSION:
        raise DeviceError(
            f'device cards: give an object with "format": "{FORMAT}", "version": {VERSION} and a list of "devices"'
        )
    cards = [_card(entry, f"devices[{index}]") for index, entry in enumerate(entries)]
    names = [name.lower() for card in cards for name in (card.name, *card.aliases)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DeviceError(f"device cards: {show_value(twice)} names two devices: give each a name of its own")
    return {card.name: card for card in cards}


def _card(entry: Any, where: str) -> DeviceCard:
    _check_keys(DeviceCard, entry, where)
    links = {name: _link(entry[name], f"{where}.{name}") for name in ("node_link", "network_link")}
    aliases = entry.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise DeviceError(f"{where}: aliases = {show_value(aliases)}; give a list of names")
    return DeviceCard(**{**entry, **links, "aliases": tuple(aliases)})


def _link(entry: Any, where: str) -> LinkCard:
    _check_keys(LinkCard, entry, where)
    return LinkCard(**entry)


def _check_keys(record: Any, entry: Any, where: str) -> None:
    if not isinstance(entry, dict):
        raise DeviceError(f"{where} = {show_value(entry)}; give an object")
    known = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(record)}
    for name in [*(name for name, needed in known.items() if needed and name not in entry), *(set(entry) - set(known))]:
        problem = "an unknown" if name in entry else "no"
        raise DeviceError(f"{where} has {problem} key {show_value(name)}; give {', '.join(known)}")


def _check_peaks(card: DeviceCard) -> None:
    peaks = card.peak_flops
    ours = isinstance(peaks, Mapping) and set(peaks) <= set(ITEM_BYTES)
    ours = ours and all(peak is None or _is_positive(peak) for peak in peaks.values())
    if not ours or not {"bf16", "fp16", "fp32"} & set(card.dtypes):
        raise DeviceError(
            f"device {card.name!r}: peak_flops = {show_value(peaks)}; give finite FLOP/s > 0, or null, of "
            f"{', '.join(ITEM_BYTES)}, one of fp32, fp16 and bf16 at least"
        )


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _check_positive(card: DeviceCard | LinkCard, where: str) -> None:
    for field in dataclasses.fields(card):
        value = getattr(card, field.name)
        if field.type in ("int", "float") and not _is_positive(value):
            raise DeviceError(f"{where}: {field.name} = {show_value(value)}; give a finite number > 0")
        if field.type == "int" and value != int(value):
            raise DeviceError(f"{where}: {field.name} = {show_value(value)}; give a whole number")
        if field.type == "str" and not isinstance(value, str):
            raise DeviceError(f"{where}: {field.name} = {show_value(value)}; give text")
        if field.name.endswith("efficiency") and value > 1:
            raise DeviceError(f"{where}: {field.name} = {value}; give a fraction of the peak, at most 1")
