"""Let random operations return constants, so that a layer with dropout can be compared in training mode.

In evaluation mode a layer leaves out more than its dropout: batch statistics, auxiliary losses, noise, dropped layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class Draws(NamedTuple):
    """Hold how many numbers one forward drew at a time, in order, and the states of other generators that it moved.

    A size is 0 if the number does not tell whether a layer draws per token: integers are choices, or seeds.
    """

    sizes: tuple[int, ...]
    moved: tuple[bytes, ...]


class ConstantDraws(TorchDispatchMode):
    """Replace the draws of random operations; dropout keeps every number. Recomputed forwards and backwards do alike.

    Any dropout of rate p scales by 1 / (1 - p), inside a kernel as well: the whole and slices may run different ones.

    `unknown` names the operations that still draw. `numbers` gets what they would have drawn, if it is a list.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unknown: set[str] = set()
        self.numbers: list[Any] | None = None
        self._sizes: list[int] = []

    def __enter__(self) -> Any:
        # under such a mode torch's compiler would give up functions for good, and fail with `fullgraph`
        self._as_they_are = torch.compiler.set_stance("force_eager")
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._as_they_are.__exit__(*error)

    def take(self, before: Sequence[bytes], after: Sequence[bytes]) -> Draws:
        """Return the draws since the last call, with the changes in the states of other generators."""
        sizes, self._sizes = self._sizes, []
        moved = (new if new != old else b"" for old, new in zip(before, after, strict=True))
        return Draws(tuple(sizes), tuple(moved))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        names = [each.name for each in func._schema.arguments]  # noqa: SLF001  # operators have no other
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        # a kernel of attention draws only for its dropout
        if "dropout_p" in names:
            self._record(None)
            if (rate := arguments.get("dropout_p", 0.0)) == 0.0:
                return func(*args, **kwargs)
            self._sizes.append(0)
            return _attend_to_all(func, arguments, rate)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if name == "native_dropout":
            self._record(None)
            rate = arguments["p"] if arguments.get("train") is not False else 0.0
            self._sizes += [arguments["input"].numel()] * (arguments.get("train") is not False)
            out, mask = func(**{**arguments, "p": 0.0})
            return out * _scale(rate), mask  # as its backward does
        # the drawn tensor gives shape, dtype and device of the constant
        drawn = func(*args, **kwargs)
        self._record(drawn if drawn.is_floating_point() and "bernoulli" not in name else None)
        constant = _constant(name, drawn, args)
        if constant is None:
            self.unknown.add(name)
            return drawn
        self._sizes.append(drawn.numel() if drawn.is_floating_point() else 0)
        return constant

    def _record(self, drawn: Tensor | None) -> None:
        """Keep a copy of drawn numbers; for None, which may be equal by chance, keep what equals nothing else."""
        if self.numbers is not None:
            self.numbers.append(object() if drawn is None else drawn.clone())


def _scale(rate: float) -> float:
    return 1.0 / (1.0 - rate) if rate < 1.0 else 0.0


def _attend_to_all(func: Any, arguments: dict[str, Any], rate: float) -> Any:
    """Run the forward or the backward of an attention kernel as if its dropout had kept, and scaled, everything."""
    arguments = {**arguments, "dropout_p": 0.0}
    grad = next((each for each in ("grad_out", "grad_out_", "dout") if each in arguments), None)
    if grad is not None:  # of scale * out
        arguments[grad] = arguments[grad] * _scale(rate)
        if "out" in arguments:
            arguments["out"] = arguments["out"] / (_scale(rate) or 1.0)
        return func(**arguments)
    results = func(**arguments)
    if isinstance(results, tuple):
        return results[0] * _scale(rate), *results[1:]
    return results * _scale(rate) if isinstance(results, Tensor) else results  # a number chooses a kernel


def drawn_per_call(whole: Draws, slices: Sequence[Draws]) -> tuple[bool, bool]:
    """Return whether slices draw as many numbers as the whole by torch; or only by Python or NumPy, maybe for a log."""
    # a single slice always draws as often as the whole
    of_all = [whole, *slices] if len(slices) > 1 else []
    sizes = zip(*(draws.sizes for draws in of_all), strict=False)  # place by place: dropout may have several widths
    states = zip(*(draws.moved for draws in of_all), strict=True)
    by_torch, by_others = (any(each[0] and len(set(each)) == 1 for each in places) for places in (sizes, states))
    return by_torch, by_others and not by_torch  # both see a generator of torch's


def random_states(module: nn.Module) -> list[Tensor]:
    """Return the states of torch's generators, of the device and of the trackers of tensor parallelism."""
    trackers = [ds_checkpointing.get_cuda_rng_tracker(), *getattr(module, "rng_trackers", ())]
    states = [state for tracker in trackers for state in tracker.get_states().values() if torch.is_tensor(state)]
    return [state.cpu().clone() for state in (torch.get_rng_state(), get_accelerator().get_rng_state(), *states)]


def _constant(name: str, drawn: Tensor, args: Sequence[Any]) -> Tensor | None:
    """Fill `drawn` with a possible result of the operation; None if none is known."""
    name = name.rstrip("_").removesuffix("_like").removesuffix("_functional")
    if name in ("bernoulli", "exponential"):
        return drawn.fill_(1.0)
    if name in ("rand", "randn", "normal"):
        return drawn.fill_(0.5)
    if name == "uniform":
        bounds = [float(each) for each in args[1:3] if isinstance(each, (int, float))]
        return drawn.fill_(sum(bounds) / 2 if len(bounds) == 2 else 0.5)
    if name in ("randint", "random", "multinomial"):  # the least possible draw
        limits = [each for each in args if type(each) is int]
        return drawn.fill_(limits[0] if len(limits) > 1 else 0)
    return drawn.copy_(drawn.sort().values) if name == "randperm" else None
