"""What megatron-core 0.16.1 asks of Transformer Engine where that is not installed, answered without it."""

from __future__ import annotations

import contextlib

from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils


class _NoFp8:
    """Transformer Engine's ``FP8GlobalStateManager`` where there is none."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def stand_in_for_transformer_engine() -> None:
    """Define the names that megatron-core uses although it could not import them.

    Its ``CheckpointWithoutOutput``, which recomputes norms and the activations of experts, takes fp8 to be asked for
    whenever its argument is not None, and the default is False. A router compares ``te_general_gemm`` with None.
    """
    if not hasattr(megatron_random, "FP8GlobalStateManager"):
        megatron_random.FP8GlobalStateManager = _NoFp8
        megatron_random.fp8_autocast = lambda **_: contextlib.nullcontext()
        megatron_random.activation_recompute_forward = lambda **_: contextlib.nullcontext()
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
