"""Record the computations, reduces and optimizer step of a rank, with wall clock and CPU time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from deepspeed.runtime.pipe import schedule as ds_schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.bench.metrics import Recorded
from terapipe_ds.runtime.engine.trace import Tracer, wait_for_computation
from terapipe_ds.schedule.action import Action, Kind

_RECORDED = {Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT, Kind.REDUCE_TIED_GRADS, Kind.REDUCE_GRADS, Kind.OPTIMIZER_STEP}


class Recorder:
    """Hold the events of one step. On an accelerator each recorded action is synchronised, so record separate steps."""

    def __init__(self) -> None:
        self.events: list[Recorded] = []
        self.listens = True
        self._start_s = self._start_cpu_s = 0.0

    def clear(self) -> None:
        self.events = []

    @contextmanager
    def span(self, kind: str, micro_batch_id: int = -1, slice_id: int = -1, chunk_id: int = 0) -> Iterator[None]:
        self.restart()
        yield
        if self.listens:
            wait_for_computation()
            cpu_s, end_s = time.process_time() - self._start_cpu_s, time.perf_counter()
            self.events.append(Recorded(kind, micro_batch_id, slice_id, chunk_id, self._start_s, end_s, cpu_s))

    def restart(self) -> None:
        """Let the open span begin now."""
        if self.listens:
            wait_for_computation()
            self._start_s, self._start_cpu_s = time.perf_counter(), time.process_time()

    @contextmanager
    def last_goes_on(self) -> Iterator[None]:
        """Count the body towards the event that ended last (a loss, towards the forward before it)."""
        start_cpu_s = time.process_time()
        yield
        if self.listens and self.events:
            wait_for_computation()
            last = self.events[-1]
            cpu_s = last.cpu_s + time.process_time() - start_cpu_s
            self.events[-1] = last._replace(end_s=time.perf_counter(), cpu_s=cpu_s)


class EngineRecorder(Recorder, Tracer):
    """Take the place of our engine's `Tracer`, which knows where a wait ends and the computation begins."""

    def begin(self, step: int | None) -> None:
        """Do nothing: the driver clears before each step."""

    @contextmanager
    def measure(self, action: Action) -> Iterator[None]:
        is_recorded, unit = action.kind in _RECORDED, (action.micro_batch_id, action.slice_id, action.chunk_id)
        with self.span(action.kind.value, *unit) if is_recorded else nullcontext():
            yield

    def input_is_here(self) -> None:
        """Let the computation begin: the wait for a message is over."""
        self.restart()

    def write(self, step: int) -> None:
        """Do nothing: no file is written within a timed step."""


_INSTRUCTIONS = {
    ds_schedule.ForwardPass: "F",
    ds_schedule.BackwardPass: "B",
    ds_schedule.ReduceTiedGrads: "RT",
    ds_schedule.ReduceGrads: "RD",
    ds_schedule.OptimizerStep: "ST",
}


class InstructionRecorder(Recorder):
    """Record the instructions of DeepSpeed's own engines. Micro-batches run through each phase first in, first out."""

    def __init__(self, engine: PipelineEngine) -> None:
        super().__init__()
        self._seen: Counter[tuple[str, int]] = Counter()
        known = type(engine)._INSTRUCTION_MAP
        wrapped = {kind: self._recorded(name, known[kind]) for kind, name in _INSTRUCTIONS.items()}
        engine._INSTRUCTION_MAP = {**known, **wrapped}  # of this one engine

    def clear(self) -> None:
        super().clear()
        self._seen.clear()

    def _recorded(self, kind: str, execute: Callable[..., Any]) -> Callable[..., Any]:
        def run(engine: PipelineEngine, **kwargs: Any) -> Any:
            unit: tuple[int, ...] = ()
            if kind in "FB":
                phase = kwargs.get("phase", 0)
                unit = self._seen[kind, phase], 0, phase
                self._seen[kind, phase] += 1
            with self.span(kind, *unit):
                return execute(engine, **kwargs)

        return run
