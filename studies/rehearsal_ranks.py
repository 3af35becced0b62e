"""Run engines whose layers sleep, for `studies.rehearsal`: a rank's program.

This module does not import torch: a rank sets its environment before it imports torch.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terapipe_ds.bench.ranks import finish_rank, prepare_rank, progress_bar
from terapipe_ds.files.atomic import write_text

if TYPE_CHECKING:
    from studies.rehearsal import Run

HIDDEN = 4


def rehearse(rank: int, rendezvous: str, runs: list[Run], steps: int, trace: str | None, out: str) -> None:
    """Measure the steps of all `runs` on every stage; rank 0 writes their seconds to `out`."""
    prepare_rank(rank, runs[0].num_stages, rendezvous, pin=False)
    times = []
    with progress_bar(rank, len(runs), f"{runs[0].num_stages} stages") as bar:
        for number, run in enumerate(runs):
            times.append(_measured(run, steps, trace and str(Path(trace) / f"{number}-{run.schedule}")))
            bar.update()
    if rank == 0:
        write_text(out, json.dumps(times))
    finish_rank([])


def _measured(run: Run, steps: int, trace: str | None) -> dict[str, float]:
    """Return the seconds of the median and of the shortest step; and of a step, summed over the ranks, the processor
    seconds and those in which a thread was ready to run and no core was free.
    """
    import torch
    import torch.distributed as torch_dist

    engine = _engine(run, trace)
    shape = run.num_rows, run.sequence_length, HIDDEN
    batch = torch.randn(shape), torch.zeros(shape)
    data = iter(lambda: batch, None)
    engine.train_batch(data)  # the first step opens connections
    seconds, begin = [], (time.process_time(), _waits_for_a_core_s())
    for _ in range(steps):
        torch_dist.barrier()
        begin_s = time.perf_counter()
        engine.train_batch(data)
        torch_dist.barrier()
        seconds.append(time.perf_counter() - begin_s)
    ends = torch.tensor((time.process_time(), _waits_for_a_core_s()), dtype=torch.float64)
    of_step = (ends - torch.tensor(begin, dtype=torch.float64)) / steps
    torch_dist.all_reduce(of_step)
    engine.destroy()
    times = {"step_s": statistics.median(seconds), "least_s": min(seconds)}
    return times | dict(zip(("processor_s", "core_waits_s"), of_step.tolist(), strict=True))


def _waits_for_a_core_s() -> float:
    """Return the seconds for which the threads of this process were ready to run and waited for a core, as Linux counts
    them (Documentation/scheduler/sched-stats.rst, the second number of /proc/<pid>/schedstat).
    """
    waits = (path.read_text().split()[1] for path in Path("/proc/self/task").glob("*/schedstat"))
    return sum(map(int, waits)) / 1e9


def _engine(run: Run, trace: str | None) -> Any:
    import deepspeed
    import torch
    from deepspeed.pipe import LayerSpec, PipelineModule

    import terapipe_ds

    torch.manual_seed(0)
    layers = [LayerSpec(_sleeper(), run.costs) for _ in range(run.num_layers)]
    module = PipelineModule(layers, num_stages=run.num_stages, loss_fn=torch.nn.MSELoss(), partition_method="uniform")
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": run.num_rows,
        "gradient_accumulation_steps": run.num_micro_batches,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    }
    initialize = deepspeed.initialize
    if run.schedule != "stock":
        initialize = terapipe_ds.initialize
        section = {"enabled": True, "schedule": run.schedule, "chunks_per_stage": run.chunks_per_stage}
        section |= {"slices": run.num_slices, "granularity_tokens": 1, "loss_reduction": "mean", "verify": "off"}
        settings["terapipe"] = section | ({} if trace is None else {"trace_dir": trace})
    return initialize(model=module, model_parameters=list(module.parameters()), config=settings)[0]


def _sleep() -> Any:
    """Return the function that sleeps for the seconds of F, of the whole backward and of W, in each of them."""
    import torch
    from torch import Tensor

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Tensor, weight: Tensor, keep: Any, seconds: tuple[float, float, float]) -> Tensor:
            ctx.save_for_backward(inputs, weight)
            ctx.keep, ctx.seconds = keep, seconds
            time.sleep(seconds[0])
            return inputs * weight.mean()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
            inputs, weight = ctx.saved_tensors
            _, backward_s, weight_s = ctx.seconds
            if ctx.keep is None:
                time.sleep(backward_s)
                return gradient * weight.mean(), torch.zeros_like(weight), None, None
            time.sleep(backward_s - weight_s)

            def sleep_in_w(rows: Tensor) -> Tensor:
                time.sleep(weight_s)
                return rows

            ctx.keep(gradient.flatten(0, -2).clone(), inputs.flatten(0, -2).clone(), sleep_in_w)
            return gradient * weight.mean(), None, None, None

    return Sleep


def _sleeper() -> Any:
    """Return the class of a layer that sleeps for the costs of a slice, and splits its backward like a linear layer."""
    import torch
    from torch import Tensor, nn

    from terapipe_ds.attention import active_slice

    sleep = _sleep()

    class Sleeper(nn.Module):
        slice_safe = True  # it attends to nothing

        def __init__(self, costs: Any) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(HIDDEN, HIDDEN))
            self.shift = nn.Parameter(torch.zeros(HIDDEN))
            self.costs, self.gradients = costs, None
            self.seconds: dict[tuple[int, int], tuple[float, float, float]] = {}

        def defer_weight_gradients(self, gradients: Any) -> None:
            self.gradients = gradients

        def forward(self, inputs: Tensor) -> Tensor:
            active, tokens, costs = active_slice(), inputs.shape[1], self.costs
            span = (tokens, active.start if active else 0)
            if span not in self.seconds:
                self.seconds[span] = costs.forward_s(*span), costs.backward_s(*span), costs.weight_s(*span)
            shifted = inputs + self.shift  # the inputs of the model need no gradient, and without one there is no W
            gradients: Any = self.gradients
            keep = gradients.taker(shifted, self.weight) if gradients is not None and gradients.splits_now() else None
            return sleep.apply(shifted, self.weight if keep is None else self.weight.detach(), keep, self.seconds[span])

    return Sleeper
