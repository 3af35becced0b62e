"""Tell faults from rounding: run a layer in a wider dtype as well, and measure how much its own rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from terapipe_ds.runtime.batch.sliceable import as_tuple
from terapipe_ds.runtime.layers.untouched import stand_ins
from terapipe_ds.runtime.verify.compare import Difference, Tolerance, compare_kind, compare_parameters
from terapipe_ds.runtime.verify.layer import LayerCheck
from terapipe_ds.runtime.verify.tokens import Activations, PerSlice

_SCALES = (1.0, 1.1, 1.3, 1.7)  # of gradients by which rounding is measured: a single number may be right by luck


class PreciseLayerCheck(LayerCheck):
    """Check a layer, and allow it the rounding that is measured where that of its dtype is not enough."""

    def _beyond_rounding(self, difference: Difference) -> Difference | None:
        """Return a difference that is more than rounding; None where a wider dtype has none, and rounding explains it.

        Gradients may cancel out, and then what is left is mostly rounding. How much that is shows the whole sequence,
        in the layer's own dtype against the wider one. A layer that does not run in a wider one keeps its difference.
        """
        wide = wider(self._dtypes(()))
        if wide is None:
            return difference
        self._begin_anew()
        reference: LayerCheck | None = replace(self, inputs=cast(self.inputs, wide), autocast=nullcontext)
        try:
            with in_dtype(self.layer.module, wide):
                reference._keep()
                if reference._compare() is not None:
                    reference = None
        except Exception:
            reference = None
        if not all(self.slicing.ranks.exchange(reference is not None)):
            return difference
        for scale in _SCALES:
            self._measure(reference, scale)
        return self._compare_again(1.0)

    def _measure(self, reference: LayerCheck, scale: float) -> None:
        """Keep by how much rounding changes the results of the whole sequence, with gradients of this scale."""
        self._begin_anew()
        self.scale, self.outputs = scale, None
        whole, _, _, expected = self._whole()
        assert reference.outputs is not None
        exact, of_whole, floor = reference.outputs, self.slicing.whole(), Tolerance(0.0, self._tolerance(()).floor)
        results = [
            (f"output {index}", *(of_whole.joined(layout, [each]) for each in pair), layout)
            for index, (layout, *pair) in enumerate(
                zip(exact.layouts, as_tuple(whole[1], ""), exact.tensors, strict=True)
            )
        ]
        differences = [compare_kind(layout)(what, a, b, floor) for what, a, b, layout in results]
        if expected is not None and reference._expected is not None:
            scaled = (
                [each.double() / scale for each in expected[0]],
                {n: g.double() / scale for n, g in expected[1].items()},
            )
            differences += [
                compare_kind(layout)(f"input gradient {index}", a, b, floor)
                for index, (layout, a, b) in enumerate(
                    zip(self.inputs.layouts, scaled[0], reference._expected[0], strict=True)
                )
            ]
            differences += compare_parameters(scaled[1], reference._expected[1], floor, {})
        for each in filter(None, differences):
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

    layouts = tuple(
        PerSlice(tuple(map(wide, each.values))) if isinstance(each, PerSlice) else each for each in inputs.layouts
    )
    return replace(inputs, tensors=tuple(map(wide, inputs.tensors)), layouts=layouts)


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
