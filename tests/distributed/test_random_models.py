"""Test random models as users write them: equal to a plain loop, or refused before the first step."""

import functools
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from terapipe_ds.attention import active_slice
from terapipe_ds.schedule import SCHEDULE_NAMES
from tests.distributed.cases import BF16_EPS, relative_error, worst_error
from tests.distributed.engines import Run, build, train
from tests.distributed.harness import RankFailure, rank_pool

VOCAB, WIDTH, HEADS, STEPS, LEARNING_RATE = 17, 16, 2, 2, 0.05
EXACT, FP32, KINKED = 1e-10, 1e-5, 0.25
ACTIVATIONS = ("gelu", "relu in place", "relu_", "silu in place", "add_", "leaky in place", "mul_")
LOSSES = ("mean", "sum", "smoothed", "temperature", "padding", "padding unsaid", "class weights")
REFUSED = ("padding unsaid", "class weights")
"""Losses that weigh labels otherwise than the section says."""


@dataclass(frozen=True)
class Drawn:
    """Hold a model and how it is trained; `seed` draws weights and data."""

    seed: int
    blocks: tuple[tuple[str, bool, bool], ...]  # activation, biases, frozen
    loss: str
    sparse: bool
    frozen_embedding: bool
    precision: str
    schedule: str
    slices: int
    micro_batches: int
    rows: int
    length: int
    recompute: str

    @property
    def is_refused(self) -> bool:
        """Return whether it must not train."""
        return self.loss in REFUSED and self.slices > 1


def draw(seed: int) -> Drawn:
    """Return the case with that number."""
    rng = random.Random(seed)
    schedule = rng.choice([name for name in SCHEDULE_NAMES if name != "dapple"])
    blocks = tuple(
        (rng.choice(ACTIVATIONS), rng.random() < 0.7, rng.random() < 0.2) for _ in range(rng.choice((2, 3, 4)))
    )
    sparse = rng.random() < 0.2
    case = Drawn(
        seed,
        blocks,
        rng.choice(LOSSES),
        sparse,
        not sparse and rng.random() < 0.2,
        rng.choice(("fp64", "fp64", "fp32")),
        schedule,
        rng.choice((1, 2, 3, 4, 6)),
        rng.choice((1, 2, 4)),
        rng.choice((1, 2, 3)),
        rng.choice((12, 17, 24)),
        rng.choice(("off", "off", "full")),
    )
    # DeepSpeed's optimizer for bf16 takes no sparse gradients. It also empties the gradients of a loss's parameters
    # when a backward reaches the model's outputs, and so does not train them, in its own engine either.
    is_bf16 = rng.random() < 0.3 and not sparse and case.loss != "temperature"
    return replace(case, precision="bf16") if is_bf16 else case


class Embedding(nn.Module):
    """Embed tokens and learned positions."""

    def __init__(self, case: Drawn) -> None:
        super().__init__()
        torch.manual_seed(case.seed)
        self.word = nn.Embedding(VOCAB, WIDTH, sparse=case.sparse)
        self.place = nn.Embedding(64, WIDTH)
        if case.frozen_embedding:
            self.word.weight.requires_grad_(False)
        self.to(_dtype(case))

    def forward(self, ids: Tensor) -> Tensor:
        active = active_slice()
        start = 0 if active is None else active.start
        return self.word(ids) + self.place(torch.arange(start, start + ids.shape[1]))


class Block(nn.Module):
    """Run a decoder layer as users write it, whose activation may work in place."""

    def __init__(self, case: Drawn, index: int) -> None:
        super().__init__()
        torch.manual_seed(1000 * case.seed + index)
        self.activation, bias, frozen = case.blocks[index]
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH, bias=bias)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=bias), nn.Linear(2 * WIDTH, WIDTH, bias=bias)
        if frozen:
            self.requires_grad_(False)
            self.up.weight.requires_grad_(True)
        self.to(_dtype(case))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        attended = self.out(mixed)
        attended += x  # in place, on the output of a linear layer
        result = self.down(self._activated(self.up(self.between(attended))))
        result += attended
        return result

    def _activated(self, x: Tensor) -> Tensor:
        if self.activation == "relu in place":
            return F.relu(x, inplace=True)
        if self.activation == "silu in place":
            return F.silu(x, inplace=True)
        if self.activation == "leaky in place":
            return F.leaky_relu(x, 0.1, inplace=True)
        if self.activation == "relu_":
            return x.relu_()
        if self.activation == "add_":
            return F.gelu(x.add_(0.1))
        return x.mul_(0.5).tanh() if self.activation == "mul_" else F.gelu(x)


class Head(nn.Module):
    """Apply norm and output matrix."""

    def __init__(self, case: Drawn) -> None:
        super().__init__()
        torch.manual_seed(case.seed + 7)
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=case.seed % 2 == 0)
        self.to(_dtype(case))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class Temperature(nn.Module):
    """Compute cross entropy of logits times a learned number."""

    def __init__(self, case: Drawn) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(1, dtype=_dtype(case)))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return _cross_entropy(logits * self.log_scale.exp(), labels)


def _dtype(case: Drawn) -> torch.dtype:
    return torch.float64 if case.precision == "fp64" else torch.float32


def _cross_entropy(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    if "weight" in options:
        options["weight"] = options["weight"].to(logits.dtype)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def loss_of(case: Drawn) -> Any:
    if case.loss == "temperature":
        return Temperature(case)
    options: dict[str, dict[str, Any]] = {
        "sum": {"reduction": "sum"},
        "smoothed": {"label_smoothing": 0.1},
        "padding": {"ignore_index": 0},
        "padding unsaid": {"ignore_index": 0},
        "class weights": {"weight": torch.linspace(0.5, 2.0, VOCAB, dtype=_dtype(case))},
    }
    return functools.partial(_cross_entropy, **options.get(case.loss, {}))


def layers_of(case: Drawn) -> list[Any]:
    blocks = [LayerSpec(Block, case, index) for index in range(len(case.blocks))]
    return [LayerSpec(Embedding, case), *blocks, LayerSpec(Head, case)]


def data_of(case: Drawn) -> list[list[tuple[Tensor, Tensor]]]:
    """Return the batches: rows differ in how many of their labels count."""
    generator = torch.Generator().manual_seed(case.seed)
    batches = []
    for _ in range(STEPS):
        batch = []
        for _ in range(case.micro_batches):
            text = torch.randint(1, VOCAB, (case.rows, case.length + 1), generator=generator)
            labels = text[:, 1:].clone()
            if case.loss.startswith("padding"):
                labels[0, case.length // 2 :] = 0
            elif case.loss != "class weights":
                labels[0, : case.length // 3] = -100
            batch.append((text[:, :-1].contiguous(), labels))
        batches.append(batch)
    return batches


def section_of(case: Drawn) -> dict[str, Any]:
    """Return the `terapipe` section; everything else has its default."""
    section: dict[str, Any] = {
        "enabled": True,
        "schedule": case.schedule,
        "slices": case.slices,
        "granularity_tokens": 1,
        "recompute": case.recompute,
    }
    if case.loss == "sum":
        section["loss_reduction"] = "sum"
    if case.loss == "padding":
        section["ignore_index"] = 0
    return section


def reference(case: Drawn, dtype: torch.dtype) -> Run:
    """Train in a plain loop whose layers compute in `dtype`; parameters are named as by a PipelineModule.

    The optimizer has the parameters in the precision of the case, as mixed precision has them.
    """
    model = nn.Sequential(*(spec.build() for spec in layers_of(case)))
    loss_fn, run = loss_of(case), Run()
    named = dict(model.named_parameters())
    if isinstance(loss_fn, nn.Module):
        named.update({f"loss_fn.{name}": p for name, p in loss_fn.named_parameters()})
    kept = {name: p.detach().clone() for name, p in named.items()}
    model.to(dtype)
    if isinstance(loss_fn, nn.Module):
        loss_fn.to(dtype)
    for batch in data_of(case):
        gradients: dict[str, Tensor] = {}
        losses = []
        for inputs, labels in batch:
            loss = loss_fn(model(inputs), labels) / len(batch)
            loss.backward()
            losses.append(float(loss.detach()))
            for name, p in named.items():
                if p.grad is not None:
                    gradient = p.grad.to_dense().to(kept[name].dtype)
                    gradients[name] = gradients[name] + gradient if name in gradients else gradient
                    p.grad = None
        with torch.no_grad():
            for name, gradient in gradients.items():
                kept[name] -= LEARNING_RATE * gradient
                named[name].copy_(kept[name])
        run.returned.append(sum(losses))
        run.gradients.append(gradients)
    run.parameters = {name: p.detach() for name, p in named.items()}
    return run


def errors_of(run: Run, expected: Run) -> dict[str, float]:
    """Return the largest error of each kind among this rank's values."""
    returned = max(relative_error(a, b) for a, b in zip(run.returned, expected.returned, strict=True))
    gradients = [worst_error(a, b).error for a, b in zip(run.gradients, expected.gradients, strict=True)]
    return {
        "returned": max(returned - 1e-6, 0.0),  # DeepSpeed rounds numbers for other ranks to fp32
        "gradient": max(gradients),
        "parameter": worst_error(run.parameters, expected.parameters).error,
    }


def job_case(seed: int) -> tuple[str, list[str]]:
    """Train a case on this rank; return ("equal", the differences), or the error."""
    case = draw(seed)
    exact = _dtype(case)
    expected = reference(case, exact)
    limits = dict.fromkeys(("returned", "gradient", "parameter"), EXACT if case.precision == "fp64" else FP32)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case.rows,
        "gradient_accumulation_steps": case.micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
    }
    if case.precision == "bf16":
        settings["bf16"] = {"enabled": True}
        whole = errors_of(reference(case, torch.bfloat16), expected)
        limits = {kind: 2 * error + BF16_EPS for kind, error in whole.items()}
        if any("relu" in activation or "leaky" in activation for activation, *_ in case.blocks):
            # rounding turns a unit on or off in slices alone, and with it one of the few terms of a small gradient
            limits["gradient"] = max(limits["gradient"], KINKED)
    try:
        engine = build(layers_of(case), section_of(case), loss_fn=loss_of(case), **settings)
        run = train(engine, data_of(case))
    except Exception as error:
        return f"{type(error).__name__}: {error}", []
    engine.destroy()
    errors = errors_of(run, expected)
    return "equal", [f"{kind} {error:.1e} off" for kind, error in errors.items() if not error <= limits[kind]]


def verdict_of(seed: int) -> str:
    """Return "equal", "refused", or the problem."""
    case = draw(seed)
    try:
        found = rank_pool(2).run(job_case, seed=seed)
    except RankFailure as failure:
        return f"failed: {failure.first.detail.splitlines()[-1] if failure.first.detail else failure.first.status}"
    words = {word for word, _ in found}
    if words == {"equal"}:
        differences = ", ".join(sorted({each for _, errors in found for each in errors}))
        if case.is_refused:
            return f"trained ({differences}), though its loss cannot be cut as the section says"
        return f"differs: {differences}" if differences else "equal"
    text = next(word for word, _ in found if word != "equal")
    is_named = text.split(":")[0] in ("VerifyError", "TeraPipeConfigError")
    if not is_named or "equal" in words:
        return f"raised {text.splitlines()[0]}"
    return "refused" if case.is_refused else f"refused, though healthy: {text.splitlines()[0]}"


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(200))
def test_a_model_trains_as_in_a_plain_loop_or_is_refused(seed: int) -> None:
    assert verdict_of(seed) == ("refused" if draw(seed).is_refused else "equal")


def test_a_sparse_embedding_at_both_ends_of_chimera_with_one_micro_batch() -> None:
    """The other direction has no micro-batch, and no gradient: a sparse one waited for a dense one without end."""
    case = draw(118)
    assert (case.sparse, case.schedule, case.micro_batches) == (True, "chimera-seq", 1)
    assert verdict_of(118) == "equal"
