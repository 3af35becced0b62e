"""Transformer Engine's names and signatures as megatron-core uses them, computed by torch on one rank."""

import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import megatron.core.extensions.transformer_engine as installed
import pytest
import torch
import torch.nn.functional as F
from megatron.core import utils
from torch import Tensor, nn


class FP8GlobalStateManager:
    """Tell whether `fp8_autocast` is on, and with which recipe."""

    recipe: Any = None

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.recipe is not None


@contextmanager
def fp8_autocast(enabled: bool = True, fp8_recipe: Any = None, fp8_group: Any = None) -> Iterator[None]:
    before, FP8GlobalStateManager.recipe = FP8GlobalStateManager.recipe, fp8_recipe if enabled else None
    try:
        yield
    finally:
        FP8GlobalStateManager.recipe = before


class Linear(nn.Module):
    """`transformer_engine.pytorch.Linear` on one rank: all gradients in one backward."""

    def __init__(
        self, in_features: int, out_features: int, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1,
        get_rng_state_tracker: Any = None, rng_tracker_name: Any = None, init_method: Any = None, bias: bool = True,
        return_bias: bool = False, params_dtype: Any = None, parallel_mode: Any = None, device: Any = "cpu",
        **of_the_norm: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_features, self.out_features, self.use_bias, self.return_bias = (
            in_features,
            out_features,
            bias,
            return_bias,
        )
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.apply_bias = bias and not return_bias
        out_features //= tp_size if parallel_mode == "column" else 1
        in_features //= tp_size if parallel_mode == "row" else 1
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
        init_method(self.weight)
        self.bias = nn.Parameter(torch.randn(out_features, dtype=params_dtype)) if bias else torch.empty(0)
        self.calls: list[bool | None] = []

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        self.calls.append(is_first_microbatch)
        if FP8GlobalStateManager.is_fp8_enabled():
            out = FP8GlobalStateManager.recipe.product(inp, self.weight)
        else:
            out = F.linear(inp, self.weight)
        out = out + self.bias if self.apply_bias else out
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Linear):
    """`transformer_engine.pytorch.LayerNormLinear`, likewise."""

    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False, return_layernorm_output: bool = False, params_dtype: Any = None,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, params_dtype=params_dtype, **options)
        assert not return_layernorm_output
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.layer_norm_weight = nn.Parameter(torch.randn(in_features, dtype=params_dtype))
        is_rms = normalization == "RMSNorm"
        self.layer_norm_bias = None if is_rms else nn.Parameter(torch.randn(in_features, dtype=params_dtype))

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        gamma = self.layer_norm_weight.double() + (1 if self.zero_centered_gamma else 0)
        x = inp.double()
        if self.layer_norm_bias is None:
            normed = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * gamma
        else:
            centred = x - x.mean(-1, keepdim=True)
            normed = centred * (centred.square().mean(-1, keepdim=True) + self.eps).rsqrt() * gamma
            normed = normed + self.layer_norm_bias
        return super().forward(normed.to(inp.dtype), is_first_microbatch)


class BlockScaling:
    """Blocks of `size` numbers share a factor, along the dimension over which a product sums (e4m3)."""

    size = 32

    def __init__(self, fp8_format: Any = None) -> None:
        self.fp8_format = fp8_format

    def quantized(self, x: Tensor, dim: int) -> Tensor:
        length = x.shape[dim]
        blocks = F.pad(x.transpose(dim, -1), (0, -length % self.size)).unflatten(-1, (-1, self.size))
        factor = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448
        numbers = (blocks / factor).to(torch.float8_e4m3fn).to(x.dtype) * factor
        return numbers.flatten(-2)[..., :length].transpose(dim, -1)

    def product(self, inputs: Tensor, weight: Tensor) -> Tensor:
        return _Product.apply(inputs, weight, self)


class Float8BlockScaling(BlockScaling):
    size = 128


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, recipe: BlockScaling) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.recipe = recipe
        return recipe.quantized(inputs, -1) @ recipe.quantized(weight, 1).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (inputs, weight), scaled = ctx.saved_tensors, ctx.recipe.quantized
        rows, columns = (scaled(x.flatten(0, -2), 0) for x in (grad, inputs))
        return scaled(grad, -1) @ scaled(weight, 0), rows.t() @ columns, None


@contextmanager
def transformer_engine() -> Iterator[Any]:
    """Install the stand-in; yield megatron-core's module of layers, imported as with Transformer Engine 2.8."""
    named = types.SimpleNamespace
    pytorch: Any = types.ModuleType("transformer_engine.pytorch")
    pytorch.Linear, pytorch.LayerNormLinear, pytorch.fp8_autocast = Linear, LayerNormLinear, fp8_autocast
    pytorch.DotProductAttention = pytorch.GroupedLinear = nn.Module
    pytorch.distributed = named(CudaRNGStatesTracker=object)
    recipe = named(
        DelayedScaling=object, MXFP8BlockScaling=BlockScaling, Float8BlockScaling=Float8BlockScaling,
        Format=named(E4M3="e4m3", HYBRID="hybrid"),
    )  # fmt: skip
    fp8: Any = types.ModuleType("transformer_engine.pytorch.fp8")
    fp8.FP8GlobalStateManager, fp8.fp8_autocast = FP8GlobalStateManager, fp8_autocast
    package: Any = types.ModuleType("transformer_engine")
    package.pytorch, package.common, package.__version__ = pytorch, named(recipe=recipe), "1.8.0"
    modules = {module.__name__: module for module in (package, pytorch, fp8)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "_te_version", None)
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        spec = importlib.util.spec_from_file_location("megatron_with_transformer_engine", installed.__file__)
        assert spec is not None and spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        package.__version__, utils._te_version = "2.8.0", None
        yield loaded
