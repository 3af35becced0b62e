"""Train tiny models of transformers on stages, and the same models whole by a plain loop. Runs inside the ranks."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as torch_dist
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import terapipe_ds
from terapipe_ds.models.gpt import gpt_loss
from terapipe_ds.models.hugging_face.layers import Piece
from terapipe_ds.runtime.layout.layer_names import NOTHING_TRAINED
from tests.distributed import engines
from tests.distributed.cases import relative_error, worst_error
from tests.hugging_face_families import config_of
from tests.unit.models.hugging_face.sliced_model import drawn_batch, in_fp64, loss_of, whole_model

STEPS, MICRO_BATCHES = 2, 2
EPS = 1e-4  # of Adam: a smaller one would turn gradients that are only rounding into steps
ADAM = {"type": "AdamW", "params": {"lr": engines.LEARNING_RATE, "eps": EPS, "weight_decay": 0.0, "torch_adam": True}}


engine_of = functools.partial(engines.started, optimizer=ADAM)


def batches(vocab_size: int, rows: int = 2) -> list[list[dict[str, Tensor]]]:
    """Return the dict batches of each step, as a Hugging Face collator makes them."""
    drawn = functools.partial(drawn_batch, vocab_size, rows=rows)
    return [[drawn(seed=10 * step + index) for index in range(MICRO_BATCHES)] for step in range(STEPS)]


def weights_of_all_stages(module: Any) -> dict[str, Tensor]:
    """Return the weights of all stages by their names in the model of transformers; tied ones once."""
    names, local = module.checkpoint_names(), dict(module.named_parameters())
    assert names.keys() == local.keys()
    everyone: list[Any] = [None] * torch_dist.get_world_size()
    torch_dist.all_gather_object(everyone, {names[name]: p.detach().clone() for name, p in local.items()})
    return {name: weight for stage in everyone for name, weight in stage.items()}


def train_family(
    family: str,
    terapipe: dict[str, Any] | None,
    stages: int = 2,
    changes: dict[str, Any] | None = None,
    wide: bool = True,
    **options: Any,
) -> tuple[dict[str, float], list[str]]:
    """Return the largest errors on this rank against the whole model in this process; and how its decoder layers run.

    `wide`: only in fp64, which does not reach forwards inside a backward.
    """
    with in_fp64() if wide else contextlib.nullcontext():
        config = config_of(family)
        module = terapipe_ds.from_config(config, num_stages=stages, dtype=torch.float64, **options)
        whole = whole_model(config, weights_of_all_stages(module))
        data = batches(config.get_text_config().vocab_size)
        with engine_of(module, terapipe, **(changes or {})) as engine:
            run = engines.train(engine, tuples(module, data))
            names = module.checkpoint_names()
        return differences(run, names, *train_whole(whole, data)), ways_of(module)


def ways_of(module: Any) -> list[str]:
    layers = [each.find_way() for each in module.modules() if hasattr(each, "find_way")]
    return [("fast" if way.is_fast else "slow") + ("+states" if way.has_states else "") for way in layers]


def train_whole(
    model: Any, data: Sequence[Sequence[Any]], clipping: float = 0.0, loss_of: Callable[[Any, Any], Tensor] = loss_of
) -> tuple[list[float], list[dict[str, Tensor]], Any]:
    """Return losses and gradients of each step of a plain loop, and the parameters at its end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=engines.LEARNING_RATE, eps=EPS, weight_decay=0.0)
    losses, gradients = [], []
    for step in data:
        optimizer.zero_grad()
        loss = sum(loss_of(model, batch) for batch in step) / len(step)  # type: ignore[var-annotated]
        loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        losses.append(float(loss))
        if clipping:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)
        optimizer.step()
    return losses, gradients, dict(model.named_parameters())


def tuples(module: Any, data: Any) -> list[Any]:
    return [[module.to_tuple(batch) for batch in step] for step in data]


def differences(
    run: engines.Run, names: dict[str, str], losses: list[float], gradients: list[dict[str, Tensor]], parameters: Any
) -> dict[str, float]:
    """Return the largest relative errors on this rank; a stage may train no adapters."""
    for each in (run.parameters, *run.gradients):
        each.pop(NOTHING_TRAINED, None)

    def error_of(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
        theirs = {key.removeprefix("base_model.model."): value for key, value in theirs.items()}
        expected = {name: theirs[key].detach() for name, key in names.items() if key in theirs}
        assert ours.keys() == expected.keys(), "some have no gradient, or only here"
        return worst_error(ours, expected).error

    return {
        "loss": max(relative_error(a, b) for a, b in zip(run.losses or losses, losses, strict=True)),
        "returned": max(relative_error(a, b) for a, b in zip(run.returned, losses, strict=True)),
        "gradient": max(error_of(a, b) for a, b in zip(run.gradients, gradients, strict=True)),
        "parameter": error_of(run.parameters, parameters),
    }


def dtypes_of_buffers(family: str) -> tuple[dict[str, torch.dtype], dict[str, torch.dtype]]:
    """Return the dtypes of saved buffers of layers in an engine, and in DeepSpeed's own with the model of transformers.

    The user asks for bf16 in both.
    """
    changes: dict[str, Any] = {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}}
    config = config_of(family)
    with engine_of(terapipe_ds.from_config(config, num_stages=1), engines.unchecked(), **changes) as engine:
        pieces = [piece.runs for piece in engine.module.modules() if isinstance(piece, Piece)]
        held = {name: module for runs in pieces for name, module in runs.items()}
        ours = {f"{name}.{key}": each.dtype for name, module in held.items() for key, each in module.named_buffers()}
    given = {"train_micro_batch_size_per_gpu": 1, "optimizer": ADAM, **changes}
    engine, *_ = deepspeed.initialize(model=AutoModelForCausalLM.from_config(config), config=given)
    theirs = {name: each.dtype for name, each in engine.module.named_buffers() if name in ours}
    engine.destroy()
    return ours, theirs


def refusal_of(family: str, **fields: Any) -> tuple[str, str]:
    config = config_of(family)
    for name, value in fields.items():
        setattr(config, name, value)
    return engines.raised_by(lambda: terapipe_ds.from_config(config, num_stages=2))


def refusal_of_own_loss(loss_fn: Any = None) -> tuple[str, str]:
    """Return how a class whose loss has a term more is refused."""

    def loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        return gpt_loss(logits[:, :-1], labels[:, 1:]) + 0.1 * logits.logsumexp(-1).square().mean()

    with mock.patch.object(LlamaForCausalLM, "loss_function", staticmethod(loss)):
        return engines.raised_by(lambda: terapipe_ds.from_config(config_of("llama"), num_stages=1, loss_fn=loss_fn))


def bounds_of(dims: list[int] | None = None, **options: Any) -> list[int]:
    """Return the bounds of a model; `dims` make a topology, which cannot be sent to ranks."""
    options |= {} if dims is None else {"topology": ProcessTopology(["pipe", "data"], dims)}
    return list(terapipe_ds.from_config(config_of("llama"), **options).parts)
