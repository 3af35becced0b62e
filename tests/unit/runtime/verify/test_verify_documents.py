"""Test that layers which mix the documents of a row are found, and that no other layer is."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terapipe_ds.attention import active_slice
from terapipe_ds.attention.document_edges import Starts
from terapipe_ds.models import gpt
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch.batch_agreement import MicroBatchShape
from terapipe_ds.runtime.batch.in_flight import MicroBatchInFlight
from terapipe_ds.runtime.layers.activation_checkpointing import checkpoint_with_gradients
from terapipe_ds.runtime.layers.untouched import untouched
from terapipe_ds.runtime.verify.documents import DocumentCheck, window_of_documents
from terapipe_ds.runtime.verify.named_layer import NamedLayer
from terapipe_ds.runtime.verify.stage import Findings, StageCheck
from terapipe_ds.runtime.verify.tokens import Activations, Slicing, TokenDim, alone
from tests.small_models.mixers import MIXERS, Attends
from tests.small_models.parts import HEADS, VOCAB_SIZE, WIDTH, Attention, Embedding, Mlp, causal, seeded

STARTS: Starts = ((0, 6, 9), (0,), (0, 7))
LENGTH = 13
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


class Hidden(nn.Module):
    """Run a layer with hidden states in another layout, and a mask beside them."""

    def __init__(self, inner: nn.Module, form: str) -> None:
        super().__init__()
        self.inner, self.form = inner, form

    def forward(self, inputs: Any) -> Any:
        if self.form == "tokens first":
            return self.inner(inputs.transpose(0, 1)).transpose(0, 1).contiguous()
        if self.form == "flat":
            return self.inner(inputs.unflatten(0, (len(STARTS), -1))).flatten(0, 1)
        x, ids, mask = inputs
        return self.inner(x), ids, mask


def apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend in each document by a softmax of one's own, which knows the edges from the engine."""
    active = active_slice()
    assert active is not None and active.documents is not None
    number = torch.zeros(len(q), q.shape[-2], dtype=torch.int64)
    for row, starts in enumerate(active.documents.starts):
        number[row, list(starts[1:])] = 1
    number = number.cumsum(1)
    other = number[:, None, :, None] != number[:, None, None]
    return causal(q, k, v, torch.zeros_like(other, dtype=q.dtype).masked_fill(other, -1e30))


class Sums(nn.Module):
    """Sum over the tokens of a document, as the difference of two sums from the start of the row."""

    def forward(self, x: Tensor) -> Tensor:
        active = active_slice()
        assert active is not None and active.documents is not None
        places, sums = active.documents.position_ids(), F.pad(x.cumsum(1), (0, 0, 1, 0))
        first = (torch.arange(x.shape[1]) - places)[..., None].expand_as(x)
        return x + (sums[:, 1:] - sums.gather(1, first)) / (places + 1)[..., None].to(x.dtype)


class Shift(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * F.pad(x, (0, 0, 1, 0))[:, :-1]


class Dropout(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.3, training=self.training)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.training * torch.randn(x.shape[1:], dtype=x.dtype)


MIX: dict[str, Any] = {
    "softmax": lambda: Attention(causal),
    "linear attention": lambda: Attention(lambda q, k, v: (q @ k.transpose(-1, -2)).tril() @ v),
    "shift": Shift,
    "a mean over the row": lambda: nn.Sequential(Mlp(), MeanOfRow()),
    "dropout": lambda: Dropout(causal),
    "embedding and attention in one": lambda: nn.Sequential(Embedding(), Attention(causal)),
}
APART: dict[str, Any] = {
    "softmax": lambda: Attention(apart),
    "dropout": lambda: Dropout(apart),
    "noise": Noise,
    "differences of sums": Sums,
    "each token": Mlp,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "embedding and attention in one": lambda: nn.Sequential(Embedding(), Attention(apart)),
    "attends": lambda: Attends("one", WIDTH, HEADS),
    "attends in a window": lambda: Attends("one", WIDTH, HEADS, window=3),
    **{name: lambda make=make: make("one", WIDTH, HEADS) for name, make in MIXERS.items()},
}


class MeanOfRow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None].to(x.dtype)


def check(layers: list[Any], inputs: tuple[Tensor, ...], starts: Starts = STARTS, checkpoint: Any = None) -> Findings:
    module, slicing = nn.ModuleList(layers), Slicing(SlicePlan((inputs[0].shape[1],)), (1.0,), starts=starts)
    stage = StageCheck(module, slicing, Findings(), kind=DocumentCheck)
    named = [NamedLayer(i, layer, checkpoint) for i, layer in enumerate(layers)]
    with untouched(module, with_gradients=False):
        form = tuple if len(inputs) > 1 else alone
        stage.check_layers(named, Activations(inputs, form, (TokenDim(1),) * len(inputs)))
    return stage.found


def inputs_of(layer: nn.Module, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    if isinstance(layer, nn.Sequential) and isinstance(layer[0], Embedding):
        return torch.randint(VOCAB_SIZE, (3, LENGTH), generator=generator)
    return torch.randn(3, LENGTH, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def built(make: Any, dtype: torch.dtype) -> nn.Module:
    layer: nn.Module = seeded(make()).to(dtype)
    return layer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MIX)
def test_a_layer_that_mixes_documents_is_found(name: str, dtype: torch.dtype) -> None:
    layer = built(MIX[name], dtype)
    (finding,) = check([layer], (inputs_of(layer, dtype),)).findings
    assert "tokens of earlier documents in the row changed: the layer mixes documents" in str(finding)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", APART)
def test_a_layer_that_keeps_to_documents_passes(name: str, dtype: torch.dtype) -> None:
    layer = built(APART[name], dtype)
    found = check([layer], (inputs_of(layer, dtype),))
    assert (found.findings, found.num_layers) == ([], 1)


@pytest.mark.parametrize("form", ["tokens first", "flat"])
@pytest.mark.parametrize("attend", [causal, apart])
def test_hidden_states_in_other_layouts(form: str, attend: Any) -> None:
    """The second layer has them, of the first one that brings them there."""
    there = nn.Flatten(0, 1) if form == "flat" else Transposed()
    x = inputs_of(there, torch.float64)
    found = check([there, built(lambda: Hidden(Attention(attend), form), torch.float64)], (x,))
    assert [one.layer_id for one in found.findings] == [1] * (attend is causal)


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous()


@pytest.mark.parametrize("attend", [causal, apart])
def test_tensors_beside_hidden_states_stay(attend: Any) -> None:
    x = inputs_of(nn.Identity(), torch.float64)
    ids, mask = torch.arange(LENGTH).expand(3, -1), torch.zeros(3, LENGTH, LENGTH, dtype=torch.float64)
    found = check([built(lambda: Hidden(Attention(attend), "tuple"), torch.float64)], (x, ids, mask))
    assert len(found.findings) == (attend is causal)


@pytest.mark.parametrize("attend", [causal, apart])
def test_a_row_as_long_as_hidden_states_are_wide(attend: Any) -> None:
    x = torch.randn(1, WIDTH, WIDTH, dtype=torch.float64).requires_grad_()
    assert len(check([Attention(attend).double()], (x,), ((0, 3, 5),)).findings) == (attend is causal)


@pytest.mark.parametrize("attend", [causal, apart])
@pytest.mark.parametrize("is_reentrant", [True, False])
def test_under_activation_checkpointing(attend: Any, is_reentrant: bool) -> None:
    def checkpoint(function: Any, *tensors: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(function, *tensors, use_reentrant=is_reentrant)

    layer, again = built(lambda: Attention(attend), torch.float64), checkpoint_with_gradients(checkpoint)
    assert len(check([layer], (inputs_of(layer, torch.float64),), checkpoint=again).findings) == (attend is causal)


def test_a_layer_of_half_precision_alone_is_compared_in_it() -> None:
    def half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.dtype != torch.bfloat16:
            raise TypeError("bf16 alone")
        return 5 * causal(q, k, v)

    layer = built(lambda: Attention(half), torch.bfloat16)
    assert len(check([layer], (inputs_of(layer, torch.bfloat16),)).findings) == 1


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_the_built_in_model_passes_in_bf16(positions: Any) -> None:
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "ffn_size": 24}
    config = gpt.GPTConfig(**sizes, max_sequence_length=64, positions=positions, dtype="bfloat16")
    layers = [spec.build() for spec in gpt.gpt_layers(config)]
    found = check(layers, (inputs_of(nn.Sequential(Embedding()), torch.int64),))
    assert found.findings == [] and found.num_layers == len(layers)


@pytest.mark.parametrize(("starts", "may_cut", "multiple", "expected"), [
    (((0,), (0, 300, 700)), (2, True), 1, (237, 127, 1, 1)),
    (((0, 990),), (1, True), 1, (873, 127, 1, 0)),
    (((0, 2), (0, 5)), (2, True), 50, (0, 150, 1, 0)),
    (((0, 2), (0, 5)), (None, True), 1, (0, 127, None, 0)),
    (((0, 2), (0, 5)), (None, False), 1, (0, 1000, None, 0)),
    (((0, 2), (0, 5)), (2, True), 600, (0, 600, 1, 0)),
])  # fmt: skip
def test_the_window_has_the_start_of_a_document(starts: Starts, may_cut: Any, multiple: int, expected: Any) -> None:
    shape = MicroBatchShape(1000, len(starts), starts=starts)
    cut = window_of_documents(MicroBatchInFlight(SlicePlan((500, 500)), shape), may_cut, multiple)
    assert (cut.start, cut.plan.sequence_length, cut.rows, cut.first_row) == expected
    of_cut = cut.of_starts(starts)
    assert of_cut is not None and any(len(row) > 1 for row in of_cut)
