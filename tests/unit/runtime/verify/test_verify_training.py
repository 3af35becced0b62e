"""A layer is compared as it trains: with batch statistics and hooks, without its dropout, and by what it keeps."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests.small_models import faulty
from tests.small_models.parts import WIDTH
from tests.unit.runtime.verify.test_verify_layers import LENGTH, Findings, _checkpoint, verify
from tests.zoo import ZOO
from tests.zoo.members import BACKWARD
from tests.zoo.training import COUNTED, DRAWN, ONCE, ZERO, Keeping, clipped, generator, keeping, then

TORCH = torch.Generator()


def outside(it: Any, x: Tensor) -> Tensor:
    """Draw where no operation of torch shows it, in training."""
    if it.training:
        state = torch.get_rng_state()
        torch.manual_seed(int(state.sum()))
        x = x * (1.0 + float(state[:99].sum()))
    return x


def hook_module(it: Any) -> None:
    it.norm.register_full_backward_hook(lambda _, gradients, __: tuple(map(clipped, gradients)))


FAULTS: dict[str, tuple[LayerSpec, tuple[str, ...]]] = {
    **{
        n: (each.layers[2], each.says)
        for n, each in ZOO.items()
        if each.layers[2].typename is Keeping and each.error == "VerifyError"
    },
    "drop by torch": (keeping(lambda _, x: x * (torch.rand(()) < 0.9)), (ONCE,)),
    "mean in a parameter": (
        keeping(
            then(lambda it, x: it.mean.mul_(0.9).add_(0.1 * x.detach().mean())),
            lambda it: setattr(it, "mean", nn.Parameter(ZERO.clone(), requires_grad=False)),
        ),
        ("buffer mean differs",),
    ),
    "drop by another variable": (keeping(lambda _, x: x * (torch.rand((), generator=TORCH) < 0.9)), (ONCE,)),
    "dropped features": (keeping(lambda _, x: F.dropout1d(x.transpose(1, 2), 0.1).transpose(1, 2)), (ONCE,)),
    "clipped by a module": (keeping(lambda it, x: it.norm(x), hook_module, norm=lambda: nn.Identity()), (BACKWARD,)),
}


def verify_one(spec: LayerSpec, dtype: torch.dtype = torch.float64, **options: Any) -> Findings:
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    torch.manual_seed(0)  # by chance a layer that draws by itself would fail in another comparison
    return verify([nn.Identity(), spec.build().to(dtype)], (x.to(dtype).requires_grad_(),), **options)


@pytest.mark.parametrize("checkpoint", [None, _checkpoint])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_training_is_found(fault: str, checkpoint: Any) -> None:
    spec, says = FAULTS[fault]
    found = verify_one(spec, checkpoint=checkpoint)
    assert len(found.findings) == 1 and all(words in str(found.findings[0]) for words in says), found


DRAWS, PLAIN, EVALUATED = (1, 0), (0, 0), (0, 1)  # draws constants, is compared in evaluation mode
HEALTHY: dict[str, tuple[LayerSpec, tuple[int, int]]] = {
    "dropout": (keeping(lambda _, x: F.dropout(x, 0.5)), DRAWS),
    "captured dropout": (keeping(lambda _, x: torch.dropout(x, 0.5, True)), DRAWS),
    "dropout of several widths": (  # by which a slice draws as many numbers at a time as the whole elsewhere
        keeping(lambda _, x: x * sum(F.dropout(x.new_ones(*x.shape[:2], n)).mean() for n in (14, 35, 40, 56))),
        DRAWS,
    ),
    "alpha dropout": (keeping(lambda _, x: F.alpha_dropout(x, 0.5, True)), DRAWS),
    "noise": (keeping(lambda _, x: x + torch.randn_like(x) + torch.empty_like(x).uniform_(-1, 1)), DRAWS),
    "noise by its own generator": (
        keeping(lambda it, x: x + torch.rand(x.shape, generator=it.own, dtype=x.dtype), own=generator),
        DRAWS,
    ),
    "choice by noise": (keeping(lambda _, x: x * F.gumbel_softmax(x, hard=True)), DRAWS),
    "chosen tokens": (keeping(lambda _, x: x * (1 + torch.randint_like(x, 3))), DRAWS),
    "leaky at random": (keeping(lambda it, x: F.rrelu(x, training=it.training)), EVALUATED),
    "noise that nothing shows": (keeping(outside), EVALUATED),
    "counted tokens": (keeping(then(lambda it, x: it.seen.add_(x.shape[1])), seen=torch.zeros(())), PLAIN),
    "large seed": (keeping(then(lambda it, _: setattr(it, "seed", it.seed * 5 % 2**64 + 1)), seed=2**64 - 1), PLAIN),
    "large constant": (keeping(lambda _, x: x, seed=2**70), PLAIN),
    "limit that is not yet known": (keeping(lambda _, x: x, limit=torch.full((2,), math.nan)), PLAIN),
    "masked gradient": (
        keeping(lambda _, x: x, lambda it: it.inner.register_hook(lambda g: g * (torch.arange(WIDTH) % 2))),
        PLAIN,
    ),
    "shift whose gradient is rounding": (
        keeping(lambda it, x: (x + it.shift).softmax(-1), lambda it: setattr(it, "shift", nn.Parameter(ZERO.clone()))),
        PLAIN,
    ),
    "halved gradient": (keeping(then(lambda _, x: x.requires_grad and x.register_hook(lambda g: g / 2))), PLAIN),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_layer_passes(name: str, dtype: torch.dtype) -> None:
    spec, (draws, notes) = HEALTHY[name]
    found = verify_one(spec, dtype)
    assert (found.findings, found.without_dropout, len(found.notes)) == ([], draws, notes), found
    assert all("layer 1 (Keeping): compared in evaluation mode, without what" in note for note in found.notes)


def test_attention_dropout_is_compared_with_every_key() -> None:
    class Dropping(faulty.Base):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return faulty.sliced_attention(q, k, v, self.index, dropout_p=0.2)

    found = verify([Dropping(1).double()])
    assert (found.findings, found.notes, found.without_dropout) == ([], [], 1)


NAMED = {
    **{name: (spec, says) for name, (spec, lost, says) in COUNTED.items() if not lost},
    "drop by Python": (keeping(lambda _, x: x if random.random() < 0.9 else 0 * x), DRAWN),
    "drop by NumPy": (keeping(lambda _, x: x if np.random.rand() < 0.9 else 0 * x), DRAWN),
    "log now and then": (keeping(then(lambda _, x: random.random() < 1e-9)), DRAWN),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_may_be_as_meant_is_named(name: str) -> None:
    spec, says = NAMED[name]
    found = verify_one(spec)
    assert found.findings == [] and [says in note for note in found.notes] == [True] * bool(says), found.notes


def test_a_number_that_counts_tokens_or_remembers_a_length_is_not_named() -> None:
    def remember(it: Any, x: Tensor) -> None:
        it.length, it.seen = x.shape[1], it.seen + x.shape[1]

    found = verify_one(keeping(then(remember), length=3, seen=0))
    assert (found.findings, found.notes) == ([], [])


def test_kernels_by_other_names_are_refused() -> None:
    def attend(_: Any, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return x + 1e-30 * torch._scaled_dot_product_attention_math(q, q, q)[0].transpose(1, 2).flatten(2)

    [finding] = verify_one(keeping(attend)).findings
    assert "raised PlainAttentionError: plain attention was called" in str(finding)
