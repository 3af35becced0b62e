"""Define the interface of every competitor of a benchmark, and have all compute attention by one kernel."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from terapipe_ds.attention import set_backend
from terapipe_ds.attention.backends import available_backends, backend_name
from terapipe_ds.bench.drivers.recorder import Recorder
from terapipe_ds.bench.metrics import Plans
from terapipe_ds.schedule import Schedule, from_csv
from terapipe_ds.schedule.placement import Placement

# Attributes of DeepSpeed's optimizers that hold flat tensors: two of BF16_Optimizer, then FP16_Optimizer and ZeRO 1.
_COPIES = "fp32_groups_flat_partition fp32_groups_gradients_flat fp32_groups_flat single_partition_of_fp32_groups"
_TORCHS_NAMES = {"flash_attn_3": "FA3", "flash_attn_4": "FA4"}
"""How torch calls the flash-attn packages that can take the place of its own kernel."""

MicroBatches = Sequence[tuple[Tensor, Tensor]]


class Driver:
    """Drive one competitor on one rank. Every rank calls the same methods in the same order."""

    recorder: Recorder
    optimizer: Any
    scheduler: Any = None  # of learning rates, if there is one
    fewest = 1  # micro-batches of a step

    def prepare(self, accumulation: int, plans: Plans, schedule: str | None = None) -> None:
        """Set the micro-batches of the next steps, the slices of each and, if there is a choice, their order."""
        raise NotImplementedError

    def step(self, micro_batches: MicroBatches) -> float | None:
        """Make one optimizer step; return the mean loss of its micro-batches, on ranks that know it."""
        raise NotImplementedError

    def schedule(self, accumulation: int, plans: Plans) -> Schedule:
        """Return the order in which the driver runs, as one of our schedules."""
        raise NotImplementedError

    def parameters(self) -> Sequence[Tensor]:
        raise NotImplementedError

    def forget(self) -> None:
        """Drop everything that earlier steps have left for the next one, except parameters and optimizer states."""

    def destroy(self) -> None:
        """Free everything that the driver holds."""

    def remember_start(self) -> None:
        """Keep parameters, the options and loss scale of the optimizer, and the scheduler, for `restart`."""
        self._start = [parameter.detach().to("cpu", copy=True) for parameter in self.parameters()]
        scalers = [getattr(self.optimizer, name, None) for name in ("loss_scaler", "loss_scale_config")]
        options = [*self.optimizer.param_groups, *(vars(scaler) for scaler in scalers if scaler is not None)]
        self._start_options = [(each, {name: each[name] for name in each if name != "params"}) for each in options]
        self._start_rates = None if self.scheduler is None else copy.deepcopy(self.scheduler.state_dict())

    def restart(self) -> None:
        """Set parameters, optimizer and scheduler back to the start: systems have made different numbers of steps."""
        with torch.no_grad():
            for parameter, start in zip(self.parameters(), self._start, strict=True):
                parameter.copy_(start)
            for tensor in self.states():
                tensor.zero_()
        for state in self.optimizer.state.values():  # DeepSpeed's own Adam counts its steps by ints
            state |= {name: 0 for name, value in state.items() if type(value) is int}
        for options, start_options in self._start_options:
            options |= start_options
        if self.scheduler is not None:
            self.scheduler.load_state_dict(copy.deepcopy(self._start_rates))
        refresh = getattr(self.optimizer, "refresh_fp32_params", None)
        if refresh is not None:  # the optimizers of DeepSpeed that keep weights of their own
            refresh()

    def states(self) -> list[Tensor]:
        return [t for state in self.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]

    def copies(self) -> list[Tensor]:
        """Return the optimizer's other tensors: weights in fp32, and gradients summed in fp32."""
        return [t for name in _COPIES.split() for t in getattr(self.optimizer, name, ())]

    def held_bytes(self) -> int:
        """Return the bytes of parameters, existing gradients, optimizer states, and the optimizer's copies."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        held = (*self.parameters(), *gradients, *self.states(), *self.copies())
        return sum(t.numel() * t.element_size() for t in held)


def schedule_of(name: str, orders: Sequence[Sequence[str]], placement: Placement) -> Schedule:
    """Return a schedule from the texts of its computations (`F0.0c1`), stage by stage."""
    chunks = range(len(placement) // len(orders))
    parts = ("/".join(str(placement[stage_id, chunk_id]) for chunk_id in chunks) for stage_id in range(len(orders)))
    return from_csv("\n".join(map(",".join, [("placement", *parts), *orders])), name)


@contextmanager
def one_attention(device: str, dtype: torch.dtype, head_dim: int) -> Iterator[str]:
    """Have one kernel compute the attention of slices and of whole sequences inside; yield its name.

    Torch may choose another kernel for whole sequences than for slices: their ratio would compare kernels rather than
    slices. Torch's FlashAttention kernel stands for flash-attn 2, which is the same. On CPUs there is one fused kernel.
    If no fused kernel takes the slices (fp32, or a device that has none), torch chooses the kernel for whole sequences,
    and the name says so.
    """
    has_kernel = dtype in (torch.bfloat16, torch.float16) and "cuda_flash" in available_backends()
    has_kernel = has_kernel and torch.backends.cuda.is_flash_attention_available()  # builds for some systems lack it
    if device == "cpu":
        yield backend_name(torch.empty(1, 1, 1, head_dim, dtype=dtype))
    elif has_kernel and head_dim % 8 == 0 and head_dim <= 256:
        by_torch = _TORCHS_NAMES if hasattr(attention, "restore_flash_attention_impl") else ()
        name, others = "cuda_flash", {"cudnn", *by_torch} & {*available_backends()}
        if others:  # and where one of them is the fastest
            chosen = backend_name(torch.empty(1, 16, 1, head_dim, dtype=dtype, device=device))
            name = chosen if chosen in others else name
        set_backend(name)
        try:
            kind = SDPBackend.CUDNN_ATTENTION if name == "cudnn" else SDPBackend.FLASH_ATTENTION
            with ExitStack() as stack, sdpa_kernel(kind):
                if name in _TORCHS_NAMES:  # torch computes whole sequences by that package
                    stack.callback(attention.restore_flash_attention_impl)
                    attention.activate_flash_attention_impl(_TORCHS_NAMES[name])
                yield name
        finally:
            set_backend(None)
    else:
        yield "reference for slices, torch's choice for whole sequences"
