"""The core attention of megatron-core's self-attention, for token slices."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from terapipe_ds.attention import sliced_attention


class SlicedCoreAttention(MegatronModule):
    """What stands in ``self_attention.submodules.core_attention`` in the place of ``DotProductAttention``.

    Causal attention of a slice's queries to the slice and its prefix; heads are those of this tensor-parallel rank.
    Takes the constructor's arguments of megatron-core's own class; those that say nothing here are ignored.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if attention_type != "self":
            raise ValueError(f"sliced core attention is causal self-attention, got attention_type={attention_type!r}")
        self.layer_number = layer_number
        # config.apply_query_key_layer_scaling divides the scores by the layer number before the softmax kernel and
        # multiplies them again inside it, against overflow in fp16; a fused kernel has its scores in fp32
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.dropout_p = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """query [T, B, H, D], key and value [T, B, H_kv, D], of this rank's heads -> [T, B, H * D].

        Raises:
            ValueError: a mask, a bias or packed sequences were given: causal attention is all that slices can do.
        """
        given = {"attention_mask": attention_mask, "attention_bias": attention_bias,
                 "packed_seq_params": packed_seq_params}  # fmt: skip
        for name, argument in given.items():
            if argument is not None:
                raise ValueError(
                    f"{name} cannot be combined with token slices: attention is causal over the whole sequence. Leave "
                    f"{name} out"
                )
        q, k, v = (heads.permute(1, 2, 0, 3) for heads in (query, key, value))  # [B, H, T, D]
        dropout_p = self.dropout_p if self.training else 0.0
        with self._random_numbers(dropout_p):
            out = sliced_attention(q, k, v, layer=self.layer_number, scale=self.scale, dropout_p=dropout_p)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _random_numbers(self, dropout_p: float) -> Any:
        """Heads differ between tensor-parallel ranks, so dropout must as well. Under sequence parallelism the whole
        layer draws from the tracker's state already."""
        if dropout_p == 0.0 or self.config.sequence_parallel:
            return contextlib.nullcontext()
        return tensor_parallel.get_cuda_rng_tracker().fork()
