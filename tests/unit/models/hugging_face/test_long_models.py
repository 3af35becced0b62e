"""Long models and long sequences: work per layer that does not grow with their number, and the end of positions."""

import collections
import itertools
import sys
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra hf: pip install terapipe_ds[hf]")

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from terapipe_ds.attention.active_slice import ActiveSlice, push_slice
from terapipe_ds.attention.slice_store import SliceStore
from terapipe_ds.models.hugging_face.create import model_without_weights
from terapipe_ds.models.hugging_face.forward.outline import Outline, StandIn
from terapipe_ds.models.hugging_face.layers import DecoderLayer
from terapipe_ds.models.hugging_face.weights.in_memory import changes_of
from tests.hugging_face_families import CONFIGS, IS_4, VOCAB_SIZE, config_of
from tests.unit.models.hugging_face.sliced_model import Pipeline, drawn_batch, errors, in_fp64, ways_of, whole_model

FACTORS = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.0, 3.0, 5.0, 9.0]}


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


def with_longrope(config: Any, original: int, scaling: dict[str, Any]) -> Any:
    """Let a config choose its angles by the length: other ones for rows of more tokens than `original`."""
    config.original_max_position_embeddings = original
    of_length = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": original}
    config.rope_parameters = of_length | scaling
    if IS_4:
        config.rope_scaling = config.rope_parameters
    return config


@pytest.mark.parametrize("original", [8, 32])
@pytest.mark.parametrize("family", ["llama", "phi3", *["phimoe"] * (not IS_4), "deepseek_v2"])
def test_angles_chosen_by_the_length_are_those_of_the_whole_row(family: str, original: int) -> None:
    """Slices of 3, 5, 2 and 6 tokens are short, and their row may be long."""
    width = 2 if family == "deepseek_v2" else 4  # whose angles are complex numbers
    factors = {key: values[:width] for key, values in FACTORS.items()}
    config = with_longrope(config_of(family), original, {**factors, "short_mscale": 1.1, "long_mscale": 1.3})
    with in_fp64():
        assert max(errors(config)) <= 1e-10
    model = AutoModelForCausalLM.from_config(config)
    model(drawn_batch(VOCAB_SIZE, 16)["input_ids"])  # which keeps the angles of long rows
    changes_of(model, model_without_weights(config, model.dtype), None)


def test_the_longest_document_chooses_the_angles_of_packed_rows() -> None:
    config = with_longrope(config_of("llama"), 8, FACTORS)
    pipeline, tokens = Pipeline(config), drawn_batch(VOCAB_SIZE, 16)["input_ids"]
    losses = [pipeline.loss(tokens, tokens, (3, 5, 2, 6), starts) for starts in (((0, 5, 10), (0, 8)), ((0, 7), (0,)))]
    whole = whole_model(config, pipeline.parameters)
    for loss, rows in zip(losses, ([(0, 5, 10, 16), (0, 8, 16)], [(0, 7, 16), (0, 16)]), strict=True):
        places = torch.stack([torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(row)]) for row in rows])
        mask = torch.full((2, 1, 16, 16), float("-inf"), dtype=torch.float64)
        for row, edges in enumerate(rows):
            for start, stop in itertools.pairwise(edges):
                mask[row, 0, start:stop, start:stop] = mask[row, 0, start:stop, start:stop].triu(1)
        logits = whole(tokens, position_ids=places, attention_mask=mask, use_cache=False).logits
        assert loss == pytest.approx(float(cross_entropy(logits.flatten(0, 1), tokens.flatten())), rel=1e-10)


@pytest.mark.parametrize(("rope", "end"), [
    ({"rope_type": "default", "rope_theta": 1e4}, None),
    ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, 128),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}, 128),
    ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}, 64),
    ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 64),  # then other angles for each length
    ({"rope_type": "longrope", "original_max_position_embeddings": 32, "rope_theta": 1e4, **FACTORS}, 64),
])  # fmt: skip
def test_scaled_angles_end(rope: dict[str, Any], end: int | None) -> None:
    config = config_of("llama")
    config.rope_parameters = rope
    outline: Outline = Pipeline(config).blueprint.outline
    assert outline.num_positions == end
    assert all(isinstance(each, StandIn) for each in outline.model.model.layers)
