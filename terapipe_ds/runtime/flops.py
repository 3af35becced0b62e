"""DeepSpeed's flops profiler (``flops_profiler`` in its config) over slices and stages.

DeepSpeed 0.19.8 counts one forward of rank 0 and, with pipelines, never prints what it has counted. Here every stage of
the first replica counts the forwards of its layers on all slices of the first micro-batch of ``profile_step``: as many
operations as one forward of the whole micro-batch, but for attention, where a slice reads its prefix and not what comes
after it. Each stage prints its own profile after the step, in one piece; with ``output_file``, stage 0 writes that file
and stage k ``<output_file>.stage<k>``. (DeepSpeed switches ``wall_clock_breakdown`` on as well where the profiler is.)

DeepSpeed waits for the whole device before and after each module. Receives are posted ahead here, and one of them may
be for a gradient that follows from the very module: a hang over NCCL. So the times come from events of the current
stream, which are read after the step.
"""

from __future__ import annotations

import contextlib
import io
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.profiling.flops_profiler import profiler as ds_profiler
from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler
from torch import Tensor, nn

from terapipe_ds.attention import ActiveSlice
from terapipe_ds.attention.sliced import calls_measured_by
from terapipe_ds.files import write_text


class StageFlops(FlopsProfiler):
    """Takes the place of ``engine.flops_profiler``; the figures (``get_total_flops()`` and so on) are those of one
    micro-batch on this stage."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine.module, _WithoutTimers(engine), engine.flops_profiler_recompute_fwd_factor())
        self._engine = engine
        grid = engine.grid
        self._is_chosen = grid.get_data_parallel_rank() == 0 and grid.get_slice_parallel_rank() == 0
        self._clock = _ModuleClock()

    # -- counting ----------------------------------------------------------------------------------------------------

    def around(self, active: ActiveSlice) -> AbstractContextManager[None]:
        """Around the layers' forward on a slice."""
        is_counted = active.mode == "train" and active.micro_batch_id == 0 and self._is_due()
        return self._counting(active) if is_counted else nullcontext()

    def _is_due(self) -> bool:
        return self._is_chosen and bool(self._engine.global_steps == self._engine.flops_profiler_profile_step())

    @contextmanager
    def _counting(self, active: ActiveSlice) -> Iterator[None]:
        """Hooks and patched functions stay from the first slice to the last one, so that the counts add up."""
        if active.start == 0:
            self._stop()
            super().start_profile()
            self._clock.start(self.model.modules())
        try:
            with calls_measured_by(_counted):
                yield
        except BaseException:
            self.end_profile()
            raise
        if active.stop == active.sequence_length:
            self._stop()

    def _stop(self) -> None:
        super().stop_profile()

    def start_profile(self, ignore_list: Any = None) -> None:
        """DeepSpeed calls this in each forward of rank 0, and would begin from zero in each slice."""

    def stop_profile(self) -> None:
        """As ``start_profile``."""

    def end_profile(self) -> None:
        """Forget the counts and take all hooks away."""
        self._stop()
        super().end_profile()

    # -- printing ----------------------------------------------------------------------------------------------------

    @contextmanager
    def report(self) -> Iterator[None]:
        """Around the optimizer step: prints the profile after the step that is profiled."""
        is_due = self._is_due() and self.started
        yield
        if not is_due:
            return
        engine = self._engine
        self._clock.stop()
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            self.print_model_profile(
                profile_step=engine.global_steps,
                module_depth=engine.flops_profiler_module_depth(),
                top_modules=engine.flops_profiler_top_modules(),
                detailed=engine.flops_profiler_detailed(),
            )
        self.end_profile()
        heading = (
            f"\nstage {engine.stage_id} of {engine.num_stages} (rank {engine.global_rank}), the forward of one "
            "micro-batch in its slices:"
        )
        self._write(heading + printed.getvalue())

    def _write(self, text: str) -> None:
        path = self._engine.flops_profiler_output_file()
        if not path:
            print(text, flush=True)
            return
        stage_id = self._engine.stage_id
        target = Path(path if stage_id == 0 else f"{path}.stage{stage_id}")
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, text + "\n")


class _ModuleClock:
    """Times the forwards of modules in the place of DeepSpeed's hooks, into the attribute that those fill."""

    def __init__(self) -> None:
        self._spans: list[tuple[Any, Any, Any]] = []  # a module, when it began and when it was done

    def start(self, modules: Iterable[nn.Module]) -> None:
        """Take the hooks that wait for the device away; the profiler takes away those that replace them."""
        self._spans.clear()
        for module in modules:
            each: Any = module  # its attributes are the profiler's
            if hasattr(each, "__start_time_hook_handle__"):
                each.__start_time_hook_handle__.remove()
                each.__start_time_hook_handle__ = each.register_forward_pre_hook(self._begin)
                each.__end_time_hook_handle__.remove()
                each.__end_time_hook_handle__ = each.register_forward_hook(self._end)

    def _begin(self, module: Any, inputs: Any) -> None:
        module.__start_time__ = _mark()

    def _end(self, module: Any, inputs: Any, outputs: Any) -> None:
        self._spans.append((module, module.__start_time__, _mark()))

    def stop(self) -> None:
        """Read the times, when nothing is posted ahead."""
        for module, begin, end in self._spans:
            module.__duration__ += _seconds(begin, end)
        self._spans.clear()


def _mark() -> Any:
    """Return the time, or an event of the current stream where the device runs behind the host."""
    if get_accelerator().use_host_timers():
        return time.perf_counter()
    event = get_accelerator().Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


class _WithoutTimers:
    """An engine whose timers are not asked: they have seconds of all micro-batches, and the counts are of one."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def wall_clock_breakdown(self) -> bool:
        return False


@contextmanager
def _counted(q: Tensor, stop: int) -> Iterator[None]:
    """Count a call of sliced attention as DeepSpeed counts ``F.scaled_dot_product_attention``: q [B, H, T, D] with
    ``stop`` keys and values. What the kernel itself is made of is not counted again."""
    flops, macs = ds_profiler.module_flop_count, ds_profiler.module_mac_count
    flops.append([])
    macs.append([])
    try:
        yield
    finally:
        flops.pop()
        macs.pop()
    products = 2 * math.prod(q.shape) * stop  # Q K^T and P V
    if flops:
        flops[-1].append(("sliced_attention", 2 * products))
        macs[-1].append(("sliced_attention", products))


def stage_flops(engine: Any) -> StageFlops | None:
    """The profiler of this engine's stage in the place of DeepSpeed's, where the config asks for one."""
    if not engine.flops_profiler_enabled():
        return None
    engine.flops_profiler = StageFlops(engine)
    return engine.flops_profiler
