"""Test how gradients come to the sums of an optimizer: on CUDA small ones share two kernels, whatever their number."""

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from terapipe_ds.runtime.layers import gradient_sums
from terapipe_ds.runtime.layers.gradient_sums import OwnSums, _add_all

SIZES = (3, 5, 8, 40)


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.tensors: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "aten" and "foreach" in function.__name__:
            self.tensors[f"{function.__name__} {args[1][0].dtype}"] += len(args[0])
        return function(*args, **(kwargs or {}))


def test_small_gradients_are_converted_in_one_kernel_on_cuda(monkeypatch: Any) -> None:
    monkeypatch.setattr(gradient_sums, "_SMALL", 10)
    with FakeTensorMode(), Calls() as calls:
        totals = [torch.empty(size, device="cuda") for size in (*SIZES, 6)]
        _add_all(totals, [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in SIZES] + [totals[-1] * 2])
    # nothing converts the large one, and the last, which has the dtype of its sum
    copied, added = "_foreach_copy_.default torch.bfloat16", "_foreach_add_.List torch.float32"
    assert calls.tensors == {copied: 3, added: 3, "_foreach_add_.List torch.bfloat16": 2}


def test_the_sums_are_those_of_one_addition_each(monkeypatch: Any) -> None:
    """A conversion to a wider dtype is exact, so that the kernels may be tried on a CPU."""
    torch.manual_seed(0)
    totals, gradients = [torch.randn(size) for size in SIZES], [torch.randn(size).bfloat16() for size in SIZES]
    expected = [total + gradient.float() for total, gradient in zip(totals, gradients, strict=True)]
    with Calls() as calls:
        _add_all(totals, gradients)
    assert all(map(torch.equal, totals, expected)) and list(calls.tensors.values()) == [len(SIZES)]
    _add_all([], [])


def test_a_slice_without_rows_leaves_zeros_and_a_bias_is_summed_in_the_dtype_of_the_sum() -> None:
    """An optimizer leaves out what had no gradient: replicas without labels would reduce other gradients."""
    layer, rows = nn.Linear(3, 4, dtype=torch.bfloat16), torch.randn(64, 4).bfloat16()
    sums = OwnSums(layer)
    assert sums.so_far(layer.weight) is None
    sums.add(layer.weight, rows[:0], rows[:0, :3])
    assert sums.so_far(layer.weight).tolist() == [[0.0] * 3] * 4
    sums.add_bias(layer.bias, rows)
    torch.testing.assert_close(sums.so_far(layer.bias), rows.double().sum(dim=0).float())
