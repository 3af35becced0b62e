"""What a training run measures: kept in memory, written to a JSONL file, drawn as loss curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from terapipe_ds.files.atomic import write_atomically, write_text

# {"step", "loss", "seconds"} for each training step, {"step", "validation_loss"} for each evaluation
Entries = Sequence[Mapping[str, Any]]


class MetricsFile:
    """Entries of this run and of the one that it resumes; with a ``path``, one JSON object per line there."""

    def __init__(self, path: str | Path | None, earlier: Entries = ()) -> None:
        self.entries = list(earlier)
        self._path = Path(path) if path else None
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, "".join(map(_line, self.entries)))

    def record(self, **entry: Any) -> None:
        """Add one entry; in the file at once, for whoever watches."""
        self.entries.append(entry)
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(entry))


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The entries of a file that a `MetricsFile` wrote."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def draw_losses(path: str | Path, runs: Mapping[str, Entries], title: str, token: str = "byte") -> Path:
    """Write a PNG with the training and validation losses of ``runs`` (name -> entries), whole or not at all.

    Of several runs the first is drawn broad and pale, the others over it: curves that agree are both seen. ``token``
    names what the loss is a mean over.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), dpi=120)
    for index, (name, entries) in enumerate(runs.items()):
        under = index == 0 and len(runs) > 1
        look = {"color": f"C{index}", "linewidth": 6.0 if under else 1.5, "alpha": 0.4 if under else 1.0}
        validation = {**look, "color": f"C{index}" if len(runs) > 1 else "C1"}
        marker = {"marker": "o" if under else "x", "markersize": 11 if under else 7, "linestyle": "--"}
        axes.plot(*_series(entries, "loss"), label=f"{name} training".strip(), **look)
        axes.plot(*_series(entries, "validation_loss"), label=f"{name} validation".strip(), **validation, **marker)
    axes.set(xlabel="step", ylabel=f"cross entropy per {token} (nats)", title=title)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, lambda temporary: figure.savefig(temporary, format="png"))
    pyplot.close(figure)
    return target


def _series(entries: Entries, key: str) -> tuple[list[int], list[float]]:
    found = [entry for entry in entries if key in entry]
    return [entry["step"] for entry in found], [entry[key] for entry in found]


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry) + "\n"  # floats with all their digits
