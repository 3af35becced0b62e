"""DeepSpeed's flops profiler (``flops_profiler`` in its config) over slices and stages.

DeepSpeed 0.19.8 counts one forward of rank 0 and, with pipelines, never prints what it has counted. Here every stage of
the first replica counts the forwards of its layers on all slices of the first micro-batch of ``profile_step``: as many
operations as one forward of the whole micro-batch, but for attention, where a slice reads its prefix and not what comes
after it. Each stage prints its own profile after the step, in one piece; with ``output_file``, stage 0 writes that file
and stage k ``<output_file>.stage<k>``. (DeepSpeed switches ``wall_clock_breakdown`` on as well where the profiler is.)
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from deepspeed.profiling.flops_profiler import profiler as ds_profiler
from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler
from torch import Tensor

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
