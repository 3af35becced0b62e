"""Test the check for numbers that are not finite: every rank names the poisoned place, and training is undisturbed."""

import dataclasses
import functools
import re
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from terapipe_ds.attention import active_slice
from terapipe_ds.attention.slice_store import SliceEntry
from terapipe_ds.losses import LinearCrossEntropy
from terapipe_ds.models import gpt
from tests.distributed.engines import (
    LENGTH,
    batches,
    engine_of,
    error_of,
    gpt_layers,
    run_training,
    section,
    step_error,
    train,
)
from tests.distributed.harness import rank_pool
from tests.small_models import parts, tuples

PLAN = [8, 9, 6]  # slice 1 has the tokens [8, 17)
WATCHED = section(slices=PLAN, check_finite="every_step", verify="off")
SLICE_0 = r"micro-batch 0, slice 0 \(tokens \[0, 8\) of 23\)"
SLICE_1 = r"micro-batch 0, slice 1 \(tokens \[8, 17\) of 23\)"
Where = tuple[int, int]  # micro-batch, slice


@dataclasses.dataclass
class Poison:
    """Hold a layer's fault, and the slices in which it acts."""

    kind: str = ""
    where: tuple[Where, ...] = ()
    layer: int = -1

    def acts(self, layer: int, *kinds: str) -> bool:
        active = active_slice()
        unit = None if active is None else (active.micro_batch_id, active.slice_id)
        return self.kind in kinds and self.layer == layer and unit in self.where


POISON = Poison()
LOSS = 99


class _Through(torch.autograd.Function):
    """Return numbers unchanged; their gradients may be spoilt."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, scale: Tensor, layer: int) -> Tensor:
        ctx.layer = layer
        return hidden * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        spoilt = grad.clone()
        if POISON.acts(ctx.layer, "gradient"):
            spoilt[0, -1, 0] = float("-inf")
        value = float("nan") if POISON.acts(ctx.layer, "parameter") else 0.0
        return spoilt, torch.full((3,), value, dtype=grad.dtype), None


class Poisoned(nn.Module):
    """Hand on the input, unless `POISON` says otherwise."""

    def __init__(self, layer: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.layer = layer
        self.scale = nn.Parameter(torch.ones(3, dtype=dtype))
        self.product = nn.Linear(16, 16, bias=False, dtype=dtype)
        nn.init.zeros_(self.product.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        out = _Through.apply(hidden, self.scale, self.layer)
        if POISON.acts(self.layer, "product"):  # only the gradient of its weight, 1e100 * 1e300, is infinite
            large = self.product(0 * out + 1e300)
            return out + 1e100 * (large - large.detach())
        out = out + self.product(out)
        if POISON.acts(self.layer, "output", "overflow"):
            out = out.clone()
            out[-1, 0, 3] = float("nan") if POISON.kind == "output" else float("inf")
        return out


def poisoned_layers(dtype: str = "float64") -> list[Any]:
    """0 embedding, 1 poisoned, 2 decoder, 3 poisoned, 4 decoder | 5 decoder, 6 poisoned, 7 decoder, 8 norm, 9 head."""
    embedding, first, second, third, fourth, norm, head = gpt_layers(dtype)
    one, three, six = (LayerSpec(Poisoned, index, getattr(torch, dtype)) for index in (1, 3, 6))
    return [embedding, one, first, three, second, third, six, fourth, norm, head]


def poisoned_loss(logits: Tensor, labels: Tensor) -> Tensor:
    loss = gpt.gpt_loss(logits, labels)
    return loss * float("nan") if POISON.acts(LOSS, "loss") else loss


def spoilt_add_grads(self: SliceEntry, offset: int, dk: Tensor, dv: Tensor, again: bool = False) -> None:
    true_add_grads(self, offset, dk, dv, again)
    if POISON.acts(int(str(self.layer)), "accumulator"):
        self.grads.at(2, 3)[1][0, 0, 0, 0] = float("inf")


true_add_grads = SliceEntry.add_grads


def bad_steps(terapipe: dict[str, Any], poisons: dict[str, Poison], **options: Any) -> dict[str, Any]:
    """A good step, bad ones, a good one: what the bad ones say, and the good ones against a run of their own."""
    data = batches(3)
    layers = functools.partial(poisoned_layers, "float32" if options.keys() & {"bf16", "fp16"} else "float64")
    options = {"loss_fn": poisoned_loss, **options}
    undisturbed = run_training(layers, terapipe, [data[0], data[2]], **options)
    messages, left = {}, 0
    with engine_of(layers(), terapipe, **options) as engine:
        first = train(engine, data[:1])
        for name, poison in poisons.items():
            POISON.__dict__.update(vars(poison))
            with mock.patch.object(SliceEntry, "add_grads", spoilt_add_grads):
                messages[name] = step_error(engine, data[1])
            POISON.kind = ""
            left += engine.slice_store.pool.live_bytes
        last = train(engine, data[2:])
    same = first.returned + last.returned == undisturbed.returned
    error = error_of(last.parameters, undisturbed.parameters)
    return {name: (*message, left, same, error) for name, message in messages.items()}


REENTRANT = {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": True}}
NON_REENTRANT = {"pipeline": {"activation_checkpoint_interval": 2, "use_reentrant": False}}
BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}, "zero_optimization": {"stage": 1}}
BF16_ZERO0 = {"bf16": {"enabled": True}}
LATER: tuple[Where, ...] = ((0, 1), (0, 2), (1, 0), (1, 1), (1, 2))
HERE = ((0, 1),)
FIRST = rf"rank 0: stage 0, layer %d \(Poisoned\), {SLICE_1}, "
SECOND = rf"rank 1: stage 1, layer 6 \(Poisoned\), {SLICE_1}, "
OF_PARAMETER = "backward: the gradient of its parameter "
GROUPS: list[tuple[str, dict[str, Any], dict[str, tuple[Poison, str]]]] = [  # what is poisoned, and what is said of it
    ("seq1f1b", {}, {
        "output": (Poison("output", LATER, 6), rf"{SECOND}forward: its output has NaN\. What"),
        "gradient": (Poison("gradient", ((0, 0), (0, 1), (1, 1)), 3),
                     rf"{FIRST % 3}backward: the gradient of its input is infinite"),
        "parameter": (Poison("parameter", ((0, 1), (0, 0)), 6), rf"{SECOND}{OF_PARAMETER}scale has NaN"),
        "accumulator": (Poison("accumulator", ((0, 1), (0, 0)), 3),
                        rf"stage 1, attention layer 3, {SLICE_1}, backward: the accumulated dV of tokens \[0, 17\) is"),
        "loss": (Poison("loss", ((0, 1), (1, 0)), LOSS),
                 rf"rank 1: stage 1, the loss function, {SLICE_1}, forward: the loss has NaN"),
    }),
    ("gpipe", {**BF16, **NON_REENTRANT}, {
        "output on the first stage": (Poison("overflow", HERE, 1), rf"{FIRST % 1}forward: its output is infinite"),
        "gradient, gpipe": (Poison("gradient", ((0, 1), (1, 1)), 6), rf"{SECOND}backward: the gradient of its input"),
        "gradient, non-reentrant": (Poison("gradient", HERE, 3), rf"{FIRST % 3}backward: the gradient of its input"),
        "parameter, bf16 and ZeRO 1": (Poison("parameter", HERE, 3), rf"{FIRST % 3}{OF_PARAMETER}scale"),
    }),
    ("terapipe", {**BF16, **SUMS, **REENTRANT}, {
        "output, reentrant": (Poison("output", HERE, 6), rf"{SECOND}forward: its output has NaN"),
        "gradient, reentrant": (Poison("gradient", HERE, 6), rf"{SECOND}backward: the gradient of its input"),
        "parameter, sums in fp32": (Poison("parameter", HERE, 3), rf"{FIRST % 3}{OF_PARAMETER}scale"),
    }),
    ("seq1f1b-zb", {}, {  # the last W of a group, slice 0's, computes the product of all its slices
        "parameter of W": (Poison("product", HERE, 6),
                           rf"rank 1: stage 1, layer 6 \(Poisoned\), {SLICE_0}, {OF_PARAMETER}product"),
    }),
    ("seq1f1b", FP16, {
        "output, dynamic loss scale": (Poison("overflow", HERE, 6), rf"{SECOND}forward: its output is infinite"),
    }),
]  # fmt: skip
EXPECTED = {name: said for *_, group in GROUPS for name, (_, said) in group.items()}


def job_bad_steps() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for schedule, options, group in GROUPS:
        poisons = {name: poison for name, (poison, _) in group.items()}
        found |= bad_steps({**WATCHED, "schedule": schedule}, poisons, **options)
    return found


@functools.cache
def all_bad_steps() -> list[dict[str, Any]]:
    return rank_pool(2).run(job_bad_steps)


class TestPlaces:
    @pytest.mark.parametrize("name", EXPECTED)
    def test_the_first_place_is_named_on_every_rank_and_training_goes_on(self, name: str) -> None:
        one, other = (rank[name] for rank in all_bad_steps())
        assert one == other
        kind, message, *after = one
        assert kind == "NonFiniteError" and message.startswith("step 2 computed")
        assert re.search(EXPECTED[name], message), message
        assert after == [0, True, 0.0], "as if the bad step had not been"

    def test_of_two_replicas_one(self) -> None:
        for _, message, *after in rank_pool(2).run(job_one_replica):
            assert re.search(rf"rank 1: stage 0, layer 6 \(Poisoned\), {SLICE_1}, forward", message), message
            assert after == [0, True, 0.0]


def job_one_replica() -> Any:
    mine = Poison("output", HERE, 6) if torch.distributed.get_rank() == 1 else Poison()
    return bad_steps(WATCHED, {"output": mine}, stages=1)["output"]


class Masked(nn.Module):
    """(hidden, mask) -> the same with a mask of its own, which has infinities."""

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *_ = tuples.unpacked(inputs)
        return hidden, torch.full((2, 1, 1, 1), float("-inf"), dtype=hidden.dtype)


def masked_layers() -> list[LayerSpec]:
    embedding, head = LayerSpec(tuples.Embedding), LayerSpec(tuples.Head)
    return [embedding, LayerSpec(Masked), LayerSpec(Masked), head]


# -- it disturbs nothing -----------------------------------------------------------------------------------------------

TIED = functools.partial(gpt_layers, "float32", tied_embedding=True)


def with_linear_head() -> list[Any]:
    """End with torch's own linear layer, which gets the hooks itself, and leaves its product to the loss."""
    return [*gpt_layers()[:-1], parts.seeded(nn.Linear(16, parts.VOCAB_SIZE))]


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "an infinite mask, which is no mistake": (masked_layers, {}),
    "a linear head and a loss of hidden states": (with_linear_head, {"loss_fn": LinearCrossEntropy()}),
    "fp32, reentrant": (TIED, REENTRANT),
    "bf16 and ZeRO 1 with sums in fp32, non-reentrant": (TIED, {**BF16, **SUMS, **NON_REENTRANT}),
}


def job_watched_training() -> dict[str, float]:
    """Bit for bit the same training with and without the check, tied embeddings included."""
    errors = {}
    for name, (layers, options) in KINDS.items():
        plain, watched = (
            run_training(layers, section(slices=PLAN, check_finite=check), batches(2), **options)
            for check in ("off", "every_step")
        )
        errors[name] = error_of(vars(plain), vars(watched))
    return errors


def test_it_changes_no_number() -> None:
    assert rank_pool(2).run(job_watched_training) == [dict.fromkeys(KINDS, 0.0)] * 2


# -- the loss scale of fp16 --------------------------------------------------------------------------------------------


def nan_in_one_slice() -> tuple[str, str, bool]:
    """After a good step, without `check_finite`: what the next one says, and whether it has left the parameters."""
    first, second = batches(2)  # the second one has new labels, which the engine tries
    with engine_of(gpt_layers(), section(slices=PLAN), loss_fn=poisoned_loss, stages=1) as engine:
        train(engine, [first])
        before = [p.detach().clone() for p in engine.module.parameters()]
        POISON.__dict__.update(kind="loss", where=((0, 1),), layer=LOSS)
        kind, text = step_error(engine, second)
        POISON.kind = ""
        same = all(map(torch.equal, engine.module.parameters(), before))
        train(engine, [second])
    return kind, text, same and engine.global_steps == 2


def test_a_slice_whose_loss_is_nan_is_named_before_anything_is_updated() -> None:
    [(kind, text, is_untouched)] = rank_pool(1).run(nan_in_one_slice)
    assert (kind, is_untouched) == ("SliceLossError", True)
    assert re.search(f"^step 2: the loss of {SLICE_1} is NaN, and it counts", text)


def nan_where_steps_are_skipped(precision: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Return the reports of steps with a NaN loss: by `loss_fn`, by a layer, and by a layer in every other step."""
    places = {"loss": [Poison("loss", HERE, LOSS)] * 2, "layer": [Poison("output", HERE, 6)] * 2}
    places["now and then"] = [Poison("output", HERE, 6), Poison(), Poison("output", HERE, 6)]
    said: dict[str, list[tuple[str, str]]] = {}
    for name, poisons in places.items():
        options = {**precision, "loss_fn": poisoned_loss, "stages": 1}
        with engine_of(poisoned_layers("float32"), section(slices=PLAN), **options) as engine:
            batch = batches(1)[0]  # without new labels later, which the engine would try
            train(engine, [batch])
            said[name] = []
            for poison in poisons:
                POISON.__dict__.update(vars(poison))
                said[name].append(step_error(engine, batch))
                POISON.kind = ""
            said[name].append((str(engine.skipped_steps), str(engine.global_steps)))
    return said


class TestLossScale:
    @pytest.mark.sample(1)
    @pytest.mark.parametrize("precision", [FP16, BF16, BF16_ZERO0], ids=["fp16", "bf16", "bf16_zero0"])
    def test_a_loss_of_nan_is_skipped_once_as_the_stock_engine_does(self, precision: dict[str, Any]) -> None:
        [said] = rank_pool(1).run(nan_where_steps_are_skipped, precision=precision)
        [(kind, text), *_] = said["loss"]
        assert kind == "SliceLossError" and "outputs of the last layer are finite" in text
        assert re.search(f"^step 2: the loss of {SLICE_1} is NaN", text)
        [once, (kind, text), steps] = said["layer"]
        assert once == ("", "") and kind == "SliceLossError" and steps == ("1", "2")
        assert re.search(f"^step 3: the loss of {SLICE_1} is NaN.*The step before had such a loss as well", text)
        assert said["now and then"] == [("", "")] * 3 + [("2", "4")]


assert sum(PLAN) == LENGTH
