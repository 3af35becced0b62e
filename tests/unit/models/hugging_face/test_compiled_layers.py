"""Compiled decoder layers of transformers, in slices, against the whole model uncompiled."""

from collections.abc import Iterator

import pytest
import torch

from terapipe_ds.models.hugging_face.module import to_tuple
from terapipe_ds.runtime.layers.compiled import compile_layer, compiled_parts
from tests.hugging_face_families import IS_4, config_of
from tests.unit.models.hugging_face.sliced_model import (
    Pipeline,
    drawn_batch,
    gradient_error,
    in_fp64,
    loss_of,
    whole_model,
)
from tests.unit.runtime.layers.test_compiled import CountedGraphs

# graphs of a layer that is one kind; where layers see through two windows there are two kinds; experts break graphs
FAMILIES = [
    ("llama", 1),
    pytest.param("gemma2", 2, marks=pytest.mark.full),
    pytest.param("gpt2", 1, marks=pytest.mark.full),
    pytest.param("mixtral", 8, marks=pytest.mark.full),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("family", "most"), FAMILIES)
def test_layers_of_any_index_share_graphs_over_slices_and_lengths(family: str, most: int) -> None:
    config, graphs = config_of(family), CountedGraphs()
    if family == "llama":
        config.num_hidden_layers = 3
    with in_fp64():
        pipeline = Pipeline(config)
        for index, piece in enumerate(pipeline.pieces):
            for part in compiled_parts(piece):
                compile_layer(part, f"layer {index}", graphs)
        model = whole_model(config, pipeline.parameters)
        for lengths in ((3, 5, 2, 6), (7, 4), (12,)):
            batch = drawn_batch(config.vocab_size, sum(lengths))
            for parameter in (*pipeline.parameters.values(), *model.parameters()):
                parameter.grad = None
            expected = loss_of(model, batch)
            expected.backward()
            tokens, labels = to_tuple(batch)
            assert torch.is_tensor(tokens)
            assert pipeline.loss(tokens, labels, lengths) == pytest.approx(float(expected), rel=1e-12)
            assert gradient_error(pipeline.parameters, dict(model.named_parameters())) <= 1e-10
    assert 1 <= graphs.count <= most


@pytest.mark.skipif(IS_4, reason="transformers 4.57 has no cache for the states of all families")
def test_a_layer_with_states_runs_as_it_is() -> None:
    pipeline = Pipeline(config_of("mamba2"))
    assert not [part for piece in pipeline.pieces for part in compiled_parts(piece)]
