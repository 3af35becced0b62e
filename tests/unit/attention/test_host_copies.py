"""Numbers that the host knows go to a device without a wait: a copy that blocks waits for all work before it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from terapipe_ds.attention import ActiveSlice, SliceStore, carry, opaque, push_slice
from terapipe_ds.attention.backends import flex
from terapipe_ds.attention.backends.base import Queries
from terapipe_ds.attention.backends.flash_attn import _parts
from terapipe_ds.attention.document_edges import Documents
from terapipe_ds.attention.reach import Span
from terapipe_ds.models.gpt import GPTConfig, PositionEmbedding
from terapipe_ds.runtime.batch.cut_tensors import SliceableTensors, UncutLabels

META = torch.device("meta")  # stands in for a device: copies to it are real calls
STARTS = (0, 3, 8), (0, 8)
SPANS = Span(slice(0, 1), 0, 4, 8), Span(slice(1, 2), 0, 4, 8)


class Copies(TorchDispatchMode):
    """Record for each copy from the host to the device whether the host goes on without a wait."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, options = func(*args, **(kwargs or {})), kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu" and result.device == META:
            self.go_on.append(bool(options.get("non_blocking")))
        if func is torch.ops.aten.index_put_.default and result.device == META:
            self.go_on.append(False)  # torch itself has copied a list of places
        return result


def tensor(*shape: int) -> Tensor:
    return torch.empty(shape, device=META)


def learned_positions() -> None:
    with META:
        layer = PositionEmbedding(GPTConfig(hidden_size=8, num_heads=1, num_layers=1, positions="learned"))
    layer(tensor(2, 4, 8))


def packed_rows() -> None:
    list(_parts(Queries(tensor(2, 1, 4, 8), tensor(2, 1, 8, 8), tensor(2, 1, 8, 8), 4, 1.0, spans=SPANS)))


def mask_and_cap_of_flex() -> None:
    spans = tuple((s.rows.start, s.rows.stop, s.first_key, s.start, s.stop) for s in SPANS)
    mask = flex.block_mask.__wrapped__(2, 4, 4, 5, spans, META)
    assert mask.kv_indices.device == mask.q_num_blocks.device == META
    flex._tensors(Queries(tensor(2, 1, 4, 8), tensor(2, 1, 8, 8), tensor(2, 1, 8, 8), 4, 1.0, softcap=2.0))


def carried_state() -> None:
    """A document starts after the slice in one row; its state begins anew."""
    carry.read("layer", "state")
    carry.write("layer", "state", tensor(2, 8), tensor(2, 4, 8))


def layers_of_transformers() -> None:
    from terapipe_ds.models.positions import places

    assert places(tensor(2, 4, 8)).shape == (2, 4)


def micro_batch() -> None:
    ids, whole = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(3)
    SliceableTensors.of_inputs((ids, whole), 4, 1).to(META)
    UncutLabels((), (), 0, False, ids, 4).to(META)
    UncutLabels((), (), 0, False, (ids, whole), 4).to(META)


USES: dict[str, Callable[[], object]] = {
    "layers of transformers": layers_of_transformers,
    "places in a compiled layer": lambda: opaque.position_ids._init_fn(tensor(2, 4), 16),  # type: ignore[attr-defined]
    "learned positions": learned_positions,
    "packed rows": packed_rows,
    "mask and cap": mask_and_cap_of_flex,
    "carried state": carried_state,
    "micro-batch": micro_batch,
}


@pytest.mark.parametrize("use", USES)
def test_the_host_goes_on_while_its_numbers_are_copied(use: str) -> None:
    if use == "layers of transformers":
        pytest.importorskip("transformers")
    span = (0, 8) if use == "carried state" else (4, 8)
    starts = ((0, 3, 8), (0, 9)) if use == "carried state" else STARTS
    active = ActiveSlice(*span, 12, documents=Documents(starts, *span), store=SliceStore())
    with push_slice(active), Copies() as copies:
        USES[use]()
    assert all(copies.go_on) and bool(copies.go_on) == (use != "carried state")
