"""Made-up but plausible results of ``terapipe bench``: simulated steps with noise; and hand-made rows."""

from __future__ import annotations

import json
import random
import statistics
from typing import Any

from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import build
from terapipe_ds.simulator import simulate
from terapipe_ds.timeline import Timeline

LENGTH = 2048
MACHINE = {"cpu": "Example EPYC, 2 cores", "memory_gib": 16, "versions": {"torch": "2.13.0", "deepspeed": "0.19.8"}}
CLOSING_S = 0.05


class Costs:
    """Seconds on a slow core: linear work plus attention to the prefix; backward takes twice as long."""

    def __init__(self, per_token_s: float = 2.0e-4) -> None:
        self.per_token_s = per_token_s

    def forward_s(self, tokens: int, prefix: int) -> float:
        return 4e-4 + self.per_token_s * tokens * (1 + 1.2e-4 * (prefix + tokens / 2))

    def backward_s(self, tokens: int, prefix: int) -> float:
        return 2 * self.forward_s(tokens, prefix)

    def send_s(self, tokens: int) -> float:
        return 5e-7 * tokens


def row(system: str = "terapipe", schedule: str = "1f1b", accumulation: int = 1, **changes: Any) -> dict[str, Any]:
    """A hand-made run with every required key."""
    figures = {
        "system": system, "schedule": schedule, "slices": [LENGTH], "accumulation": accumulation, "stages": 2,
        "step_s": 2.0, "step_s_all": [1.9, 2.0, 2.1], "tokens_per_s": 1024.0, "bound_s": 1.8, "predicted_s": None,
        "bubble": 0.25, "peak_bytes": [3 * 2**30, 2 * 2**30], "exposed_comm_s": 0.01, "loss": 10.5,
    }  # fmt: skip
    return figures | changes


def result(*runs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A result with these runs."""
    return {"machine": MACHINE, "preset": "cpu-2stage", "runs": list(runs), **changes}


def failed(system: str, schedule: str, accumulation: int, why: str, stages: int = 2) -> dict[str, Any]:
    """A run that could not be made."""
    named = {"system": system, "schedule": schedule, "slices": [LENGTH], "accumulation": accumulation}
    return named | {"stages": stages, "error": why}


class Maker:
    """Simulated runs of one machine with a fixed seed."""

    def __init__(self, stages: int, replayed: bool = False, steps: int = 10) -> None:
        self.stages, self.replayed, self.steps = stages, replayed, steps
        self.noise = random.Random(7)

    def run(
        self,
        system: str,
        schedule: str,
        accumulation: int,
        lengths: tuple[int, ...],
        *,
        order: str | None = None,
        slowdown: float = 1.0,
        planned: bool = False,
        timeline: bool = True,
    ) -> dict[str, Any]:
        """A run whose step is that of ``order`` (default: ``schedule``), ``slowdown`` times as long."""
        costs = Costs(2.0e-4 * slowdown * 2 / self.stages)
        plan = SlicePlan(lengths)
        found = simulate(build(order or schedule, self.stages, accumulation, len(lengths)), plan, costs)
        predicted_s = found.makespan_s + CLOSING_S
        middle = predicted_s * self.noise.uniform(0.985, 1.035)
        steps = [middle * (1 + abs(self.noise.gauss(0, 0.012)) - 0.008) for _ in range(self.steps)]
        step_s = statistics.median(steps)
        live = found.peak_live_slices or (1,) * self.stages
        predicted = [int(1.1e9 + 2.2e8 * count * LENGTH / len(lengths) / 512) for count in live]
        unsliced_s = costs.forward_s(LENGTH, 0) + costs.backward_s(LENGTH, 0)
        units = accumulation * len(lengths)
        data: dict[str, Any] = {
            "system": system, "schedule": schedule, "slices": list(lengths), "accumulation": accumulation,
            "stages": self.stages, "step_s": step_s, "step_s_all": steps,
            "tokens_per_s": accumulation * LENGTH / step_s,
            "bound_s": accumulation * unsliced_s * (1 + (self.stages - 1) / units) + CLOSING_S,
            "predicted_s": predicted_s if system == "terapipe" else None, "bubble": found.bubble_fraction,
            "peak_bytes": [int(peak * self.noise.uniform(0.97, 1.06)) for peak in predicted],
            "exposed_comm_s": 0.004 * accumulation, "loss": 10.8431 + self.noise.uniform(-1, 1) * 1e-5,
        }  # fmt: skip
        if system == "terapipe":
            data |= {"planned": planned, "predicted_peak_bytes": predicted}
        if self.replayed:
            data |= {"replayed": True}
        if timeline and system != "torch":
            data |= {"timeline": measured(found).to_json()}
        return data


def measured(timeline: Timeline) -> Timeline:
    """Without what only a simulation knows; as text of JSON it is what a benchmark keeps."""
    return Timeline(timeline.num_stages, timeline.events, timeline.name)


def synthetic(stages: int = 2, accumulations: tuple[int, ...] = (1, 4, 8), *, replayed: bool = False) -> dict[str, Any]:
    """About ten runs per accumulation, with a failed one and a planned one."""
    maker = Maker(stages, replayed)
    runs = []
    planned = (448, 384, 320, 256, 256, 192, 192)
    for m in accumulations:
        runs += [
            maker.run("deepspeed", "1f1b", m, (LENGTH,), slowdown=1.01),
            maker.run("terapipe", "gpipe", m, (256,) * 8, slowdown=1.02),
            maker.run("terapipe", "1f1b", m, (LENGTH,)),
            *(maker.run("terapipe", "seq1f1b", m, (LENGTH // s,) * s) for s in (2, 4, 8, 16)),
            *(maker.run("terapipe", "terapipe", m, (LENGTH // s,) * s, timeline=s == 8) for s in (4, 8)),
            maker.run("terapipe", "seq1f1b", m, planned, planned=True),
            maker.run("torch", "gpipe", m, (LENGTH,), slowdown=1.04),
            maker.run("torch", "1f1b", m, (LENGTH,), slowdown=1.03),
        ]
        if m < 2 * stages:
            why = f"DualPipeV needs accumulation >= {2 * stages}, this is {m}"
            runs.append(failed("deepspeed", "dualpipev", m, why, stages))
    command = "terapipe bench --preset cpu-2stage --full --json result.json"
    return result(*runs, command=command, date="2026-11-21T12:00:00Z", sequence_length=LENGTH)


def as_written(data: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from a file."""
    found: dict[str, Any] = json.loads(json.dumps(data))
    return found
