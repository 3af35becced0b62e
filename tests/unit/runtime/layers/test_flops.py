"""Operations of a GPU are counted: on tensors without values, for there is no GPU."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from terapipe_ds.runtime.layers.flops import StageFlops, attention_formula
from terapipe_ds.schedule.action import Action, Kind

ATEN, ALONE = torch.ops.aten, lambda: 0
ROWS, TOKENS, PREFIX, HEADS, KV_HEADS, DIM = 2, 8, 24, 4, 2, 16
KEYS = PREFIX + TOKENS


def counted(run: Callable[[], Any]) -> int:
    """Return the operations that a stage counts in an F."""
    grid = SimpleNamespace(get_data_parallel_rank=ALONE, get_slice_parallel_rank=ALONE)
    engine = SimpleNamespace(grid=grid, flops_profiler_enabled=lambda: False)
    flops = StageFlops(engine, counts_first=True)  # type: ignore[arg-type]
    flops.open_batch(training=True, tokens=TOKENS)
    with flops.around(Action(Kind.FORWARD, 0, 0)):
        run()
    return flops.totals[Kind.FORWARD]


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class NothingRuns(TorchDispatchMode):
    """Return `out` of a call: torch 2.11 has no kernel without values for `addmm` with a dtype of its result."""

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return kwargs["out"] if kwargs and "out" in kwargs else call(*args, **(kwargs or {}))


def test_a_weight_gradient_that_adds_to_a_sum_in_fp32() -> None:
    total, rows, inputs = tensor(8, 16, dtype=torch.float32), tensor(TOKENS, 8), tensor(TOKENS, 16)
    product: Any = lambda: torch.addmm(total, rows.t(), inputs, out_dtype=torch.float32, out=total)  # noqa: E731
    with NothingRuns():
        assert counted(product) == 2 * TOKENS * 8 * 16


def scores(tokens: int, keys: int) -> int:
    """The operations of a product per score that a causal mask leaves, for all rows and heads."""
    return 2 * ROWS * HEADS * DIM * (tokens * keys - tokens * (tokens - 1) // 2)


def test_a_slice_after_others_by_the_kernel_of_torch() -> None:
    q, k, v = (tensor(ROWS, n, heads, DIM) for n, heads in ((TOKENS, HEADS), (KEYS, KV_HEADS), (KEYS, KV_HEADS)))
    lse, state = tensor(ROWS, HEADS, TOKENS, dtype=torch.float32), tensor(2, dtype=torch.uint64)
    sizes = None, None, TOKENS, KEYS, 0.0, True
    assert counted(lambda: ATEN._flash_attention_forward(q, k, v, *sizes, False)) == 2 * scores(TOKENS, KEYS)
    backward: Any = lambda: ATEN._flash_attention_backward(q, q, k, v, q, lse, *sizes, state, state)  # noqa: E731
    assert counted(backward) == 5 * scores(TOKENS, KEYS)


@pytest.mark.parametrize("name", ["cudnn", "efficient", "flash"])
def test_a_whole_sequence(name: str) -> None:
    q, k = tensor(ROWS, HEADS, TOKENS, DIM), tensor(ROWS, HEADS if name != "cudnn" else KV_HEADS, TOKENS, DIM)
    options = (0.0, True) if name == "flash" else (None, True, 0.0, True)
    kernel = getattr(ATEN, f"_scaled_dot_product_{name}_attention")
    assert counted(lambda: kernel(q, k, k, *options)) == 2 * scores(TOKENS, TOKENS)


def test_packed_documents_count_nothing() -> None:
    formula = attention_formula(ATEN._flash_attention_forward, 2, token_dim=1)
    assert formula((TOKENS, HEADS, DIM), (KEYS, KV_HEADS, DIM), (KEYS, KV_HEADS, DIM)) == 0


def test_a_function_that_torch_compiles_whole_is_counted() -> None:
    """The compiler refused it under the counter, and ever after."""
    compiled, x = torch.compile(lambda x: x @ x, backend="eager", fullgraph=True), torch.ones(4, 4)
    assert counted(lambda: compiled(x)) == 2 * 4**3
    assert torch.equal(compiled(x), x @ x)
