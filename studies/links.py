"""Links below fp32: bytes on the wire, and what becomes of the loss.

Two stages, a process each, train one GPT in fp32 on the source text of Python's standard library, in slices, with the
optimizer of the demo (`configs/demo_sliced.json`). The only difference between the runs is `terapipe.links`: the same
weights at first, the same data in the same order. "again" is the control: exact links with other slices, which changes
no more than the rounding of fp32. What it is off is what a training amplifies by itself. Bytes are
those of all tensors that a rank gives to `torch.distributed.isend` in a step. The loss after the last step is told in
two ways: the mean over the last steps of training, and over text that is held back. An evaluation has exact messages,
so that the second is of the weights alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from studies.options import study_parser, write_report
from terapipe_ds.bench.ranks import (
    Workload,
    build_engine,
    finish_rank,
    machine,
    prepare_rank,
    progress_bar,
    spawn_ranks,
)
from terapipe_ds.files.atomic import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_EXAMPLES = """\
  python -m studies.links
  python -m studies.links --picture docs/pictures/links-loss.svg --json docs/results/links.json"""

RUNS: dict[str, tuple[int, dict[str, str]]] = {
    "exact": (4, {}),
    "again": (2, {}),
    "bf16": (4, {"forward": "bf16", "backward": "bf16"}),
    "int8": (4, {"forward": "int8", "backward": "bf16"}),
    "fp8": (4, {"forward": "fp8", "backward": "bf16"}),
}
"""Of each run, the number of slices and the key `terapipe.links`."""
WORK = Workload(stages=2, accumulation=1, sequence_length=128, micro_batch=4, hidden=256, layers=4, heads=4)
LAST = 10  # steps over which the last loss is the mean
_EVALUATIONS, _TEXT_BYTES = 16, 2_000_000
_SETTINGS = Path(__file__).parents[1] / "configs" / "demo_sliced.json"
_TAKEN = ("optimizer", "scheduler", "gradient_clipping")
_COLORS = {"exact": "#1f2933", "again": "#b8c1ca", "bf16": "#2b6cb0", "int8": "#c96a12", "fp8": "#2f855a"}


@dataclass(frozen=True)
class Run:
    """Hold the result of one training."""

    name: str
    losses: tuple[float, ...]  # of each step
    held_back: float  # the loss on text that is not trained on, after the last step
    sent_bytes: tuple[int, int]  # in a step: activations, gradients

    @property
    def loss(self) -> float:
        """Return the loss at the end of training: the mean over the last steps."""
        return statistics.fmean(self.losses[-LAST:])


def measure(work: Workload, steps: int) -> list[Run]:
    """Train with each kind of links."""
    with tempfile.TemporaryDirectory() as folder:
        spawn_ranks(rank_main, work.stages, work, steps, folder)
        first, last = (json.loads(Path(folder, f"{rank}.json").read_text()) for rank in (0, work.stages - 1))
    return [Run(name, tuple(of[0]), of[1], (of[2], back[2])) for name, of, back in zip(RUNS, first, last, strict=True)]


def rank_main(rank: int, rendezvous: str, work: Workload, steps: int, folder: str) -> None:
    """Train on one rank; leave losses and bytes in the folder."""
    prepare_rank(rank, work.stages, rendezvous)
    bar = progress_bar(rank, steps * len(RUNS), "training")
    told = []
    for slices, links in RUNS.values():
        told.append(_train(slices, links, work, steps, bar))
    bar.close()
    write_text(Path(folder) / f"{rank}.json", json.dumps(told))
    finish_rank([])


def _train(slices: int, links: dict[str, str], work: Workload, steps: int, bar: Any) -> tuple[list[float], float, int]:
    import torch.distributed as torch_dist

    section = {"enabled": True, "slices": slices, "granularity_tokens": 1, "links": links}
    settings = json.loads(_SETTINGS.read_text())
    engine = build_engine(section, work, ds_config={name: settings[name] for name in _TAKEN})
    training, held_back = _text(work)
    losses, sent, isend = [], [0], torch_dist.isend

    def counted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        sent[0] += tensor.nbytes
        return isend(tensor, *args, **kwargs)

    for step in range(steps):
        with mock.patch.object(torch_dist, "isend", counted if step == steps - 1 else isend):
            losses.append(float(engine.train_batch(training)))
        bar.update()
    evaluated = [float(engine.eval_batch(held_back)) for _ in range(_EVALUATIONS)]
    engine.destroy()
    return losses, statistics.fmean(evaluated), sent[0]


def _text(work: Workload) -> tuple[Iterator[Any], Iterator[Any]]:
    """Return random windows of text to train on, and of its last tenth, which is held back. A token is a byte."""
    import torch

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    whole = b"".join(path.read_bytes() for path in files)[:_TEXT_BYTES]
    cut = len(whole) * 9 // 10

    def windows(text: bytes, seed: int) -> Iterator[Any]:
        tokens, generator = torch.frombuffer(bytearray(text), dtype=torch.uint8), torch.Generator().manual_seed(seed)
        for _ in itertools.count():
            starts = torch.randint(len(text) - work.sequence_length, (work.micro_batch,), generator=generator)
            rows = torch.stack([tokens[start : start + work.sequence_length + 1] for start in starts.tolist()]).long()
            yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    return windows(whole[:cut], 0), windows(whole[cut:], 1)


def table(runs: Sequence[Run]) -> str:
    """Return a line per run; all shares are relative to the exact run."""
    exact = runs[0]
    lines = [f"{'links':<7}{'activations':>20}{'gradients':>20}{f'loss (last {LAST})':>22}{'held back':>20}"]
    for run in runs:
        pairs = [
            f"{1e-6 * own:.3f} MB ({own / whole:.3f})"
            for own, whole in zip(run.sent_bytes, exact.sent_bytes, strict=True)
        ]
        losses = [
            f"{own:.4f} ({own / whole - 1:+.2%})"
            for own, whole in ((run.loss, exact.loss), (run.held_back, exact.held_back))
        ]
        lines.append(f"{run.name:<7}{pairs[0]:>20}{pairs[1]:>20}{losses[0]:>22}{losses[1]:>20}")
    return "\n".join(lines)


def draw(runs: Sequence[Run], path: str) -> None:
    """Draw the loss curves: each smoothed over the last steps, and below it how far it is from the exact one."""
    from terapipe_ds.timeline.picture import save_figure

    def build() -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.0, 4.6), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        exact = _smooth(runs[0].losses)
        for run in runs:
            curve, steps = _smooth(run.losses), range(1, len(run.losses) + 1)
            above.plot(steps, curve, label=run.name, color=_COLORS[run.name], linewidth=1.2)
            off = [100 * (own / whole - 1) for own, whole in zip(curve, exact, strict=True)]
            below.plot(steps, off, color=_COLORS[run.name], linewidth=1.2)
        above.set_ylabel(f"loss, mean of {LAST} steps")
        above.legend(title="activations", frameon=False)
        below.set_ylabel("from exact, %")
        below.set_xlabel("step")
        return figure

    save_figure(build, path)


def _smooth(losses: Sequence[float]) -> list[float]:
    return [statistics.fmean(losses[max(0, stop - LAST) : stop]) for stop in range(1, len(losses) + 1)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table; the exit code is 1 where a loss ends more than 1 % above the exact one."""
    parser = study_parser("links", __doc__, writes="machine, sizes and all losses", examples=_EXAMPLES)
    parser.add_argument("--steps", type=int, default=200, help="of each training (default: %(default)s)")
    parser.add_argument("--picture", metavar="FILE", help="draw the loss curves here")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error(f"--steps {options.steps}: give at least 2, of which the first announces what is sent")
    raise SystemExit(run(options))


def run(options: argparse.Namespace) -> int:
    """Return the exit code."""
    this, runs = machine(), measure(WORK, options.steps)
    print(table(runs))
    if options.picture:
        draw(runs, options.picture)
    write_report(options.json, machine=this, work=asdict(WORK), steps=options.steps, runs=[asdict(run) for run in runs])
    exact = runs[0]
    return int(any(run.loss > 1.01 * exact.loss or run.held_back > 1.01 * exact.held_back for run in runs))


if __name__ == "__main__":
    main()
