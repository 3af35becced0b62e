"""Define a check and its outcome, the parts' files, and the one result into which they are merged."""

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from terapipe_ds.files.atomic import write_text

RESULT = "gpu-checks.json"
PART_LIMIT_S = 570.0
"""The time after which a part is ended; with its start and its end it stays below ten minutes."""


@dataclass(frozen=True)
class Check:
    """Hold one thing that was looked at. `wanted` says which values are right, "-" where any value is."""

    name: str
    value: float | str
    wanted: str = "-"
    ok: bool = True


@dataclass(frozen=True)
class Settings:
    """Say how a part runs: on `device`, and with tiny sizes in a dry run, whose times are not judged."""

    device: str
    dry_run: bool
    folder: Path
    limit_s: float = PART_LIMIT_S
    begin_s: float = field(default_factory=time.monotonic)

    @property
    def ends_s(self) -> float:
        """Return the time by which the last check is done: a tenth of the limit is left for its end."""
        return self.begin_s + 0.9 * self.limit_s

    def is_late(self, needed_s: float = 0.0) -> bool:
        """Return whether work of `needed_s` seconds would not end in time."""
        return time.monotonic() + needed_s > self.ends_s

    def timed(self, name: str, value: float, limit: float) -> Check:
        """Return a check of seconds, or of a ratio of them; dry runs are not judged."""
        return Check(name, value, ok=math.isfinite(value)) if self.dry_run else at_most(name, value, limit)


def at_most(name: str, value: float, limit: float) -> Check:
    """Return a check of a number that must not exceed `limit`; NaN fails."""
    return Check(name, value, f"<= {limit:g}", value <= limit)


def equal(name: str, value: str, wanted: str) -> Check:
    return Check(name, value, wanted, value == wanted)


def not_run(name: str, why: str) -> Check:
    """Return a failed check of something that was to be looked at and was not."""
    return Check(name, f"not run: {why}", "a run", False)


@dataclass
class PartResult:
    """Hold the checks of one part, and the machine on which they were made."""

    part: str
    dry_run: bool
    machine: dict[str, Any]
    seconds: float = 0.0
    checks: list[dict[str, Any]] = field(default_factory=list)

    def add(self, check: Check, seconds: float) -> None:
        """Keep a check and how long it took. A value that is not finite becomes text: JSON has no such numbers."""
        shown = check.value if isinstance(check.value, str) or math.isfinite(check.value) else str(check.value)
        self.checks.append({**asdict(check), "value": shown, "seconds": round(seconds, 3)})
        self.seconds += seconds

    def save(self, folder: Path) -> None:
        """Write `PART.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"{self.part}.json", json.dumps(asdict(self), indent=1, allow_nan=False))


def merged(folder: Path, parts: Iterable[str]) -> dict[str, Any]:
    """Return the result of all parts in `folder`, and write it there.

    Raises:
        ValueError: dry runs beside real ones, or parts from several devices, cannot be merged.
    """
    found = parts_in(folder, parts)
    require_alike(folder, found)
    failed = sum(not check["ok"] for part in found for check in part["checks"])
    result = {"ok": failed == 0, "failed": failed, "parts": {part["part"]: part for part in found}}
    write_text(folder / RESULT, json.dumps(result, indent=1, allow_nan=False))
    return result


def parts_in(folder: Path, parts: Iterable[str]) -> list[dict[str, Any]]:
    """Return those results of `parts` that the folder has."""
    return [json.loads(path.read_text()) for part in parts if (path := folder / f"{part}.json").exists()]


def require_alike(folder: Path, found: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError where parts cannot be merged into one result."""
    for what, values in (
        ("dry runs and real ones", {part["dry_run"] for part in found}),
        ("devices", {part["machine"]["device"] for part in found}),
    ):
        if len(values) > 1:
            raise ValueError(f"{folder} has parts of several {what} ({sorted(map(str, values))}): give another --out")


def table(result: Mapping[str, Any], parts: Sequence[str]) -> str:
    """Return a line per check of `parts`: state, name, value, what was wanted, seconds."""
    lines = []
    for part in (result["parts"][name] for name in parts if name in result["parts"]):
        machine = part["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        lines.append(f"{part['part']}: {machine['device']}, {machine['cpu']}, {versions}, {machine['date']}")
        for check in part["checks"]:
            value = check["value"]
            shown = value if isinstance(value, str) else f"{value:.4g}"
            state = "ok" if check["ok"] else "NOT OK"
            lines.append(f"  {state:<7}{check['name']:<76} {shown:<12} {check['wanted']:<10}{check['seconds']:8.1f} s")
    failed = sum(line.startswith("  NOT OK") for line in lines)
    lines.append(f"{failed} of these checks failed" if failed else "all of these checks passed")
    return "\n".join(lines)
