"""What a stage holds of a batch, labels in several tensors, and pipelines beside each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec
from torch import Tensor

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.models import gpt
from terapipe_ds.runtime.engine.engine import TeraPipeEngine
from terapipe_ds.schedule.action import Kind
from tests.distributed.engines import (
    EXACT,
    FP32_SCALAR,
    Batch,
    Run,
    batches,
    both,
    build,
    engine_of,
    gpt_layers,
    micro_batch,
    run_training,
    section,
    train,
)
from tests.distributed.harness import rank_pool


class WeightedRows:
    """Labels ``(row weights [B], targets [B, L])``: the first tensor has no sequence."""

    def __call__(self, logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
        row_weights, targets = labels
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        return (losses * row_weights[:, None]).sum() / (row_weights.sum() * targets.size(1))


def _with_row_weights(data: list[Batch]) -> list[Batch]:
    weights = torch.tensor([0.25, 3.0], dtype=torch.float64)
    return [[(inputs, (weights, labels)) for inputs, labels in batch] for batch in data]


def _train_weighted() -> tuple[Run, Run]:
    data = _with_row_weights(batches(2, masked=False))
    mean = section(loss_reduction="mean")
    return both(lambda engine: train(engine, data), terapipe=mean, loss_fn=WeightedRows())


def test_the_first_label_tensor_may_lack_the_sequence() -> None:
    for stock, ours in rank_pool(2).run(_train_weighted):
        assert ours.losses == pytest.approx(stock.losses, rel=EXACT)
        for name, gradient in stock.gradients[0].items():
            assert torch.allclose(ours.gradients[0][name], gradient, rtol=1e-9, atol=1e-12), name


def _held_at_the_end(schedule: str) -> dict[str, Any]:
    """What still lives of a batch at its first backward and at the reduction of gradients."""
    held: dict[str, Any] = {"outputs": [], "inputs": None, "labels": None}
    with engine_of(gpt_layers(), section(schedule=schedule)) as engine:
        assert isinstance(engine, TeraPipeEngine)
        backward, reduce = engine._ACTIONS[Kind.BACKWARD], engine._ACTIONS[Kind.REDUCE_TIED_GRADS]

        def before_backward(self: TeraPipeEngine, action: Any) -> None:
            held["outputs"].append([s.outputs is None for s in self._batch.current.slices.values()])
            backward(self, action)

        def before_reduce(self: TeraPipeEngine, action: Any) -> None:
            held["inputs"] = [m.inputs is None for m in self._batch.current.micro_batches]
            held["labels"] = [m.labels is None for m in self._batch.current.micro_batches]
            reduce(self, action)

        engine._ACTIONS = {  # type: ignore[misc]
            **engine._ACTIONS,
            Kind.BACKWARD: before_backward,
            Kind.REDUCE_TIED_GRADS: before_reduce,
        }
        engine.train_batch(iter(batches(1, num_micro_batches=2)[0]))
        held["is_last"] = engine.is_last_stage()
    return held


def test_a_stage_lets_go_of_what_it_needs_no_more() -> None:
    for held in rank_pool(2).run(_held_at_the_end, schedule="terapipe"):
        assert all(held["inputs"]) and all(held["labels"])
        assert len(held["outputs"]) == 6
        if held["is_last"]:  # the loss is all that its backward starts from
            assert all(all(gone) for gone in held["outputs"])
        else:
            assert not any(held["outputs"][0])


class MixtureLayer(torch.nn.Module):
    """A mixture of experts with capacity, as DeepSpeed has it."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(hidden_size=16, expert=torch.nn.Linear(16, 16), num_experts=2, k=1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.moe(hidden)[0]


def _build_mixture() -> str:
    layers = gpt_layers("float32")
    with pytest.raises(TeraPipeConfigError) as caught:
        build([*layers[:2], MixtureLayer(), *layers[2:]], section(), stages=1)
    return str(caught.value)


def test_experts_with_capacity_are_refused() -> None:
    for message in rank_pool(1).run(_build_mixture):
        assert "deepspeed.moe" in message and "terapipe.enabled" in message


class RecurrentLayer(torch.nn.GRU):
    """A layer that hands its state from token to token."""

    def __init__(self) -> None:
        super().__init__(16, 16, batch_first=True, dtype=torch.float64)

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden)[0]


def _recurrent_layers() -> list[Any]:
    layers = gpt_layers()
    return [*layers[:2], LayerSpec(RecurrentLayer), *layers[2:]]


def _build_recurrent() -> str:
    with pytest.raises(TeraPipeConfigError) as caught:
        build(_recurrent_layers(), section())
    return str(caught.value)


def test_a_recurrent_layer_of_one_stage_is_refused_on_every_rank() -> None:
    for message in rank_pool(2).run(_build_recurrent):
        assert "on rank 0: layers that mix the tokens" in message and "(RecurrentLayer)" in message


def _uneven_replicas() -> tuple[list[str], float]:
    """Two pipelines; the data of the second end one step earlier. Afterwards both train again."""
    with engine_of(gpt_layers(), section()) as engine:
        replica = engine.grid.get_data_parallel_rank()
        data = iter([micro_batch(seed) for seed in range(2 * (3 - replica))])
        events: list[str] = []
        for _ in range(4):
            try:
                engine.train_batch(data)
                events.append("step")
            except StopIteration:
                events.append("end")
                break
        return events, float(engine.train_batch(iter(batches(1, first_seed=9)[0])))


def test_replicas_stop_at_the_first_end_of_data() -> None:
    results = rank_pool(4).run(_uneven_replicas)
    assert [events for events, _ in results] == [["step", "step", "end"]] * 4
    assert [loss for _, loss in results] == pytest.approx([results[0][1]] * 4, rel=FP32_SCALAR)


def _one_pipeline_has_bad_data() -> str:
    with engine_of(gpt_layers(), section()) as engine:
        inputs, labels = micro_batch(0)
        if engine.grid.get_data_parallel_rank() == 1:
            inputs = inputs[:, :-3]
        try:
            engine.train_batch(iter([(inputs, labels)] * 2))
        except ValueError as error:
            return str(error)
        return "trained"


def test_bad_data_of_one_pipeline_are_an_error_in_all() -> None:
    for message in rank_pool(4).run(_one_pipeline_has_bad_data):
        assert "no input tensor has the sequence" in message


class Captured(gpt.CausalSelfAttention):
    """Attention by a name that was bound long before any guard."""

    fused = staticmethod(F.scaled_dot_product_attention)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.qkv(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        out = type(self).fused(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2))


def _captured_attention(evaluate: bool, **changes: Any) -> tuple[str, str]:
    """What a first batch is refused with: the class of the error and its words."""
    ours = gpt.CausalSelfAttention
    gpt.CausalSelfAttention = Captured  # type: ignore[misc]
    try:
        with engine_of(gpt_layers(), section(**changes), stages=1) as engine:
            data = iter(batches(1)[0])
            try:
                engine.eval_batch(data) if evaluate else engine.train_batch(data)
            except Exception as error:
                return type(error).__name__, str(error)
            return "", "trained"
    finally:
        gpt.CausalSelfAttention = ours  # type: ignore[misc]


@pytest.mark.parametrize(
    ("evaluate", "changes", "refusal"),
    [(False, {}, "VerifyError"), (False, {"verify": "off"}, "PlainAttentionError"), (True, {}, "PlainAttentionError")],
)
def test_plain_attention_by_a_captured_name_is_refused(evaluate: bool, changes: dict[str, Any], refusal: str) -> None:
    """The check of the first batch comes first; evaluations and jobs without it have the guard."""
    ((name, message),) = rank_pool(1).run(_captured_attention, evaluate=evaluate, **changes)
    assert name == refusal
    assert "plain attention was called on slice [0, 8)" in message and "sliced_attention" in message


def _two_engines() -> tuple[list[float], list[float]]:
    """Two sliced engines in one process, their steps in turns, against one alone."""
    with engine_of(gpt_layers(), section()) as first, engine_of(gpt_layers(), section(slices=5)) as second:
        turns = [
            (float(first.train_batch(iter(batch))), float(second.train_batch(iter(batch)))) for batch in batches(2)
        ]
    alone = run_training(gpt_layers, None, batches(2)).returned
    assert all(abs(a - b) < 1e-6 for a, b in turns)
    return [a for a, _ in turns], alone


def test_two_engines_in_one_process() -> None:
    for turns, alone in rank_pool(2).run(_two_engines):
        assert turns == pytest.approx(alone, rel=1e-6)
