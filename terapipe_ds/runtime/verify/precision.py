"""Tell faults from rounding: run a layer in a wider dtype as well, and measure the rounding of its own dtype."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from terapipe_ds.runtime.layers.untouched import stand_ins
from terapipe_ds.runtime.verify.compare import Difference, Tolerance, compare_results
from terapipe_ds.runtime.verify.layer import LayerCheck
from terapipe_ds.runtime.verify.tokens import Activations

logger = logging.getLogger("terapipe_ds")
_SCALES = (1.0, 1.1, 1.3, 1.7)  # of gradients by which rounding is measured: a single number may be right by luck


class PreciseLayerCheck(LayerCheck):
    """Check a layer; if the tolerance of its dtype is too small, allow as much as its measured rounding."""

    def _beyond_rounding(self, difference: Difference) -> Difference | None:
        """Return a difference that is more than rounding; None if a wider dtype has none, and rounding explains it.

        Gradients may cancel out, and then the rest is mostly rounding. The whole sequence shows the size of this
        rounding, in the layer's own dtype against the wider one. A layer that cannot run in a wider dtype keeps its
        difference.
        """
        # fp64 has no wider dtype: a difference there is a fault
        dtype = wider(self._dtypes(()))
        if dtype is None:
            return difference
        self._begin_anew()
        reference, agrees = replace(self, inputs=cast(self.inputs, dtype), autocast=nullcontext), False
        caught: Exception | None = None
        try:
            with in_dtype(self.layer.module, dtype):
                reference.keep()
                agrees = reference.compare_all() is None
        except Exception as error:  # kernels that know no other dtype, too little memory
            caught = error
            logger.debug("%s does not run in %s", self.layer, dtype, exc_info=True)
        # a tensor-parallel peer may wait in the layer for the rank that raised
        if self.slicing.ranks.trials.failure(caught, f"{self.layer} in {dtype}") is not None:
            return difference
        if not all(self.slicing.ranks.exchange(agrees)):
            return difference
        # the wider dtype shows no difference: measure how much of this difference is rounding
        for scale in _SCALES:
            self._measure(reference, scale)
        return self._compare_again(1.0)

    def _measure(self, reference: LayerCheck, scale: float) -> None:
        """Measure how much rounding changes the results of the whole sequence, with gradients of this scale."""
        assert reference.outputs is not None
        self._begin_anew()
        self._scale, self.outputs = scale, None
        run, *_ = self.run_whole()
        layouts, nothing = reference.outputs.layouts, Tolerance(0.0, self._tolerance(()).floor)
        results, expected = (
            {f"output {i}": self.slicing.whole().joined(layouts[i], [t.detach()]) for i, t in enumerate(outputs)}
            for outputs in (run.outputs, reference.outputs.tensors)
        )
        if self.gradients is not None and reference.gradients is not None:
            results |= {name: gradient.double() / scale for name, gradient in self.gradients.items()}
            expected |= reference.gradients
        by_token = self.names_by_token("output", reference.outputs)
        by_token |= self.names_by_token("input gradient", self.inputs)
        for each in compare_results(results, expected, nothing, by_token, {}, []):
            if math.isfinite(each.relative):
                self._rounding[each.what] = max(self._rounding.get(each.what, 0.0), each.relative)


def wider(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """Return the dtype in which a layer that computes with `dtypes` rounds much less; None for fp64."""
    dtypes = set(dtypes)
    if dtypes & {torch.float16, torch.bfloat16}:
        return torch.float32
    return torch.float64 if torch.float32 in dtypes else None


def cast(inputs: Activations, dtype: torch.dtype) -> Activations:
    """Return copies of the inputs with their floating numbers in `dtype`."""

    def wide(tensor: Tensor) -> Tensor:
        return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor

    return inputs.changed(wide)


@contextmanager
def in_dtype(module: nn.Module | None, dtype: torch.dtype) -> Iterator[None]:
    """Let parameters and buffers of `module` be copies in `dtype`; hooks of parameters stay."""
    module = nn.Module() if module is None else module
    buffers = [
        (part._buffers, name, buffer)
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and buffer.is_floating_point()
    ]
    with stand_ins(module, with_gradients=False, dtype=dtype):
        try:
            for owner, name, buffer in buffers:
                owner[name] = buffer.to(dtype)
            yield
        finally:
            for owner, name, buffer in buffers:
                owner[name] = buffer
