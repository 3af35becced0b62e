"""Sum the gradients that tensor-parallel ranks share, and check that no sum was forgotten."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from terapipe_ds.attention import active_slice
from terapipe_ds.messages import in_short

K = TypeVar("K")
T = TypeVar("T")
Parameters = Mapping[str, nn.Parameter]

_LARGEST_DIFFERENCE = 1e-3  # relative; equal computations on equal ranks give equal numbers, forgotten sums differ by 1


class ReplicatedGradientError(RuntimeError):
    """Report different gradients on tensor-parallel ranks for a parameter that each rank keeps a copy of."""


class SummedGradient(torch.autograd.Function):
    """Return x, and sum its gradient over the ranks of a group.

    The functions of megatron-core and DeepSpeed for it lose the sum if a gradient is not contiguous.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous()  # nothing else reads the gradient of this view
        torch_dist.all_reduce(total, group=ctx.group)
        return total, None


def is_split(parameter: Tensor) -> bool:
    """Return whether each tensor-parallel rank has a part of the parameter; otherwise each has a copy."""
    return bool(getattr(parameter, "tensor_model_parallel", False))  # the mark that DeepSpeed's norm reads


def of_all_stages(here: Mapping[K, T], grid: PipelineParallelGrid) -> dict[K, T]:
    """Return the entries of all stages, gathered over the pipeline from the entries of each stage."""
    stages = [here] * grid.get_pipe_parallel_world_size()
    if len(stages) > 1:
        torch_dist.all_gather_object(stages, here, group=grid.get_pipe_parallel_group())
    return {name: value for stage in stages for name, value in stage.items()}


def gradient_reader(optimizer: Any) -> Callable[[nn.Parameter], Tensor | None]:
    """Return a function from a parameter to the gradient that DeepSpeed's `optimizer` will read, or None.

    Other attributes of the parameter are stale or empty. Raises TypeError where the optimizer keeps them elsewhere.
    """
    if isinstance(optimizer, BF16_Optimizer):
        buffers = (optimizer.bf16_groups, optimizer.fp32_groups_gradients, optimizer.fp32_groups_has_gradients)
        rows = (row for group in zip(*buffers, strict=True) for row in zip(*group, strict=True))
        return {parameter: gradient for parameter, gradient, has_one in rows if has_one}.get
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        name = "grad_accum" if optimizer.use_grad_accum_attribute else "grad"
        return lambda parameter: getattr(parameter, name, None)
    if isinstance(optimizer, ZeROOptimizer):
        problem = f"{type(optimizer).__name__} keeps gradients in a place of its own"
        raise TypeError(f"{problem}, so tensor-parallel ranks cannot sum them. Use ZeRO stage 0 or 1")
    return lambda parameter: parameter.grad


class TensorParallelModule(PipelineModule):
    """Be a module whose tensor-parallel ranks sum gradients: only an engine that calls `before_reduce` may train it."""

    autotp_size = 1  # tensor-parallel ranks, by DeepSpeed's name
    are_compared = False  # the gradients of some batch
    refusal: type[ValueError]

    def forward(self, forward_input: Any) -> Any:
        """Run the layers of this stage. Raises `refusal` if DeepSpeed's own engine trains several ranks."""
        if self.autotp_size > 1 and self.training and torch.is_grad_enabled() and active_slice() is None:
            raise self.refusal(
                "with tensor parallelism, DeepSpeed's own engine would not sum gradients over tensor-parallel ranks, "
                "nor hand sequence-parallel activations on whole: enable the terapipe section of the config "
                '({"enabled": true, "slices": 1, "schedule": "1f1b"} for whole sequences), and call '
                "terapipe_ds.initialize() or launch with --module terapipe_ds.run"
            )
        return super().forward(forward_input)

    def complete_gradients(self, partial: Collection[str], optimizer: Any, group: Any, advice: str) -> None:
        """Sum `partial` gradients over tensor-parallel ranks; compare all others that each rank has, until it could.

        Call it once per batch, after its last backward. For `advice` and errors see `sum_gradients` and
        `require_equal_gradients`.
        """
        trained = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        sum_gradients({name: parameter for name, parameter in trained.items() if name in partial}, optimizer, group)
        replicated = {name: parameter for name, parameter in trained.items() if not is_split(parameter)}
        self.are_compared = self.are_compared or require_equal_gradients(replicated, optimizer, group, advice)


def sum_gradients(partial: Parameters, optimizer: Any, group: Any) -> None:
    """Sum the gradients of some parameters over the ranks, in place.

    Raises:
        RuntimeError: a parameter has no gradient where `optimizer` reads it, and would be left out of the sum.
    """
    # where the optimizer reads them, which is not `.grad` with bf16 or ZeRO
    gradients = dict(zip(partial, map(gradient_reader(optimizer), partial.values()), strict=True))
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients.values():
        if gradient is not None:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
    if missing := [name for name, gradient in gradients.items() if gradient is None]:
        raise RuntimeError(
            f"of {len(partial)} parameters whose gradients must be summed over tensor-parallel ranks {len(missing)} "
            f"have none where {type(optimizer).__name__} reads it: {in_short(missing)}. Set requires_grad_(False) on "
            "what is not trained"
        )
    for same in by_dtype.values():  # one collective for each dtype
        flat = torch.cat([gradient.flatten() for gradient in same])
        torch_dist.all_reduce(flat, group=group)
        for gradient, total in zip(same, flat.split([gradient.numel() for gradient in same]), strict=True):
            gradient.copy_(total.view_as(gradient))


def require_equal_gradients(replicated: Parameters, optimizer: Any, group: Any, advice: str) -> bool:
    """Compare the gradients of replicated parameters over tensor-parallel ranks; a collective over `group`.

    `advice` ends the message of the error.

    Returns:
        False if nothing could be compared: some gradient is not finite, as in the first batches of fp16.

    Raises:
        ReplicatedGradientError: on all of these ranks, with the parameters that differ.
    """
    # norm and sum of each in one small collective, and not the gradients themselves
    if not replicated:
        return True
    gradients = list(map(gradient_reader(optimizer), replicated.values()))
    device = next(iter(replicated.values())).device
    zero = torch.zeros((), dtype=torch.float32, device=device)
    floats = [zero if g is None else g.float() for g in gradients]
    here = torch.stack([g.norm() for g in floats] + [g.sum() for g in floats])
    # all ranks get all numbers, so that all of them raise
    everyone = [torch.empty_like(here) for _ in range(torch_dist.get_world_size(group))]
    torch_dist.all_gather(everyone, here, group=group)
    if not all(torch.isfinite(row).all() for row in everyone):
        return False
    norms, sums = torch.stack(everyone).unflatten(1, (2, -1)).unbind(1)  # [ranks, parameters]
    scale = norms.amax(dim=0).clamp_min(1e-30)
    apart = ((norms - norms[0]).abs() + (sums - sums[0]).abs()) / scale
    # a sum of n numbers has an error of its own; different gradients differ by 1 for any n
    shares = [min(_LARGEST_DIFFERENCE * p.numel() ** 0.5, 0.1) for p in replicated.values()]
    limits = torch.tensor(shares, device=device)
    wrong = (apart.amax(dim=0) > limits).tolist()
    names = [name for name, is_wrong in zip(replicated, wrong, strict=True) if is_wrong]
    if names:
        raise ReplicatedGradientError(
            f"tensor-parallel ranks {torch_dist.get_process_group_ranks(group)} have different gradients for "
            f"{len(names)} of {len(replicated)} parameters that each rank keeps a copy of: {in_short(names)}. "
            f"{advice}"
        )
    return True
