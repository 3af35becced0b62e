"""Long models and long sequences: work per layer that does not grow with their number, and the end of positions."""

import collections
import sys
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra hf: pip install terapipe_ds[hf]")

import torch

from terapipe_ds.attention.active_slice import ActiveSlice, push_slice
from terapipe_ds.attention.slice_store import SliceStore
from terapipe_ds.models.hugging_face.forward.outline import Outline, StandIn
from terapipe_ds.models.hugging_face.layers import DecoderLayer
from tests.hugging_face_families import CONFIGS, VOCAB_SIZE, config_of
from tests.unit.models.hugging_face.sliced_model import Pipeline, drawn_batch, ways_of, whole_model


def calls_of(num_layers: int, num_slices: int = 4) -> collections.Counter[str]:
    """Count Python calls, by name, while the decoder layers run forward over some slices."""
    config = config_of("llama", num_layers)
    pipeline, store, tokens = Pipeline(config), SliceStore(), 2
    ways_of(pipeline)
    hidden = torch.randn(1, tokens, config.hidden_size, dtype=torch.float64)
    calls: collections.Counter[str] = collections.Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        calls[frame.f_code.co_qualname] += event == "call"

    for index in range(num_slices):
        start = index * tokens
        active = ActiveSlice(start, start + tokens, num_slices * tokens, slice_id=index, store=store)
        sys.setprofile(note)
        try:
            with push_slice(active), torch.no_grad():
                for piece in (each for each in pipeline.pieces if isinstance(each, DecoderLayer)):
                    piece(hidden)
        finally:
            sys.setprofile(None)
    return calls


def test_calls_grow_with_the_layers_and_not_with_their_square() -> None:
    few, many = calls_of(8), calls_of(32)
    assert many["StandIn.forward"] <= 32 * 4 * 2, "one run of the model per slice passes all layers"
    assert sum(many.values()) <= 1.1 * 4 * sum(few.values())


def test_a_layer_that_changes_its_arguments_leaves_those_of_the_next_alone() -> None:
    """One run of the model serves all layers of a slice, so what a layer does to shared tensors must not be seen."""
    pipeline = Pipeline(config_of("llama", 3))
    ways_of(pipeline)
    pieces = [piece for piece in pipeline.pieces if isinstance(piece, DecoderLayer)]
    hidden, seen = torch.randn(1, 4, 32, dtype=torch.float64), []

    def spoil(module: Any, args: Any, named: dict[str, Any]) -> None:
        cos = named["position_embeddings"][0]
        seen.append(cos.clone())
        cos.zero_()

    for piece in pieces:
        piece.held[0].register_forward_pre_hook(spoil, with_kwargs=True)
    with push_slice(ActiveSlice(0, 4, 8, store=SliceStore())), torch.no_grad():
        for piece in pieces:
            piece(hidden)
    assert len(seen) == 3 and all(torch.equal(each, seen[0]) and bool(each.any()) for each in seen)


def test_a_run_for_arguments_draws_no_random_numbers() -> None:
    """A recomputed layer may need that run where the first forward did not: both must draw the same dropout."""
    config = config_of("gpt2")
    config.embd_pdrop = config.resid_pdrop = 0.5
    pipeline = Pipeline(config)
    ways_of(pipeline)
    layer = next(piece for piece in pipeline.pieces if isinstance(piece, DecoderLayer))
    hidden, outputs = torch.randn(1, 4, 32, dtype=torch.float64), []
    with push_slice(ActiveSlice(0, 4, 4)):
        for _ in range(2):  # the second time its arguments are known
            torch.manual_seed(3)
            outputs.append(layer.train()(hidden))
    assert torch.equal(*outputs)


@pytest.mark.sample(10)
@pytest.mark.parametrize("family", CONFIGS)
def test_positions_end_where_the_model_itself_fails(family: str) -> None:
    config = config_of(family)
    pipeline = Pipeline(config)
    found = pipeline.blueprint.outline.num_positions
    sizes = {getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len")} - {None}
    if not sizes or min(sizes) > 64:
        assert found is None or found > 64
        return
    model = whole_model(config, pipeline.parameters, torch.float32).eval()
    model(drawn_batch(VOCAB_SIZE, 64, rows=1)["input_ids"])
    try:
        model(drawn_batch(VOCAB_SIZE, 70, rows=1)["input_ids"])
    except (IndexError, RuntimeError):
        assert found == 64
    else:
        assert found is None or found > 64, "angles that are scaled for more"


@pytest.mark.parametrize(
    ("rope", "end"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, None),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}, 128),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}, 64),
    ],
)
def test_scaled_angles_end(rope: dict[str, Any], end: int | None) -> None:
    config = config_of("llama")
    config.rope_parameters = rope
    outline: Outline = Pipeline(config).blueprint.outline
    assert outline.num_positions == end
    assert all(isinstance(each, StandIn) for each in outline.model.model.layers)
