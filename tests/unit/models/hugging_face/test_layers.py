"""Pieces of a model: weights, positions, documents, dropout, short slices; and broken ones, which are seen."""

import copy
import types
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("transformers", reason="needs the extra hf: pip install terapipe_ds[hf]")

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from terapipe_ds.attention import documents
from terapipe_ds.attention.active_slice import ActiveSlice, SliceStoreError, push_slice
from terapipe_ds.attention.slice_store import SliceStore
from terapipe_ds.models.hugging_face import ModelRefusedError, layers
from terapipe_ds.models.hugging_face.forward import attention, cache, outline, probe
from terapipe_ds.models.hugging_face.module import to_tuple
from terapipe_ds.models.hugging_face.weights.stored import HeldWeights
from terapipe_ds.runtime.layers.compiled import compile_layer, compiled_parts
from tests.hugging_face_families import BY_CACHE, CONFIGS, IS_4, VOCAB_SIZE, WITH_STATES, config_of
from tests.unit.models.hugging_face import sliced_model
from tests.unit.runtime.layers.test_compiled import CountedGraphs

MIXING = {*BY_CACHE, *WITH_STATES} & CONFIGS.keys()  # the documents of packed rows
needs_states = pytest.mark.skipif(IS_4, reason="transformers 4.57 has no cache for the states of all families")

# -- batches


def test_documents_of_any_entry_are_told_by_position_ids() -> None:
    """A tuple has no other place for them; the collator of transformers may give edges alone."""
    tokens, edges = torch.tensor([[5, 6, 7, 8]]), torch.tensor([0, 3, 4], dtype=torch.int32)
    for entry in ({"cu_seq_lens_q": edges}, {"seq_idx": torch.tensor([[0, 0, 0, 1]])}):
        (_, given), labels = to_tuple({"input_ids": tokens, "labels": tokens, **entry})
        assert given.tolist() == [[0, 1, 2, 0]] and labels.tolist() == [[6, 7, -100, -100]]


def test_missing_labels_are_refused_by_key() -> None:
    with pytest.raises(ValueError, match="neither labels nor shift_labels"):
        to_tuple({"input_ids": torch.tensor([[5, 6, 7, 8]])})


# -- weights


def test_weights_that_are_freed_are_drawn_alike_on_all_ranks() -> None:
    """Tensor-parallel ranks compare what a whole layer computes with what they compute together."""
    weights, drawn = HeldWeights({}), list[Tensor]()
    weights.release()
    for seed in (0, 1):
        torch.manual_seed(seed)
        weights.fill("model.layers.0", layer := nn.Linear(4, 4))
        drawn.append(layer.weight)
    assert torch.equal(*drawn) and drawn[0].all()


def test_initial_weights_are_drawn_as_the_family_draws_them() -> None:
    """As much spread as transformers gives, norms of ones, and the same for one seed."""
    config = config_of("llama")
    first, again, other = (sliced_model.Pipeline(config, seed=seed).parameters for seed in (1, 1, 2))
    torch.manual_seed(0)
    fresh = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    assert fresh.keys() == first.keys()
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        assert weight.dtype == torch.float64
        spread = float(weight.detach().std())
        assert spread == pytest.approx(float(fresh[name].detach().std()), rel=0.2, abs=1e-12), name
        assert torch.equal(weight, other[name]) == (spread == 0.0)
    weights = [weight for name, weight in first.items() if name.endswith("q_proj.weight")]
    assert not torch.equal(*weights)


def test_numbers_that_are_set_as_a_module_is_built_are_kept() -> None:
    pipeline = sliced_model.Pipeline(config_of("apertus"))
    (name,) = [name for name in pipeline.parameters if name.endswith("0.mlp.act_fn.alpha_p")]
    fresh = AutoModelForCausalLM.from_config(config_of("apertus"), dtype=torch.float64)
    assert torch.allclose(pipeline.parameters[name], fresh.get_parameter(name))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_norms_in_fp32_beside_weights_in_half_precision(family: str) -> None:
    """Whichever of the two a decoder layer has first."""
    pipeline = sliced_model.Pipeline(config_of(family), torch.bfloat16)
    for piece in pipeline.pieces:
        for part in piece.modules():
            part.float() if "Norm" in type(part).__name__ else part
    assert sliced_model.ways_of(pipeline) == ["fast", "fast"]


# -- positions and documents


def test_positions_of_another_kind_are_refused_with_the_key_to_set() -> None:
    pipeline, tokens = sliced_model.Pipeline(config_of("llama")), torch.ones(2, 4, dtype=torch.long)
    places = torch.arange(4).expand(2, 4)
    assert torch.equal(pipeline((tokens, places)), pipeline(tokens))
    with pytest.raises(ModelRefusedError, match='"documents": 1'):
        pipeline((tokens, torch.tensor([[0, 1, 0, 1]] * 2)))
    with pytest.raises(ModelRefusedError, match="there are 3 inputs"):
        pipeline((tokens, places, places))


@pytest.mark.sample(5)
@pytest.mark.parametrize("family", sorted(CONFIGS.keys() - MIXING))
def test_documents_train_as_if_each_were_alone(family: str) -> None:
    """Packed rows in slices, against the model of transformers on each document by itself."""
    starts = ((0, 6, 7), (0, 9))
    with sliced_model.in_fp64():
        config = config_of(family)
        pipeline = sliced_model.Pipeline(config)
        model = sliced_model.whole_model(config, pipeline.parameters)
        tokens = sliced_model.drawn_batch(VOCAB_SIZE)["input_ids"]
        positions = torch.tensor([[*range(6), 0, *range(9)], [*range(9), *range(7)]])
        _, labels = to_tuple({"input_ids": tokens, "labels": tokens, "position_ids": positions})
        texts = [tokens[:1, :6], tokens[:1, 6:7], tokens[:1, 7:], tokens[1:, :9], tokens[1:, 9:]]
        losses = [
            nn.functional.cross_entropy(model(text, use_cache=False).logits[0, :-1], text[0, 1:], reduction="sum")
            for text in texts
        ]
        expected = sum(losses) / (labels != -100).sum()
        expected.backward()  # type: ignore[union-attr]
        loss = pipeline.loss(tokens, labels, (5, 4, 7), starts)
    assert abs(loss / float(expected) - 1) <= 1e-10
    assert sliced_model.gradient_error(pipeline.parameters, dict(model.named_parameters())) <= 1e-10


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", sorted(MIXING))
def test_documents_are_refused_where_a_layer_would_mix_them(family: str) -> None:
    with sliced_model.in_fp64(), documents(torch.tensor([[0, 1, 0, 1]])):
        with pytest.raises(ModelRefusedError, match="mix the documents"):
            sliced_model.Pipeline(config_of(family))(torch.ones(1, 4, dtype=torch.long))


# -- what attention asks for


CAUSAL = attention.Pattern(None)


def _attend(pattern: Any = CAUSAL, module_is_causal: bool = True, **asked: Any) -> Tensor:
    module = nn.Module()
    module.layer_idx, module.is_causal = 0, module_is_causal  # type: ignore[assignment]
    q, k, v = torch.randn(3, 1, 2, 5, 8, generator=torch.Generator().manual_seed(1))
    return attention.attend(module, q, k, v, pattern, **asked)[0]


@pytest.mark.parametrize(("asked", "named"), [
    ({"position_bias": torch.zeros(1)}, "asks for position_bias"),
    ({"module_is_causal": False}, "not causal"),
    ({"module_is_causal": False, "is_causal": False}, "not causal"),
    ({"pattern": torch.zeros(1)}, "a mask of its own, a Tensor"),
    ({"pattern": attention.Pattern(None, "it masks padding")}, "masks padding"),
    ({"sliding_window": 3}, "a window of None, and its attention one of 3"),
], ids=str)  # fmt: skip
def test_what_attention_has_not_is_refused_by_name(asked: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelRefusedError, match=named):
        _attend(**asked)


MASKS_OF_MODELS: dict[str, tuple[Any, int | None, str]] = {
    "causal": (lambda _, __, q, k: k <= q, None, ""),
    "window": (lambda _, __, q, k: (k <= q) & (k > q - 4), 4, ""),
    "both ways": (lambda _, __, q, k: k == k, None, "neither causal"),
    "earlier tokens alone": (lambda _, __, q, k: k < q, None, "neither causal"),
    "an unnamed window": (lambda _, __, q, k: (k <= q) & (k > q - 4), None, "neither causal"),
    "a shorter window": (lambda _, __, q, k: (k <= q) & (k > q - 4), 5, "neither causal"),
    "a longer window": (lambda _, __, q, k: (k <= q) & (k > q - 4), 3, "neither causal"),
    "chunks": (lambda _, __, q, k: (k <= q) & (k // 4 == q // 4), 4, "neither causal"),
    "first tokens beside a window": (lambda _, __, q, k: (k <= q) & ((k > q - 4) | (k < 2)), 4, "neither causal"),
    "first tokens both ways": (lambda _, __, q, k: (k <= q) | (k < 2), None, "neither causal"),
}


@pytest.mark.parametrize("mask", MASKS_OF_MODELS)
def test_a_mask_that_a_window_does_not_say_is_refused(mask: str) -> None:
    sees, size, problem = MASKS_OF_MODELS[mask]
    pattern = attention.pattern_of_mask(mask_function=sees, local_size=size)
    assert problem in pattern.problem and bool(problem) == bool(pattern.problem)
    assert bool(problem) or pattern == attention.Pattern(size)
    padded = attention.pattern_of_mask(mask_function=sees, local_size=size, attention_mask=torch.tensor([[1, 0]]))
    assert padded.problem == "it masks padding"


def test_a_mask_says_what_is_causal_before_the_flag() -> None:
    """As in transformers' attention by sdpa: GPT-2 of 4.57 gives a causal mask, and says False."""
    assert torch.equal(_attend(is_causal=False), _attend(is_causal=True))


@needs_states
def test_modules_that_a_program_replaces_are_cast_as_well() -> None:
    pipeline, tokens = sliced_model.Pipeline(config_of("mamba2"), torch.float32), torch.arange(8).view(1, 8)
    expected = [each.bfloat16() for each in pipeline.pieces] and pipeline(tokens)
    for piece in pipeline.pieces:  # as with libraries that have faster modules
        owner, key = (first, "norm") if hasattr(first := piece.float().held[0], "norm") else (piece.held, "0")
        setattr(owner, key, copy.deepcopy(getattr(owner, key)))
        piece.bfloat16()
    assert torch.equal(pipeline(tokens), expected)


# -- slices of one token, dropout, recomputation


@needs_states
def test_a_slice_of_one_token_is_refused_where_it_would_be_a_step_of_generation() -> None:
    with pytest.raises(ModelRefusedError, match="give slices of 2 tokens or more"):
        sliced_model.errors(config_of("mamba2"), (3, 1, 4))
    assert max(sliced_model.errors(config_of("llama"), (3, 1, 4))) <= 1e-10


def test_dropout_acts_in_training_alone() -> None:
    """In what runs around the decoder layers as well, which no piece holds as a module."""
    config = config_of("gpt2")
    config.embd_pdrop = 0.5
    pipeline, tokens = sliced_model.Pipeline(config), torch.ones(2, 4, dtype=torch.long)
    sliced_model.ways_of(pipeline)  # layers are tried in evaluation
    drawn = [pipeline(tokens) for _ in range(2)]
    assert not torch.equal(*drawn)
    for piece in pipeline.pieces:
        piece.eval()
    assert torch.equal(pipeline(tokens), pipeline(tokens))


@pytest.mark.parametrize("family", ["mistral", "falcon"])  # sliced_attention, and attention of its own
def test_a_recomputed_forward_sees_the_same_slice(family: str) -> None:
    pipeline, store = sliced_model.Pipeline(config_of(family)), SliceStore()
    tokens = sliced_model.drawn_batch(64)["input_ids"]
    for start, stop in ((0, 6), (6, 16)):
        active = ActiveSlice(start, stop, 16, store=store)
        with push_slice(active), torch.no_grad():  # as reentrant checkpointing runs it
            first = pipeline(tokens[:, start:stop])
        with push_slice(active.replace(mode="recompute")):
            assert torch.equal(pipeline(tokens[:, start:stop]), first)


# -- broken on purpose


def _no_offset(of: Tensor) -> Tensor:
    return torch.arange(of.shape[1]).expand(len(of), -1)


def _attend_without(dropped: str) -> Any:
    original = attention.attend

    def attend(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{name: value for name, value in kwargs.items() if name != dropped})

    return attend


def _pattern_without_window(**kwargs: Any) -> Any:
    return attention.Pattern(None)


def _untied(self: cache.SliceCache, out: Tensor) -> Tensor:
    written, self._written = self._written, {}
    for (layer, name), state in written.items():
        cache.carry.write(layer, name, state.detach(), out)
    return out


def _without_gradient(self: cache.SliceCache, out: Tensor) -> Tensor:
    self._written = {key: state.detach() for key, state in self._written.items()}
    return TIED(self, out)


TIED = cache.SliceCache.tied
MASKS, ATTENTIONS = attention.AttentionMaskInterface._global_mapping, attention.AttentionInterface._global_mapping
SHIFT = "tests.unit.models.hugging_face.sliced_model.to_tuple"
# What breaks: the family that shows it, what is replaced by what, and the refusal; "": a larger error.
BROKEN: dict[str, tuple[str, list[tuple[Any, str, Any]], str]] = {
    "label shift": ("llama", [("", SHIFT, lambda batch: (batch["input_ids"], batch["labels"]))], ""),
    "position offset": ("llama", [(outline, "places", _no_offset)], ""),
    "mask recording": ("mistral", [(MASKS, "terapipe", _pattern_without_window)], "has a window of None"),
    "mask recording, unseen by attention": (
        "mistral",
        [(MASKS, "terapipe", _pattern_without_window), (ATTENTIONS, "terapipe", _attend_without("sliding_window"))],
        "",
    ),
    "cap": ("gemma2", [(ATTENTIONS, "terapipe", _attend_without("softcap"))], ""),
    "sinks": ("gpt_oss", [(ATTENTIONS, "terapipe", _attend_without("s_aux"))], ""),
    "state": ("mamba2", [(cache.SliceCache, "tied", _untied)], "released before any backward"),
    "state gradient": ("mamba2", [(cache.SliceCache, "tied", _without_gradient)], ""),
}


@pytest.mark.parametrize("fault", ["none", *BROKEN])
def test_a_broken_piece_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these mistakes gives another loss or other gradients, or is an error; without one there is neither."""
    family, changes, refusal = BROKEN.get(fault, ("llama", [], ""))
    if IS_4 and family == "mamba2":
        pytest.skip("transformers 4.57 has no cache for the states of all families")

    def breaks(pipeline: sliced_model.Pipeline) -> None:
        sliced_model.ways_of(pipeline)  # found by whole code: a layer that is tried later would take another way
        for where, name, new in changes:
            if isinstance(where, dict):
                monkeypatch.setitem(where, name, new)
            elif where:
                monkeypatch.setattr(where, name, new)
            else:
                monkeypatch.setattr(name, new)

    config = copy.deepcopy(config_of(family))
    config.initializer_range = 0.5
    with sliced_model.in_fp64():
        if refusal:
            with pytest.raises((ModelRefusedError, SliceStoreError), match=refusal):
                sliced_model.errors(config, change=breaks)
        else:
            assert (max(sliced_model.errors(config, change=breaks)) > 1e-6) == bool(changes)


# -- compiled layers -------------------------------------------------------------------------------------------


# graphs of a layer that is one kind; where layers see through two windows there are two kinds; experts break graphs
MORE = [pytest.param(*each, marks=pytest.mark.full) for each in (("gemma2", 2), ("gpt2", 1), ("mixtral", 8))]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("family", "most"), [("llama", 1), *MORE])
def test_layers_of_any_index_share_graphs_over_slices_and_lengths(family: str, most: int) -> None:
    config, graphs = config_of(family), CountedGraphs()
    if family == "llama":
        config.num_hidden_layers = 3
    with sliced_model.in_fp64():
        pipeline = sliced_model.Pipeline(config)
        for index, piece in enumerate(pipeline.pieces):
            for part in compiled_parts(piece):
                compile_layer(part, f"layer {index}", graphs)
        model = sliced_model.whole_model(config, pipeline.parameters)
        for lengths in ((3, 5, 2, 6), (7, 4), (12,)):
            batch = sliced_model.drawn_batch(config.vocab_size, sum(lengths))
            assert max(sliced_model.errors_of(pipeline, model, batch, lengths)) <= 1e-10
    assert 1 <= graphs.count <= most


@needs_states
def test_a_layer_with_states_runs_as_it_is() -> None:
    pipeline = sliced_model.Pipeline(config_of("mamba2"))
    assert not [part for piece in pipeline.pieces for part in compiled_parts(piece)]


def test_another_engine_has_the_weight_gradients_of_the_models_own_linear_layers() -> None:
    own = Conv1D(3, 2)
    piece: Any = types.SimpleNamespace(modules=lambda: [own])
    for engine in (mock.Mock(), last := mock.Mock()):
        layers.Piece.defer_weight_gradients(piece, engine)
    own(torch.ones(1, 2))
    assert last.linear.call_count == 1
    own.forward = replaced = lambda inputs: inputs
    other = type("Conv1D", (Conv1D,), {"__module__": "of_the_user"})(3, 2)
    piece.modules = lambda: [own, other]
    layers.Piece.defer_weight_gradients(piece, mock.Mock())
    assert own.forward is replaced and "forward" not in vars(other)


def test_a_copy_of_a_piece_has_its_own_weights() -> None:
    """A moving average of the layers in training does not train with them."""
    pieces = sliced_model.Pipeline(config_of("llama")).pieces
    copied = copy.deepcopy(pieces)
    assert all(mine.blueprint is theirs.blueprint for mine, theirs in zip(copied, pieces, strict=True))
    own = {parameter.data_ptr() for piece in pieces for parameter in piece.parameters()}
    others = {parameter.data_ptr() for piece in copied for parameter in piece.parameters()}
    assert len(own) == len(others) > 0 and not own & others
    configs = {id(module.config) for piece in copied for module in piece.modules() if hasattr(module, "config")}
    assert configs == {id(pieces[0].outline.config)}


def test_draws_on_an_accelerator_other_than_cuda_are_seen_and_put_back() -> None:
    drawn, device = torch.zeros(1), torch.device("xpu", 0)
    inputs = [types.SimpleNamespace(device=device, is_cuda=False)]
    with (
        mock.patch.object(torch.xpu, "get_rng_state", lambda _: drawn.clone()),
        mock.patch.object(torch.xpu, "set_rng_state", lambda state, _: drawn.copy_(state)),
        mock.patch.object(probe, "_inputs", lambda *_: inputs),
        mock.patch.object(probe, "_run_slices", lambda *_: drawn.add_(1)),
    ):
        assert probe.draws(mock.MagicMock(), 0, nn.Identity(), probe.Way(True, False))
        assert not drawn
