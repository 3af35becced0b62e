"""Run the pieces of a model in token slices in one process, and compare with the model of transformers itself."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from terapipe_ds.attention.active_slice import ActiveSlice, push_slice
from terapipe_ds.attention.document_edges import Documents, Starts
from terapipe_ds.attention.slice_store import SliceStore
from terapipe_ds.models.hugging_face.create import model_without_weights
from terapipe_ds.models.hugging_face.forward.outline import Outline
from terapipe_ds.models.hugging_face.layers import Blueprint, DecoderLayer, Piece, layers_of
from terapipe_ds.models.hugging_face.module import to_tuple
from terapipe_ds.models.hugging_face.refusals import check_config
from terapipe_ds.models.hugging_face.weights.stored import DrawnWeights

FLOOR = 1e-3  # of the largest gradient: what is below counts as rounding


class _Wide(TorchFunctionMode):
    """Computes in fp64 what models compute in fp32 whatever their weights are."""

    __module__ = "torch"  # the engine's own products must run under it, as in training; a user's mode rules them out

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(each: Any) -> Any:
            return torch.float64 if each is torch.float32 or each is torch.bfloat16 else each

        func = Tensor.double if func is Tensor.float else func
        return func(*map(wide, args), **{name: wide(each) for name, each in (kwargs or {}).items()})


@contextlib.contextmanager
def in_fp64() -> Iterator[None]:
    """Have whole models and pieces compute in fp64 alone, so that any error is a mistake and none is a rounding."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(before)


class Pipeline:
    """All pipeline layers of a model in one process."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype = torch.float64, seed: int = 1) -> None:
        check_config(config)
        outline = Outline(model_without_weights(config, dtype))
        self.blueprint = Blueprint(outline, DrawnWeights(outline, seed))
        self.pieces: list[Piece] = []
        self.runs: list[Callable[[Any], Tensor]] = []
        tied: dict[str, Piece] = {}
        for spec in layers_of(self.blueprint):
            piece = spec.build() if not isinstance(spec, TiedLayerSpec) else tied.setdefault(spec.key, spec.build())
            run = getattr(spec, "forward_fn", None)
            self.runs.append(piece if run is None else functools.partial(run, piece))
            self.pieces += [piece] if piece not in self.pieces else []

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by their names in the model of transformers."""
        return {
            f"{name}.{key}": parameter
            for piece in self.pieces
            for name, module in zip(piece.names, piece.held, strict=True)
            for key, parameter in module.named_parameters()
        }

    def __call__(self, inputs: Any) -> Tensor:
        for run in self.runs:
            inputs = run(inputs)
        return inputs

    def loss(self, tokens: Tensor, labels: Tensor, lengths: Sequence[int], starts: Starts | None = None) -> float:
        """Train on slices of these lengths: forward in order, backward in reverse; return the loss."""
        store, losses, start, count = SliceStore(), [], 0, (labels != -100).sum()
        for slice_id, length in enumerate(lengths):
            stop = start + length
            documents = None if starts is None else Documents(starts, start, stop)
            active = ActiveSlice(start, stop, sum(lengths), slice_id=slice_id, documents=documents, store=store)
            with push_slice(active):
                logits = self(tokens[:, start:stop])
            target = labels[:, start:stop].flatten()
            losses.append((active, nn.functional.cross_entropy(logits.flatten(0, 1), target, reduction="sum") / count))
            start = stop
        for active, loss in reversed(losses):
            with push_slice(active):
                loss.backward()
        store.release(0, 0)
        store.assert_drained()
        return sum(float(loss) for _, loss in losses)


def ways_of(pipeline: Pipeline) -> list[str]:
    """How the decoder layers run: fast (through `sliced_attention`) or slow (by a cache), and with states or not."""
    ways = [piece.find_way() for piece in pipeline.pieces if isinstance(piece, DecoderLayer)]
    return [("fast" if way.is_fast else "slow") + ("+states" if way.has_states else "") for way in ways]


def drawn_batch(vocab_size: int, length: int = 16, rows: int = 2, seed: int = 5) -> dict[str, Tensor]:
    """Token ids, and labels as Hugging Face models take them: unshifted, some of them without a count."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, vocab_size, (rows, length), generator=generator)
    labels = tokens.clone()
    labels[0, : length // 2] = -100
    return {"input_ids": tokens, "labels": labels}


def whole_model(config: PretrainedConfig, weights: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> Any:
    eager = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, **eager).train()  # sdpa of 4.57 passes over soft caps
    found = model.load_state_dict({name: p.detach() for name, p in weights.items()}, strict=False)
    tied = {f"{head}.weight" for head in ("lm_head", "output_projection", "embed_out") if config.tie_word_embeddings}
    assert not found.unexpected_keys
    assert set(found.missing_keys) <= tied | {name for name, _ in model.named_buffers()}, found.missing_keys
    return model


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss as models of transformers define it, without their rounding of logits to fp32."""
    logits, labels = model(batch["input_ids"], use_cache=False).logits, batch["labels"]
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def errors(
    config: PretrainedConfig,
    lengths: Sequence[int] = (3, 5, 2, 6),
    dtype: torch.dtype = torch.float64,
    change: Callable[[Pipeline], None] = lambda _: None,
) -> tuple[float, float]:
    """Return the relative errors of loss and gradients of a training in slices against the unsliced model."""
    pipeline = Pipeline(config, dtype)
    model = whole_model(config, pipeline.parameters, dtype)
    change(pipeline)
    return errors_of(pipeline, model, drawn_batch(config.get_text_config().vocab_size, sum(lengths)), lengths)


def errors_of(pipeline: Pipeline, model: Any, batch: dict[str, Tensor], lengths: Sequence[int]) -> tuple[float, float]:
    """Return the errors for one batch; gradients of earlier ones do not count."""
    for parameter in (*pipeline.parameters.values(), *model.parameters()):
        parameter.grad = None
    expected = loss_of(model, batch)
    expected.backward()
    tokens, labels = to_tuple(batch)
    assert torch.is_tensor(tokens)
    loss = pipeline.loss(tokens, labels, lengths)
    return abs(loss / float(expected) - 1), gradient_error(pipeline.parameters, dict(model.named_parameters()))


def rounding_errors(config: PretrainedConfig, lengths: Sequence[int] = (3, 5, 2, 6)) -> tuple[float, float]:
    """Return how far gradients are from those of the same weights computed in fp64 throughout: in slices, and of the
    whole model as it computes."""
    pipeline, batch = Pipeline(config), drawn_batch(config.get_text_config().vocab_size, sum(lengths))
    weights = {name: parameter.detach() for name, parameter in pipeline.parameters.items()}
    model = whole_model(config, weights)
    loss_of(model, batch).backward()
    with in_fp64():
        exact = whole_model(config, weights)
        loss_of(exact, batch).backward()
    tokens, labels = to_tuple(batch)
    assert torch.is_tensor(tokens)
    pipeline.loss(tokens, labels, lengths)
    expected = dict(exact.named_parameters())
    return gradient_error(pipeline.parameters, expected), gradient_error(dict(model.named_parameters()), expected)


def gradient_error(ours: dict[str, nn.Parameter], theirs: dict[str, nn.Parameter]) -> float:
    """Return the largest relative error of a gradient; infinite where only one of the two has it."""
    assert ours.keys() == theirs.keys()
    norms = {name: float(p.grad.norm()) for name, p in theirs.items() if p.grad is not None}
    floor, worst = FLOOR * max(norms.values()), 0.0
    for name, parameter in ours.items():
        grad, expected = parameter.grad, theirs[name].grad
        if grad is None or expected is None:
            there = grad if expected is None else expected
            worst = max(worst, 0.0 if there is None or not there.any() else float("inf"))
        else:
            worst = max(worst, float((grad - expected).norm()) / max(norms[name], floor))
    return worst
