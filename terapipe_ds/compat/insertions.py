"""Tell from the live code which insertions of a patch are in force in the running program.

A patch without context lines applies to another version of its target without a word, in the wrong places, and a merge
may drop a part of it. So a function counts as patched where its compiled code imports our package and names the helper.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

PATCH = "patches/megatron_deepspeed.patch"
PACKAGE = "terapipe_ds.integrations"  # what the inserted lines import from
HELPERS = f"{PACKAGE}.megatron_deepspeed"
PATCHED_MODEL = ("megatron.model.gpt_model", "GPTModelPipe")  # module and class whose training needs the patch


class PatchError(ValueError):
    """Third-party code that has to be patched is not, or not wholly."""


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
            return (getattr(place, "__module__", ""), getattr(place, "__name__", "")) == (HELPERS, self.helper)
        code = getattr(inspect.unwrap(place), "__code__", None) if callable(place) else None
        return code is not None and {PACKAGE, self.helper} <= set(_names(code))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


_MODEL, _CLASS = PATCHED_MODEL
_GPT, _TRANSFORMER, _UTILS = (f"megatron/{name}.py" for name in ("model/gpt_model", "model/transformer", "utils"))
INSERTIONS = (
    Insertion("the mask left out of the batch", "pretrain_gpt.py", None, "_megatron_batch_fn", "batch_mask"),
    Insertion("the check of the arguments", _GPT, _MODEL, f"{_CLASS}.__init__", "check_arguments"),
    Insertion("the weights of the slices' losses", _GPT, _MODEL, f"{_CLASS}.loss_func.slice_weight",
              "slice_weight", True),
    Insertion("the check of the first batch", _GPT, _MODEL, f"{_CLASS}.before_reduce", "before_reduce", True),
    Insertion("sliced attention and rotary positions", _TRANSFORMER, "megatron.model.transformer",
              "ParallelAttention.forward", "attend"),
    Insertion("the table of rotary positions", _UTILS, "megatron.utils", "update_rotary_pos_emb", "keep_rotary"),
)  # fmt: skip


def problem_of_insertions(model: object) -> str | None:
    """Return which insertions `model` lacks, one line for each; None where it needs none or has all."""
    if PATCHED_MODEL not in {(cls.__module__, cls.__name__) for cls in type(model).__mro__}:
        return None
    missing = [insertion for insertion in INSERTIONS if not insertion.is_there(model)]
    if not missing:
        return None
    lines = "".join(f"\n  {i.file}: {i.what} ({i.path} does not have {HELPERS}.{i.helper})" for i in missing)
    return (
        f"Megatron-DeepSpeed is not patched, or not wholly, so that slices would train wrongly. Missing:{lines}\n"
        f"Apply {PATCH} again, to an unchanged checkout of the commit that patches/README.md names."
    )
