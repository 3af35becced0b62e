"""Route attention in transformers' models to `sliced_attention`, by the attention and mask interfaces under one name.

A model calls the mask interface for a mask before its layers run, and the attention interface in each layer. Ours
returns a `Pattern` instead of a mask: it states, without a tensor, which tokens see which by the model's mask function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from terapipe_ds.attention import sliced_attention
from terapipe_ds.compat.replaced import packages_of
from terapipe_ds.models.hugging_face.forward.cache import name_of
from terapipe_ds.models.hugging_face.refusals import ModelRefusedError

NAME = "terapipe"  # of the implementation, as `config._attn_implementation` has it
_FAR = 2**40  # a place that no sequence reaches

# Further arguments that models hand to their attention: none of them changes the result here.
_NAMES_WITHOUT_EFFECT = """
    position_ids position_embeddings use_cache cache cache_position past_key_values past_key_value output_attentions
    output_hidden_states output_router_logits return_dict head_mask layer_idx is_training training
"""
_WITHOUT_EFFECT = frozenset(_NAMES_WITHOUT_EFFECT.split())


def own_attentions(model: PreTrainedModel) -> list[str]:
    """Return the attentions that the owner's model may run: the requested one, or all that its class has.

    A request is "eager", or a function that the owner has registered.
    """
    name = getattr(model.config.get_text_config(), "_attn_implementation", None) or ""
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    is_known = function is None or packages_of(function) <= {"transformers", "torch", "terapipe_ds"}
    if name == "eager" or not is_known:
        return [name]
    return ["eager", "sdpa"] if model._supports_sdpa else ["eager"]


@dataclass(frozen=True)
class Pattern:
    """State which tokens see which: each sees the `window` tokens up to itself, or all of them, in its own document.

    `problem` says why neither is right; attending by the pattern then raises it.
    """

    window: int | None
    problem: str = ""

    def __getattr__(self, name: str) -> Any:
        raise ModelRefusedError(f"its attention reads the mask itself (mask.{name})")

    def __getitem__(self, _: Any) -> Any:
        raise ModelRefusedError("its attention reads the mask itself")


def pattern_of_mask(
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **_: Any,
) -> Pattern:
    """Return the pattern that a model asks for, instead of its mask."""
    if attention_mask is not None and not bool(attention_mask.all()):
        return Pattern(None, "it masks padding")

    first = 0 if local_size is None else _FAR - local_size + 1
    seen = [(_FAR, _FAR), (_FAR, first)]
    hidden = [(_FAR, _FAR + 1), (0, 1), *((_FAR, key) for key in (first - 1, 0) if first)]
    # one call for all places, on the host: a read of a device's tensor would wait for its receives
    queries, keys = torch.tensor([*seen, *hidden], device="cpu").unbind(1)
    sees = mask_function(torch.zeros_like(queries), torch.zeros_like(queries), queries, keys).expand_as(queries)
    if sees.tolist() != [True] * len(seen) + [False] * len(hidden):
        return Pattern(None, "its mask is neither causal nor causal in a window of fixed length")
    return Pattern(local_size)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Pattern | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as the attention interface of transformers asks; returns [B, T, H, D].

    Raises ModelRefusedError if the model asks for an option that sliced attention lacks.
    """
    # an argument that nobody knows may change the result: it is refused, not dropped
    unknown = sorted(name for name, value in others.items() if value is not None and name not in _WITHOUT_EFFECT)
    if unknown:
        raise ModelRefusedError(f"its attention asks for {', '.join(unknown)}")
    if not is_causal and getattr(module, "is_causal", True) is False:  # GPT-2 says False where a mask says all
        raise ModelRefusedError("its attention is not causal")
    if not isinstance(attention_mask, Pattern):
        raise ModelRefusedError(f"it makes a mask of its own, a {type(attention_mask).__name__}")
    if attention_mask.problem:
        raise ModelRefusedError(attention_mask.problem)
    # a mask and an attention that disagree are a mistake of the family or of this file
    window = attention_mask.window
    if sliding_window is not None and sliding_window != window:
        raise ModelRefusedError(f"its mask has a window of {window}, and its attention one of {sliding_window}")
    # a graph is for all layers, whose own names it gets when it runs
    layer = None if torch.compiler.is_compiling() else name_of(int(module.layer_idx))  # type: ignore[arg-type]
    out = sliced_attention(query, key, value, layer, scaling, dropout, window=window, softcap=softcap, sinks=s_aux)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, pattern_of_mask)
