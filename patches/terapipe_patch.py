"""Serve the lines that the patch inserts in Megatron-DeepSpeed. Copy this file beside its `pretrain_gpt.py`.

That code base runs its layers sequence first: hidden states are [T, B, hidden], queries, keys and values [T, B, H, D],
logits [T, B, vocab]; its batches are [B, L]. Nothing of it is imported here: the inserted lines hand over what is
needed. Without an enabled `terapipe` section every helper leaves upstream's own way as it is.

A patch without context lines applies to another version of its target without a word, in the wrong places, and a merge
may drop a part of it. So a function counts as patched where its compiled code imports this module and names the helper.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from types import CodeType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from terapipe_ds.attention import active_slice, sliced_attention
from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.runtime.register import is_registered
from terapipe_ds.runtime.register import register as register  # inserted where `pretrain_gpt.py` has built nothing yet

PATCH = "patches/megatron_deepspeed.patch"
_ATTENTION = "ParallelAttention"  # upstream's class; its instances note here that slices went through `attend`
_ATTENDED = "_terapipe_attended"
_COMPRESSION = "deepspeed.compression.compress"


class PatchError(ValueError):
    """Megatron-DeepSpeed is not patched, or not wholly, or is asked for what slices cannot train."""


def enabled(args: Any) -> bool:
    """Return whether upstream's arguments carry a DeepSpeed config whose `terapipe` section is enabled.

    Raises:
        PatchError: it is, but nothing is registered: DeepSpeed's own engine would train without slices.
    """
    section = (getattr(args, "deepspeed_config_dict", None) or {}).get("terapipe")
    if not isinstance(section, dict) or section.get("enabled") is not True:
        return False
    if not is_registered():
        raise PatchError(
            f"the DeepSpeed config has an enabled terapipe section, but terapipe_ds is not registered. Missing:\n"
            f"  pretrain_gpt.py: the registration\nApply {PATCH} again, to an unchanged checkout of the commit that "
            f"patches/README.md names (or call terapipe_ds.register() before deepspeed.initialize)."
        )
    return True


def allow_missing_compression() -> None:
    """Put a module in the place of `deepspeed.compression.compress`, which DeepSpeed 0.19.8 no longer has.

    Inserted in `megatron/training.py` before its import. The two functions that it names raise when they are called.
    """

    def no_compression(*_: Any, **__: Any) -> Any:
        fix = "remove compression_training from the DeepSpeed config"
        raise PatchError(f"the installed DeepSpeed has no {_COMPRESSION}: {fix}")

    try:
        importlib.import_module(_COMPRESSION)
    except ModuleNotFoundError:
        stand_in = ModuleType(_COMPRESSION)
        stand_in.init_compression = stand_in.redundancy_clean = no_compression  # type: ignore[attr-defined]
        sys.modules[_COMPRESSION] = stand_in


# -- before training -------------------------------------------------------------------------------------------------

_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("no_pipeline_parallel", bool, "without a PipelineModule there is no pipeline to cut: leave it out"),
    ("reset_attention_mask", bool, "upstream's pipeline ignores it: leave it out. Slices keep to the documents that "
     "--reset-position-ids marks where terapipe.documents is 1"),
    ("sequence_parallel", bool, "DeepSpeed does not sum the gradients of the norms over the tensor-parallel ranks "
     "there, and learned positions are cut by rank: leave it out"),
    ("ds_sequence_parallel_size", lambda size: (size or 1) > 1, "DeepSpeed's sequence parallelism cuts the sequence as "
     "well: set it to 1"),
    ("force_ds_sequence_parallel", bool, "DeepSpeed's sequence parallelism cuts the sequence as well: leave it out"),
    ("ds_sequence_parallel_fpdt", bool, "FPDT cuts the sequence as well: leave it out"),
    ("curriculum_learning_legacy", bool, "lengths that change were not tried here: remove curriculum_learning from the "
     "DeepSpeed config"),
    ("data_efficiency_curriculum_learning", bool, "lengths that change were not tried here: leave it out"),
    ("random_ltd", bool, "random layer-token drop chooses among the tokens of a whole sequence: leave it out"),
    ("num_experts", lambda experts: max(experts or [1]) > 1, "capacity and auxiliary loss of MoE layers count the "
     "tokens of one forward pass, which slices change: set it to 1"),
    ("num_experts_switch", lambda experts: experts is not None, "MoE layers were not tried here: leave it out"),
    ("retro_add_retriever", bool, "retrieval attends to neighbours of whole sequences: leave it out"),
    ("enable_zbh1_pipeline", bool, "it brings its own schedule: leave it out and choose terapipe.schedule"),
)  # fmt: skip


def check_arguments(args: Any) -> None:
    """Refuse what cannot be trained in slices, before anything is built. Inserted in `GPTModelPipe.__init__`.

    Allow what upstream's checkpoints hold to be loaded.

    Raises:
        PatchError: names the argument, its value, why, and what to change.
    """
    if not enabled(args):
        return
    if _MODEL in sys.modules and (problem := problem_of_insertions()) is not None:  # a model is being built
        raise PatchError(problem)
    # upstream saves its arguments and numpy's random state, and the engine reads no classes but those that are allowed
    enums = {type(value) for value in vars(args).values() if isinstance(value, Enum)}
    reconstruct, (array, *_), _ = np.array(0, np.uint32).__reduce__()
    torch.serialization.add_safe_globals([*enums, reconstruct, array, np.dtype, type(np.dtype(np.uint32))])
    for name, is_refused, reason in _REFUSED:
        value = getattr(args, name, None)
        if is_refused(value):
            raise PatchError(f"--{name.replace('_', '-')} ({value}) cannot be combined with terapipe: {reason}")
    config = TeraPipeConfig.from_deepspeed(args.deepspeed_config_dict)
    if config.sequence_dim != 1:
        batches = "upstream's batches are [batch, sequence], also where its layers run sequence first"
        raise PatchError(f"terapipe.sequence_dim is {config.sequence_dim}: {batches}. Set it to 1")
    if config.sliced_inputs is not None and set(config.sliced_inputs) != {0, 1}:
        needed = "tokens (0) and position ids (1) must be sliced, the mask (2) must not"
        raise PatchError(f"terapipe.sliced_inputs is {list(config.sliced_inputs)}: {needed}. Set it to [0, 1] or null")


def laid_out(model: object) -> None:
    """Check that all lines are in force. Set on `GPTModelPipe`; the engine calls it before it builds anything."""
    if (problem := problem_of_insertions(model)) is not None:
        raise PatchError(problem)


def batch_mask(mask: Tensor, args: Any) -> Tensor:
    """Return a placeholder [1] for the L x L mask, which no layer reads. Inserted in `get_batch_pipe`.

    The engine draws all micro-batches before the first action, and hands an input that is not sliced to each slice.
    """
    return torch.zeros(1, dtype=torch.bool, device=mask.device) if enabled(args) else mask


def keep_rotary(args: Any, embedding: Callable[..., Any], rotary_dim: int, num_tokens: int) -> bool:
    """Put the table of positions [0, num_tokens) where the layers look for it. Inserted in `update_rotary_pos_emb`.

    `embedding` is upstream's `RotaryEmbedding`. False: not enabled, go on as before. Upstream's own line ends in
    `.to(device)`, which the list that its class returns at the patched commit does not have.
    """
    if not enabled(args):
        return False
    args.rotary_pos_emb = embedding(rotary_dim, theta=args.rope_theta)(num_tokens)
    return True


# -- in a batch ------------------------------------------------------------------------------------------------------


def slicing(args: Any) -> bool:
    """Return whether the engine runs a slice, so that `attend` takes over. Inserted before the core attention."""
    if active_slice() is not None:
        return True
    enabled(args)  # raises where DeepSpeed's own engine runs although the section is enabled
    return False


def attend(
    attention: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: Any,
    args: Any,
    fork_rng: Callable[[], AbstractContextManager[Any]],
) -> Tensor:
    """Compute `ParallelAttention`'s core for the active slice, with rotary positions from where the slice starts.

    query, key, value: [T, B, H, D]; returns [T, B, H * D]. Upstream's `apply_query_key_layer_scaling` divides the
    scores by the layer number and multiplies them again inside the softmax, so the scale is 1/sqrt(D) all the same.

    Args:
        rotary: upstream's table for all L positions, as `turn` takes it, or None.
        fork_rng: random state of this tensor-parallel rank, whose heads need a dropout mask of their own.
    """
    active = active_slice()
    assert active is not None, "attend() without an active slice; the inserted line asks slicing() first"
    if attention.attn_mask_type.name != "causal":
        raise PatchError(f"attention with a {attention.attn_mask_type.name} mask cannot be cut in slices, only causal")
    setattr(attention, _ATTENDED, True)
    if rotary is not None:
        query, key = turn(query, rotary, active.start), turn(key, rotary, active.start)
    dropout_p = args.attention_dropout if attention.training else 0.0
    # not upstream's layer_number: the pipeline's layers 0 and 1 both have 1 there
    layer = (attention.layer_number, id(attention))
    with fork_rng() if dropout_p > 0.0 else nullcontext():
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = sliced_attention(q, k, v, layer, dropout_p=dropout_p)
    return out.permute(2, 0, 1, 3).flatten(2).contiguous()


def turn(x: Tensor, rotary: Tensor | Sequence[Tensor], start: int) -> Tensor:
    """Turn x [T, B, H, D] to positions [start, start + T) (Su et al. 2021, arXiv 2104.09864, eq. 34).

    `rotary` is a table of positions from 0: the angles [L, 1, 1, R], or their cosines and sines, as upstream had them
    at different times. Numbers i and i + R/2 of a head are a pair; the numbers from R on stay as they are. Upstream's
    own function keeps one table by the *number* of tokens, the same for all slices of one length.
    """
    table = (rotary.cos(), rotary.sin()) if torch.is_tensor(rotary) else tuple(rotary)
    stop = start + x.shape[0]
    if len(table) != 2 or table[0].shape[0] < stop:
        raise PatchError(
            f"the slice [{start}, {stop}) needs rotary positions up to {stop}, got {len(table)} tables of "
            f"{table[0].shape[0]} positions: train with sequences of at most --seq-length tokens"
        )
    cos, sin = (t[start:stop].to(x.dtype) for t in table)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    left, right = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-right, left), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def slice_weight(labels: Any) -> float:
    """Return the valid tokens of a slice, by which upstream divides its losses. Set on `GPTModelPipe.loss_func`.

    labels: (labels, loss_mask), each [B, T], as upstream's `get_batch_pipe` gives them.
    """
    _, loss_mask = labels
    return float(loss_mask.sum(dtype=torch.float64))


def before_reduce(model: Any, engine: object) -> None:
    """Check that every attention layer of this stage took slices. Set on `GPTModelPipe`; called before the reduction.

    An insertion in the right function but in a branch that never runs is found here, before the first step.
    """
    layers = {name: module for name, module in model.named_modules() if not hasattr(module, _ATTENDED)}
    silent = [name for name, layer in layers.items() if _ATTENTION in (cls.__name__ for cls in type(layer).__mro__)]
    if silent:
        raise PatchError(
            f"a batch was run in slices, but attention layers did not call sliced attention: {', '.join(silent[:4])}"
            f"{' and more' if len(silent) > 4 else ''}. The insertion in megatron/model/transformer.py is not where it "
            f"belongs: apply {PATCH} again, to an unchanged checkout of the commit that patches/README.md names."
        )


# -- the inserted lines -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Insertion:
    """Lines that the patch inserts in one place."""

    what: str
    file: str
    owner: str | None  # the module that has `path`; None: the model, of whose script no module has the name
    path: str
    helper: str
    attribute: bool = False  # the object at `path` must be `helper`; otherwise it is a function whose code names it

    def is_there(self, model: object) -> bool:
        """Return whether the running program has the insertion."""
        place: Any = model if self.owner is None else sys.modules.get(self.owner)
        for name in self.path.split("."):
            place = getattr(place, name, None)
        if self.attribute:
            place = getattr(place, "__func__", place)
            return (getattr(place, "__module__", ""), getattr(place, "__name__", "")) == (__name__, self.helper)
        code = getattr(inspect.unwrap(place), "__code__", None) if callable(place) else None
        return code is not None and {__name__, self.helper} <= set(_names(code))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


_MODEL, _CLASS = "megatron.model.gpt_model", "GPTModelPipe"
_GPT, _TRANSFORMER, _UTILS = (f"megatron/{name}.py" for name in ("model/gpt_model", "model/transformer", "utils"))
INSERTIONS = (
    Insertion("the mask left out of the batch", "pretrain_gpt.py", None, "_megatron_batch_fn", "batch_mask"),
    Insertion("the check of the arguments", _GPT, _MODEL, f"{_CLASS}.__init__", "check_arguments"),
    Insertion("the weights of the slices' losses", _GPT, _MODEL, f"{_CLASS}.loss_func.slice_weight",
              "slice_weight", True),
    Insertion("the check of the first batch", _GPT, _MODEL, f"{_CLASS}.before_reduce", "before_reduce", True),
    Insertion("the check of these lines", _GPT, _MODEL, f"{_CLASS}.laid_out", "laid_out", True),
    Insertion("sliced attention and rotary positions", _TRANSFORMER, "megatron.model.transformer",
              "ParallelAttention.forward", "attend"),
    Insertion("the table of rotary positions", _UTILS, "megatron.utils", "update_rotary_pos_emb", "keep_rotary"),
)  # fmt: skip


def problem_of_insertions(model: object = None) -> str | None:
    """Return which insertions are missing, one line for each; None where all are there.

    Args:
        model: has the function that gives batches, which is looked at too; None: it is not known yet.
    """
    looked_at = [insertion for insertion in INSERTIONS if model is not None or insertion.owner is not None]
    missing = [insertion for insertion in looked_at if not insertion.is_there(model)]
    if not missing:
        return None
    lines = "".join(f"\n  {i.file}: {i.what} ({i.path} does not have {__name__}.{i.helper})" for i in missing)
    return (
        f"Megatron-DeepSpeed is not patched, or not wholly, so that slices would train wrongly. Missing:{lines}\n"
        f"Apply {PATCH} again, to an unchanged checkout of the commit that patches/README.md names."
    )
