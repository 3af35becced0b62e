"""Transformer Engine's linear layers over two tensor-parallel ranks, W apart, against megatron-core's own layers."""

from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("megatron.core")

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig

from terapipe_ds.models.megatron import linears
from terapipe_ds.models.megatron.kernels import TorchNorm
from terapipe_ds.runtime.layers.weight_gradients import accumulate_in_products
from tests.distributed.harness import rank_pool
from tests.distributed.megatron_models import own_parallel_state
from tests.transformer_engine_stand_in import transformer_engine
from tests.unit.runtime.layers.split_cases import unit

UNITS = ((0, 0, 1), (0, 0, 0))
TOKENS, ROWS, WIDTH, INNER = 4, 2, 6, 8


class _Block(nn.Module):
    """A norm, a column-parallel and a row-parallel layer: Transformer Engine's, or megatron-core's own."""

    def __init__(self, engine: Any, config: TransformerConfig) -> None:
        super().__init__()
        init = {"config": config, "init_method": nn.init.normal_, "tp_group": dist.group.WORLD, "bias": True}
        init |= {"skip_bias_add": False, "is_expert": False}
        self.engine = engine is not None
        if engine is not None:
            self.up = engine.TELayerNormColumnParallelLinear(WIDTH, INNER, gather_output=False, **init)
            self.down = engine.TERowParallelLinear(INNER, WIDTH, input_is_parallel=True, **init)
        else:
            self.norm = TorchNorm(config, WIDTH, config.layernorm_epsilon)
            self.up = ColumnParallelLinear(WIDTH, INNER, gather_output=False, **init)
            self.down = RowParallelLinear(INNER, WIDTH, input_is_parallel=True, **init)

    def defer_weight_gradients(self, gradients: Any) -> None:
        linears.split_backwards(self, gradients)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden if self.engine else self.norm(hidden)
        out: torch.Tensor = self.down(torch.tanh(self.up(hidden)[0]))[0]
        return out

    def named(self) -> dict[str, nn.Parameter]:
        names = {"up.layer_norm_weight": "norm.weight", "up.layer_norm_bias": "norm.bias"}
        return {names.get(name, name): parameter for name, parameter in self.named_parameters()}


def job(shares_tokens: bool) -> tuple[list[str], float]:
    """Return the parameters whose gradients waited for W, and the largest error of all results."""
    rank = dist.get_rank()
    config = TransformerConfig(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=2, params_dtype=torch.float64,
        use_cpu_initialization=True, tensor_model_parallel_size=2, sequence_parallel=shares_tokens,
    )  # fmt: skip
    with own_parallel_state(tensor_model_parallel_size=2), transformer_engine() as module:
        ours, plain = _Block(module, config), _Block(None, config)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, parameter in sorted(plain.named().items()):  # split ones differ between the ranks
                drawn = torch.randn(2, *parameter.shape, generator=generator, dtype=torch.float64)
                is_split = name in ("up.weight", "up.bias", "down.weight")
                parameter.copy_(drawn[rank if is_split else 0])
                ours.named()[name].copy_(parameter)
        tokens = TOKENS // 2 if shares_tokens else TOKENS
        place = rank * tokens if shares_tokens else 0
        whole = torch.randn(2, TOKENS, ROWS, WIDTH, generator=generator, dtype=torch.float64)
        results: list[tuple[Any, Any]] = []
        with mock.patch.object(linears, "transformer_engine", module):
            gradients = accumulate_in_products(ours, None)
            gradients.open_batch(UNITS)
            for which, x in zip(UNITS, whole[:, place : place + tokens], strict=True):
                mine, theirs = (x.clone().requires_grad_() for _ in range(2))
                with unit(*which), gradients.deferred(which):
                    out = ours(mine)
                    out.square().sum().backward()
                expected = plain(theirs)
                expected.square().sum().backward()
                results += [(out, expected), (mine.grad, theirs.grad)]
            waits = sorted(name for name, p in ours.named().items() if p.grad is None)
            assert [gradients.compute(which, nullcontext) for which in UNITS] == [2, 2]
        assert not ours.up.calls and not ours.down.calls
        results += [(ours.named()[name].grad, parameter.grad) for name, parameter in plain.named().items()]
        return waits, max(float((a - b).norm() / b.norm()) for a, b in results)


@pytest.mark.parametrize("shares_tokens", [False, True], ids=["whole", "sequence parallel"])
def test_weight_gradients_in_w(shares_tokens: bool) -> None:
    for waits, error in rank_pool(2).run(job, shares_tokens=shares_tokens):
        assert waits == ["down.weight", "up.weight"] and np.isfinite(error) and error <= 1e-12
