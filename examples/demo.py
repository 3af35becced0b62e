"""Train one GPT on one text twice, with DeepSpeed's stock schedule and in token slices, and compare.

    make demo            (or, in a finished environment: python examples/demo.py)

Two pipeline stages on two CPU cores, one micro-batch per step: the case in which a pipeline waits most. A
third, very short run measures where the time goes without slices, for the picture. All takes some three
minutes.

The demo's configs switch gradient clipping off (DeepSpeed's default is 1.0): over several stages its own engine
clips by a norm that lacks parameters, the sliced one by the norm of all, and the losses would rightly differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from metrics import draw_losses, read_metrics

from terapipe_ds.timeline import Timeline, timeline_file_name
from terapipe_ds.timeline.picture import draw_timelines

ROOT = Path(__file__).resolve().parents[1]
OUT = Path("out/demo")  # under ROOT; the runs work there
STAGES, SLICES = 2, 8
STEPS, WARM_UP_STEPS = 15, 5  # the first steps allocate memory, and those of the sliced run are traced
MODEL = ("--model", "mini", "--sequence-length", "2048", "--seed", "1234")
RUN_LIMIT_S = 600.0
# Rounding differs between the two, and training carries a difference on: equal at first, close later.
FIRST_STEPS, FIRST_TOLERANCE, LATER_TOLERANCE = 5, 1e-4, 1e-3


@dataclasses.dataclass(frozen=True)
class Run:
    """One launch of examples/train_gpt.py."""

    name: str
    config: Path
    steps: int = STEPS
    eval_every: int = 5
    eval_batches: int = 4

    @property
    def metrics(self) -> Path:
        return OUT / f"{self.name}.jsonl"

    def command(self) -> list[str]:
        launcher = Path(sys.executable).with_name("deepspeed")
        launch = [sys.executable, str(launcher), "--num_gpus", str(STAGES), "--master_port", str(free_port())]
        launch += ["--hostfile=", "--log_level", "error"]  # this machine alone, and little talk
        script = ["examples/train_gpt.py", "--deepspeed_config", str(self.config), *MODEL]
        script += ["--steps", str(self.steps), "--metrics", str(self.metrics)]
        script += ["--eval-every", str(self.eval_every), "--eval-batches", str(self.eval_batches)]
        return [*launch, *script, "--plot", str(OUT / f"{self.name}-loss.png")]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(run: Run) -> None:
    """Run it with its output shown as it comes; exit with its last lines where it fails."""
    print(f"\n=== {run.name}: {run.steps} steps with {run.config} ===", flush=True)
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    environment.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    process = subprocess.Popen(
        run.command(), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
    )
    assert process.stdout is not None
    limit = threading.Timer(RUN_LIMIT_S, process.send_signal, [signal.SIGINT])
    limit.start()
    output = b""
    try:
        while piece := process.stdout.read(4096):
            output = (output + piece)[-20_000:]
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
        code = process.wait()
    finally:
        limit.cancel()
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # the launcher ends its ranks
    if code != 0:
        lines = output.decode(errors="replace").replace("\r", "\n").splitlines()
        print(f"\ndemo: the {run.name} run failed with exit code {code}. Its last lines:", file=sys.stderr)
        print("\n".join(f"  | {line}" for line in lines[-40:] if line.strip()), file=sys.stderr)
        raise SystemExit(code if code > 0 else 1)


def unsliced_config() -> Path:
    """The sliced config with whole sequences: the stock order, run by the engine that can trace it."""
    config = json.loads(Path("configs/demo_sliced.json").read_text(encoding="utf-8"))
    config["terapipe"].update(schedule="1f1b", slices=1, trace_dir=str(OUT / "unsliced"))
    path = OUT / "unsliced.json"
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
    return path


def by_step(run: Run, key: str) -> dict[int, float]:
    return {entry["step"]: entry[key] for entry in read_metrics(run.metrics) if key in entry}


def compare_losses(stock: Run, sliced: Run) -> bool:
    """Print both loss by loss; True where they agree."""
    agree, largest = True, 0.0
    print(f"\n{'step':>16} {'stock':>11} {'sliced':>11}   relative difference")
    for key, label in (("loss", ""), ("validation_loss", "validation ")):
        expected, found = by_step(stock, key), by_step(sliced, key)
        agree &= bool(expected) and expected.keys() == found.keys()
        for step in sorted(expected.keys() & found.keys()):
            difference = abs(found[step] - expected[step]) / abs(expected[step])
            largest = max(largest, difference)
            limit = FIRST_TOLERANCE if step <= FIRST_STEPS else LATER_TOLERANCE
            remark = "" if difference <= limit else f"  more than {limit:.0e}"  # also where it is NaN
            agree &= not remark
            losses = f"{expected[step]:11.6f} {found[step]:11.6f}"
            print(f"{label + str(step):>16} {losses}   {difference:.1e}{remark}")
    print(f"the losses {'agree' if agree else 'DISAGREE'}: largest relative difference {largest:.1e}")
    return agree


def compare_speed(stock: Run, sliced: Run) -> None:
    def median_s(run: Run) -> float:
        return statistics.median(s for step, s in by_step(run, "seconds").items() if step > WARM_UP_STEPS)

    stock_s, sliced_s = median_s(stock), median_s(sliced)
    passes = SLICES + STAGES - 1  # of one slice each; K * s of them without overlap, for one micro-batch
    print(f"\nmedian seconds per step, from step {WARM_UP_STEPS + 1} on")
    print(f"  stock   {stock_s:.3f}")
    print(f"  sliced  {sliced_s:.3f}   {stock_s / sliced_s:.2f} times as fast")
    print(
        f"  bound           {STAGES * SLICES / passes:.2f} = {STAGES}*{SLICES}/{passes}: equal slices at no extra cost"
    )
    if len(os.sched_getaffinity(0)) < STAGES:
        print(f"  (this machine has fewer than {STAGES} cores: the stages share one, slices cannot help)")


def measured_timeline(trace_dir: Path) -> Timeline:
    """The traced step of median length, the first one left out."""
    timelines = []
    for step in range(2, STEPS + 1):
        files = [trace_dir / timeline_file_name(step, rank) for rank in range(STAGES)]
        if all(file.exists() for file in files):
            timelines.append(Timeline.merge(map(Timeline.load, files)))
    if not timelines:
        raise SystemExit(f"demo: no timelines in {trace_dir}")
    return sorted(timelines, key=lambda timeline: timeline.makespan_s)[(len(timelines) - 1) // 2]


def main() -> None:
    begin = time.perf_counter()
    os.chdir(ROOT)
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    stock = Run("stock", Path("configs/demo_stock.json"))
    sliced = Run("sliced", Path("configs/demo_sliced.json"))
    unsliced = Run("unsliced", unsliced_config(), steps=4, eval_every=0, eval_batches=1)
    for run in (stock, sliced, unsliced):
        launch(run)

    agree = compare_losses(stock, sliced)
    compare_speed(stock, sliced)
    runs = {"stock": read_metrics(stock.metrics), f"{SLICES} slices": read_metrics(sliced.metrics)}
    curves = draw_losses(OUT / "loss.png", runs, "GPT on the source of Python's library, two pipeline stages")
    picture = OUT / "timeline.png"
    draw_timelines(
        [
            ("One step, whole sequences (1F1B, the stock order)", measured_timeline(OUT / "unsliced")),
            (f"One step, {SLICES} slices (Seq1F1B)", measured_timeline(OUT / "sliced")),
        ],
        picture,
    )
    print(f"\nloss curves        {curves.resolve()}\nmeasured timeline  {picture.resolve()}")
    print(f"took {time.perf_counter() - begin:.0f} s")
    if not agree:
        raise SystemExit("demo: the losses of the two runs disagree, see the table")


if __name__ == "__main__":
    # No options; but --help, or an option that somebody hoped for, should not start minutes of training.
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
