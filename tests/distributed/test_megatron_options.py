"""What a user may choose with MegatronGPT: dropout, layer specs, whole logits, the engine. Right, or refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import deepspeed
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("megatron.core")

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

import terapipe_ds
from terapipe_ds.attention import sliced_attention
from terapipe_ds.models.megatron import MegatronConfigError, MegatronGPT, VocabParallelLoss, sliced_core_attention
from terapipe_ds.models.megatron.gradients import ReplicatedGradientError, require_equal_replicas
from tests.distributed import engines
from tests.distributed.harness import RankFailure, rank_pool

LENGTH = 24
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]}


def model(tensor: int, stages: int, options: dict[str, Any] | None = None, **changes: Any) -> MegatronGPT:
    """`changes` go into the TransformerConfig, `options` to MegatronGPT."""
    fields: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "use_cpu_initialization": True, "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32, "init_method_std": 0.3, "bias_dropout_fusion": False,
        "tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": stages,
    }  # fmt: skip
    config = TransformerConfig(**{**fields, **changes})
    return MegatronGPT(
        config, vocab_size=32, max_sequence_length=LENGTH, position_embedding_type="rope", seed=5, **(options or {})
    )


@contextlib.contextmanager
def engine_of(module: MegatronGPT, terapipe: dict[str, Any] | None) -> Iterator[Any]:
    config = engines.config()
    if terapipe is not None:
        config["terapipe"] = terapipe
    start = deepspeed.initialize if terapipe is None else terapipe_ds.initialize
    engine = start(model=module, model_parameters=module.parameters(), config=config)[0]
    try:
        yield engine
    finally:
        engine.destroy()


def train(terapipe: dict[str, Any] | None, tensor: int = 1, stages: int = 1, **changes: Any) -> list[float]:
    with engine_of(model(tensor, stages, **changes), terapipe) as engine:
        data = engines.batches(3, length=LENGTH)
        return [float(engine.train_batch(iter(batch))) for batch in data]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_differs_where_tokens_or_heads_differ_and_is_replayed(sequence_parallel: bool) -> None:
    """The engine compares the gradients of replicated parameters after the first batch: with different masks on
    tensor-parallel ranks, where they hold the same tokens, it would raise. Recomputing replays the masks, so the losses
    are the same to the last bit; another seed or no dropout gives others."""
    pool = rank_pool(2)
    options: dict[str, Any] = {"terapipe": engines.section(slices=[8, 10, 6]), "tensor": 2,
                               "sequence_parallel": sequence_parallel}  # fmt: skip
    dropout = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
    plain = pool.run(train, **options, **dropout)
    assert plain[0] == plain[1]
    assert pool.run(train, **options, **dropout) == plain
    assert pool.run(train, **options, **dropout, **FULL) == plain
    assert pool.run(train, **options)[0] != plain[0]
    assert pool.run(train, **options, **dropout, **SELECTIVE) == plain


def train_as_planned() -> tuple[list[float], list[float]]:
    """Losses with slices planned from measured costs, then with the same slices given."""
    options: dict[str, Any] = {"sequence_parallel": True, "hidden_dropout": 0.2, "attention_dropout": 0.2}
    data = engines.batches(2, length=LENGTH)
    section = engines.section(slices="auto", granularity_tokens=4)
    with engine_of(model(2, 1, **options), section) as engine:
        planned = [float(engine.train_batch(iter(batch))) for batch in data]
        lengths = list(engine.slice_plan(LENGTH).lengths)
    with engine_of(model(2, 1, **options), engines.section(slices=lengths)) as engine:
        return planned, [float(engine.train_batch(iter(batch))) for batch in data]


def test_measuring_slices_leaves_the_random_states_as_they_were() -> None:
    """megatron-core's own as well, from which dropout draws under sequence parallelism."""
    for planned, given in rank_pool(2).run(train_as_planned):
        assert planned == given


def states_drawn_from(sequence_parallel: bool) -> dict[str, list[bytes]]:
    """The random state at each call of dropout in a step: by it the masks of two ranks are the same or not."""
    seen: dict[str, list[bytes]] = {"hidden": [], "attention": []}

    def watched(what: str, function: Any, is_on: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_on(args, kwargs):
                seen[what].append(bytes(torch.get_rng_state().numpy()))
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        hidden = watched("hidden", F.dropout, lambda args, kwargs: kwargs.get("training", True))
        patch.setattr(F, "dropout", hidden)
        attend = watched("attention", sliced_attention, lambda args, kwargs: kwargs["dropout_p"] > 0)
        patch.setattr(sliced_core_attention, "sliced_attention", attend)
        train(
            engines.section(slices=[8, 10, 6]), tensor=2, sequence_parallel=sequence_parallel, hidden_dropout=0.2,
            attention_dropout=0.2,
        )  # fmt: skip
    return seen


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_masks_differ_between_ranks_exactly_where_tokens_or_heads_do(sequence_parallel: bool) -> None:
    left, right = rank_pool(2).run(states_drawn_from, sequence_parallel=sequence_parallel)
    for what, own in (("hidden", sequence_parallel), ("attention", True)):
        assert len(left[what]) == len(right[what]) >= 3 * 2 * 3  # steps, micro-batches, slices
        for mine, theirs in zip(left[what], right[what], strict=True):
            assert (mine != theirs) == own, what


def test_the_stock_engine_trains_it_without_tensor_parallelism_to_the_same_losses() -> None:
    stock = rank_pool(2).run(train, terapipe=None, stages=2)
    sliced = rank_pool(2).run(train, terapipe=engines.section(slices=[8, 10, 6]), stages=2)
    assert sliced[0] == pytest.approx(stock[0], rel=1e-5)


def test_the_stock_engine_is_refused_with_tensor_parallelism() -> None:
    """Nothing would sum partial gradients there."""
    with pytest.raises(RankFailure, match=f"{MegatronConfigError.__name__}.*Enable the terapipe section"):
        rank_pool(2).run(train, terapipe=None, tensor=2, qk_layernorm=True)


def evaluate(tensor: int) -> tuple[float, torch.Tensor]:
    with engine_of(model(tensor, 2 // tensor), engines.section(slices=[8, 10, 6])) as engine:
        loss, logits = engine.eval_batch(iter(engines.batches(1, length=LENGTH)[0]), return_logits=True)
        return float(loss), logits if logits is None else logits[0] if isinstance(logits, (list, tuple)) else logits


def test_logits_of_an_evaluation_are_shares_of_the_vocabulary() -> None:
    (loss, left), (other_loss, right) = rank_pool(2).run(evaluate, tensor=2)
    whole_loss, whole = rank_pool(2).run(evaluate, tensor=1)[1]
    assert loss == other_loss == pytest.approx(whole_loss, rel=1e-6)
    torch.testing.assert_close(torch.cat([left, right], dim=-1), whole, rtol=1e-5, atol=1e-5)


def test_a_layer_spec_of_the_user_gets_sliced_attention_as_well() -> None:
    """With Megatron's own attention in it each slice would see its own tokens alone."""
    usual, given = (
        rank_pool(2).run(train, terapipe=engines.section(slices=[8, 10, 6]), stages=2, options=options)
        for options in ({}, {"transformer_layer_spec": get_gpt_layer_local_spec()})
    )
    assert usual == given


def train_whole_logits(cross_entropy: str) -> list[float]:
    options = {"parallel_output": False, "loss_fn": VocabParallelLoss(cross_entropy)}
    return train(engines.section(slices=[8, 10, 6]), tensor=2, options=options)


def test_logits_of_the_whole_vocabulary_on_each_rank() -> None:
    split = rank_pool(2).run(train, terapipe=engines.section(slices=[8, 10, 6]), tensor=2)
    whole = rank_pool(2).run(train_whole_logits, cross_entropy="exact")
    assert whole[0] == whole[1] == pytest.approx(split[0], rel=1e-5)
    with pytest.raises(RankFailure, match="takes logits whose vocabulary is split"):
        rank_pool(2).run(train_whole_logits, cross_entropy="megatron")


def compare_copies(values: list[float]) -> bool | str:
    """A parameter of which each rank keeps a copy, with a gradient for each rank."""
    module = torch.nn.Linear(2, 2, bias=False)
    module.weight.grad = torch.full((2, 2), values[torch.distributed.get_rank()])
    try:
        return require_equal_replicas(module, torch.optim.SGD(module.parameters()), torch.distributed.group.WORLD)
    except ReplicatedGradientError as error:
        return str(error)


def test_copies_are_compared_once_their_gradients_are_finite() -> None:
    pool = rank_pool(2)
    assert pool.run(compare_copies, values=[1.0, 1.0]) == [True, True]
    assert pool.run(compare_copies, values=[float("inf"), float("inf")]) == [False, False]
    assert pool.run(compare_copies, values=[1.0, float("nan")]) == [False, False]
    assert all("weight" in str(text) for text in pool.run(compare_copies, values=[1.0, 2.0]))
