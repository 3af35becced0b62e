"""Dropout under tensor parallelism and recomputation, and engines that MegatronGPT cannot be trained by."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import deepspeed
import pytest
import torch
from megatron.core.transformer import TransformerConfig

import terapipe_ds
from terapipe_ds.models.megatron import MegatronConfigError, MegatronGPT
from tests.distributed import engines
from tests.distributed.harness import RankFailure, rank_pool

LENGTH = 24
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]}


def model(tensor: int, stages: int, **changes: Any) -> MegatronGPT:
    fields: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "use_cpu_initialization": True, "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32, "init_method_std": 0.3, "bias_dropout_fusion": False,
        "tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": stages,
    }  # fmt: skip
    config = TransformerConfig(**{**fields, **changes})
    return MegatronGPT(config, vocab_size=32, max_sequence_length=LENGTH, position_embedding_type="rope", seed=5)


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


def masks_seen(sequence_parallel: bool) -> list[torch.Tensor]:
    """What hidden dropout and attention dropout draw on this rank."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    module = model(2, 1, sequence_parallel=sequence_parallel)
    assert module.slice_length_multiple == (2 if sequence_parallel else 1)
    with get_cuda_rng_tracker().fork():
        heads = torch.rand(4)
    return [torch.rand(4), heads]


def test_tensor_parallel_ranks_share_the_default_state_and_not_the_other() -> None:
    (default_0, heads_0), (default_1, heads_1) = rank_pool(2).run(masks_seen, sequence_parallel=True)
    assert torch.equal(default_0, default_1) and not torch.equal(heads_0, heads_1)


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
