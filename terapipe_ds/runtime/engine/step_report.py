"""Report the speed of training steps: to DeepSpeed's monitors after each, to the log after the 20th.

Before the first step the log gets its description and its predicted time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as torch_dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.costs.devices import peak_of_card
from terapipe_ds.messages import logger
from terapipe_ds.planner.result import Prediction
from terapipe_ds.runtime.batch.in_flight import BatchInFlight
from terapipe_ds.runtime.engine.part_runner import Stage
from terapipe_ds.runtime.engine.trace import Tracer
from terapipe_ds.runtime.failures.device_memory import allocator_retries
from terapipe_ds.runtime.links.groups import PipelineGroups
from terapipe_ds.runtime.log import Diagnostic
from terapipe_ds.runtime.verify.compare import multiplies_in_tf32
from terapipe_ds.schedule import Schedule
from terapipe_ds.schedule.placement import LOOPED
from terapipe_ds.schedule.show import many
from terapipe_ds.timeline import Timeline
from terapipe_ds.timeline.waits import exposed_comm_s

PREFIX = "Train/TeraPipe/"
_STEPS = 20  # after this many steps the log reports their speed; the first one, which warms up, does not count
_FAR = 0.15  # if a prediction is off by more, the measured costs no longer hold
_SLOWER = 0.95  # a log line names the way out where whole sequences take less than this share of the slices' time


@dataclass(frozen=True)
class Ran:
    """Describe a training step: its schedule, the tokens of all replicas, and its predicted time."""

    schedule: Schedule
    tokens: int
    predicted: Prediction | None


@dataclass(frozen=True)
class Took:
    """Hold the times of a step: the seconds of the whole step, and of its forwards and backwards."""

    tokens: int
    predicted: Prediction | None
    step_s: float
    pipeline_s: float


def step_figures(
    ran: Ran, step_s: float, timeline: Timeline | None, model_flops: float, peak_flops: float | None
) -> dict[str, float]:
    """Return the figures of a step for monitors, by name.

    Args:
        step_s: from the call of `train_batch` to its end.
        timeline: of the stages of one pipeline; None if they recorded none.
        model_flops: the operations that one pipeline needs for the step; 0: not known.
        peak_flops: of one device, in FLOP/s.
    """
    found = {"step_seconds": step_s, "tokens_per_second": ran.tokens / step_s}
    if timeline is not None and timeline.makespan_s > 0:
        pipeline_s, stages = timeline.makespan_s, timeline.num_stages
        found["pipeline_seconds"] = pipeline_s
        found["bubble"] = timeline.bubble_fraction
        found["exposed_communication"] = sum(exposed_comm_s(timeline, ran.schedule.placement)) / (stages * pipeline_s)
        if ran.predicted is not None:
            found["predicted_seconds"] = ran.predicted.predicted_s
            found["predicted_over_measured"] = ran.predicted.predicted_s / pipeline_s
        if model_flops and peak_flops:
            found["mfu"] = model_flops / (step_s * peak_flops * stages)
    return found


def device_figures(retries: int, host_share: float | None) -> dict[str, float]:
    """Return the figures of devices: retries of all stages in the step, and the share of batches by way of the host."""
    return {} if host_share is None else {"allocator_retries": retries, "host_share": host_share}


class StepReport:
    """Watch the training steps of one rank. Rank 0 writes the values, which are those of its own pipeline."""

    def __init__(self, engine: PipelineEngine, stage: Stage, groups: PipelineGroups, config: TeraPipeConfig) -> None:
        self._engine, self._stage, self._groups = engine, stage, groups
        self._is_first_rank = engine.global_rank == 0
        self._is_monitored = engine.monitor.enabled and 0 in groups.ranks
        self._peak_flops = peak_flops(engine, config) if self._is_monitored else None
        self._tracer = stage.tracer if isinstance(stage.tracer, Tracer) else None
        self._retries = allocator_retries()  # of the allocator, up to the end of the last step
        self._ran: Ran | None = None
        self._steps: list[Took] = []
        self._num_steps = 0
        self._writing = Diagnostic(f"{PREFIX}: a monitor cannot write")

    def begin(self, batch: BatchInFlight) -> None:
        """Keep the description of a training batch, and log the first one."""
        if not batch.training:
            return
        shapes = [one.shape for one in batch.micro_batches]
        tokens = sum(shape.rows * shape.length for shape in shapes) * self._groups.num_replicas
        self._ran = Ran(batch.schedule, tokens, batch.predicted)
        if not self._num_steps and self._is_first_rank:
            logger.info("%s", first_line(self._ran, len(shapes), self._groups.num_replicas))
            if self._is_monitored and self._peak_flops is None:
                logger.info("monitors: %smfu is left out, the peak is unknown: set terapipe.peak_tflops", PREFIX)

    def tell(self, step_s: float) -> None:
        """Report the speed of the training step that took `step_s`. A collective if monitors are enabled."""
        ran, self._ran = self._ran, None  # a schedule is large: none is kept here
        if ran is None:
            return
        found = self._gathered(ran) if self._is_monitored else None
        self._num_steps += 1
        if not self._is_first_rank:
            return
        pipeline_s = step_s - self._engine.closing_s
        if found is not None:
            timeline, model_flops, retries = found
            figures = step_figures(ran, step_s, timeline, model_flops, self._peak_flops)
            figures |= device_figures(retries, self._stage.links.host_share)
            pipeline_s = figures.get("pipeline_seconds", pipeline_s)
            with self._writing.attempt():
                at = self._engine.global_samples
                self._engine.monitor.write_events([(PREFIX + name, value, at) for name, value in figures.items()])
        if 1 < self._num_steps <= _STEPS:
            self._steps.append(Took(ran.tokens, ran.predicted, step_s, pipeline_s))
            if self._num_steps == _STEPS:
                logger.info("%s%s", after_steps(self._steps), of_device(self._stage.links.host_share))
                self._steps.clear()

    def _gathered(self, ran: Ran) -> tuple[Timeline | None, float, int] | None:
        """Bring the times of all stages to rank 0; None elsewhere. A collective over the stages."""
        now, before = allocator_retries(), self._retries
        self._retries = now
        flops = self._stage.flops
        model_flops = 0.0 if flops is None else flops.of_token() * ran.tokens / self._groups.num_replicas
        own = model_flops, now - before, None if self._tracer is None else self._tracer.last
        everyone = [own for _ in self._groups.ranks]
        if self._groups.control is not None:
            with self._stage.watchdog.waiting("the times of all stages for the monitors"):
                torch_dist.gather_object(own, everyone if self._is_first_rank else None, 0, self._groups.control)
        if not self._is_first_rank:
            return None
        flops_of_stages, retries, recorded = zip(*everyone, strict=True)
        events = [event for of_stage in recorded for event in of_stage or ()]
        timeline = Timeline(len(everyone), tuple(events)) if all(recorded) else None  # else a stage recorded nothing
        return timeline, sum(flops_of_stages), sum(retries)


def first_line(ran: Ran, num_micro_batches: int, num_replicas: int) -> str:
    schedule, counts = ran.schedule, sorted(set(ran.schedule.num_slices))
    slices = f"{counts[0]} to " * (counts[0] < counts[-1]) + many(counts[-1], "slice")
    micro_batches = many(num_micro_batches, "micro-batch")
    what = f"{schedule.name} on {many(schedule.num_stages, 'stage')}"
    if schedule.chunks_per_stage == 1 and schedule.name in LOOPED:
        what += ' of one part, which interleaves nothing ("chunks_per_stage": 2 makes two parts)'
    what += f", {micro_batches} of {slices}"
    what += f", {num_replicas} replicas" if num_replicas > 1 else ""
    return f"training runs {what}; {_expected(ran.predicted)}"


def _expected(predicted: Prediction | None) -> str:
    if predicted is None:
        costs = 'measured costs ("slices": "auto" or "schedule": "auto")'
        return f"no prediction: it needs {costs} and sequences of one planned length in a step"
    ratio = predicted.unsliced_s / predicted.predicted_s
    text = f"from first forward to last backward it should take {predicted.predicted_s:.3g} s"
    text += f", {ratio:.2f} times as fast as whole sequences"
    return text + '; "slices": "auto" chooses whole sequences where they are faster' * (ratio < _SLOWER)


def after_steps(steps: Sequence[Took]) -> str:
    """Return the log line after some steps; the first of them was the second step of the training."""
    seconds, rate = [step.step_s for step in steps], [step.tokens / step.step_s for step in steps]
    pipeline_s = statistics.median(step.pipeline_s for step in steps)
    text = (
        f"steps 2 to {len(steps) + 1}: median {statistics.median(seconds):.3g} s, {statistics.median(rate):,.0f} "
        f"tokens/s; {pipeline_s:.3g} s from first forward to last backward"
    )
    known = [(step.predicted, step.pipeline_s) for step in steps if step.predicted is not None]
    if not known:
        return text
    off = statistics.median(own_s / predicted.predicted_s for predicted, own_s in known) - 1
    text += f", {abs(off):.0%} {'more' if off > 0 else 'less'} than predicted"
    faster = statistics.median(predicted.unsliced_s / own_s for predicted, own_s in known)
    text += f", {faster:.2f} times as fast as whole sequences by prediction"
    if abs(off) > _FAR:
        text += (
            "; costs are not those that were measured: start again to measure anew (with planner.cache_dir, delete its "
            "profile first), or look at a step (trace_dir, terapipe timeline --against)"
        )
    return text


def of_device(host_share: float | None) -> str:
    """Return what the log line after some steps adds about the device of rank 0; empty without one."""
    if host_share is None:
        return ""
    return f"; messages of {host_share:.0%} of the batches by way of the host, {allocator_retries()} allocator retries"


def peak_flops(engine: PipelineEngine, config: TeraPipeConfig) -> float | None:
    """Return the peak of one device in FLOP/s: the config's, or its card's peak in the dtype of the training."""
    if config.peak_tflops is not None:
        return config.peak_tflops * 1e12
    if torch.device(engine.device).type != "cuda":
        return None
    return peak_of_card(torch.cuda.get_device_name(engine.device), _dtype_name(engine))


def _dtype_name(engine: PipelineEngine) -> str:
    if engine.torch_autocast_enabled():
        return {torch.bfloat16: "bf16", torch.float16: "fp16", None: "fp16"}.get(engine.torch_autocast_dtype(), "fp32")
    if engine.bfloat16_enabled() or engine.fp16_enabled():
        return "bf16" if engine.bfloat16_enabled() else "fp16"
    return "tf32" if multiplies_in_tf32() else "fp32"
