"""LayerNorm and RMSNorm in plain torch, as megatron-core's layer specs build norms.

megatron-core's own torch norm refuses sequence parallelism and zero-centred weights, its fused one needs NVIDIA apex on
a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn


class TorchNorm(nn.Module):
    """``config.normalization`` over the last dimension; same parameters' names as megatron-core's norms.

    The parameters carry ``sequence_parallel``: under sequence parallelism each tensor-parallel rank norms its own
    tokens, and the gradients are summed over the ranks once per batch.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        if config.normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"normalization={config.normalization!r}: give LayerNorm or RMSNorm")
        self.eps, self.hidden_size = eps, hidden_size
        self.zero_centered = config.layernorm_zero_centered_gamma
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        options = {"dtype": config.params_dtype, "device": device}
        self.weight = nn.Parameter((torch.zeros if self.zero_centered else torch.ones)(hidden_size, **options))
        self.bias = nn.Parameter(torch.zeros(hidden_size, **options)) if config.normalization == "LayerNorm" else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] -> the same."""
        weight = self.weight + 1 if self.zero_centered else self.weight
        if self.bias is None:
            return F.rms_norm(hidden, (self.hidden_size,), weight, self.eps)
        return F.layer_norm(hidden, (self.hidden_size,), weight, self.bias, self.eps)
