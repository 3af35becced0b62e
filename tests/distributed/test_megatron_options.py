"""Test options of MegatronGPT: dropout, layer specs, whole logits, the engine. Each trains right, or is refused."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("megatron.core")

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from terapipe_ds.attention import documents, sliced_attention
from terapipe_ds.losses import LinearCrossEntropy
from terapipe_ds.models.megatron import MegatronConfigError, MegatronGPT, VocabParallelLoss, attention
from terapipe_ds.models.rank_gradients import ReplicatedGradientError, require_equal_gradients
from tests.distributed.engines import raised_by, section
from tests.distributed.harness import rank_pool
from tests.distributed.megatron_cases import LENGTH, Case
from tests.distributed.megatron_models import build_model, engine_of, micro_batch, terapipe_section
from tests.distributed.nccl_emulator import emulated_nccl

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]}


def case_of(layout: str) -> Case:
    return Case(layout, precision="fp32", block="gelu", num_layers=2, accumulation=2)


def train(layout: str, options: dict[str, Any] | None = None, ds_config: Any = None, **changes: Any) -> list[float]:
    """Return the losses, on every rank; `changes` to the TransformerConfig, `options` of the model."""
    case = case_of(layout)
    with engine_of(case, changes, options, **(ds_config or {})) as engine:
        return [float(engine.train_batch(iter(batch))) for batch in data(case, 2)]


@functools.cache
def losses_of(layout: str) -> list[list[float]]:
    return rank_pool(2).run(train, layout=layout)


def data(case: Case, steps: int) -> list[list[Any]]:
    return [[micro_batch(case, 0, step, index) for index in range(2)] for step in range(steps)]


@pytest.mark.full
@pytest.mark.parametrize("layout", [pytest.param("tp2", marks=pytest.mark.full), "tp2_sp"])
def test_dropout_differs_where_tokens_or_heads_differ_and_is_replayed(layout: str) -> None:
    """The engine compares the gradients of replicated parameters after the first batch: with different masks on
    tensor-parallel ranks, where they hold the same tokens, it would raise. Recomputing replays the masks, so the losses
    are the same to the last bit; another seed or no dropout gives others."""
    plain, again, full, selective, undropped = (
        rank_pool(2).run(train, layout=layout, **changes)
        for changes in (DROPOUT, DROPOUT, {**DROPOUT, **FULL}, {**DROPOUT, **SELECTIVE}, {})
    )
    assert plain[0] == plain[1]
    assert again == full == selective == plain
    assert undropped[0] != plain[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["tp2_sp", "tp2"])
@pytest.mark.parametrize("changes", [{}, {"keep_attention": True}, {"offload_activations": True}], ids=str)
def test_deepspeed_recomputes_with_the_same_masks(layout: str, changes: dict[str, Any]) -> None:
    """Its checkpoints do not know Megatron's random states: the backward was of other masks than the forward."""
    recompute = {"terapipe": {**terapipe_section(case_of(layout)), "recompute": "full", **changes}}
    plain, again = (rank_pool(2).run(train, layout=layout, ds_config=each, **DROPOUT) for each in (None, recompute))
    assert again == plain


def train_over_nccl(layout: str) -> list[float]:
    with emulated_nccl(eager=True):
        return train(layout)


def test_no_collective_comes_before_a_device_is_chosen() -> None:
    assert rank_pool(2).run(train_over_nccl, layout="tp2") == rank_pool(2).run(train, layout="tp2")


def train_as_planned() -> tuple[list[float], list[float]]:
    """Return losses with slices planned from measured costs, then with the same slices as a list."""
    case = case_of("tp2_sp")
    with engine_of(case, DROPOUT, terapipe=section(slices="auto", granularity_tokens=4)) as engine:
        planned = [float(engine.train_batch(iter(batch))) for batch in data(case, 2)]
        lengths = list(engine.slice_plan(LENGTH).lengths)
    with engine_of(case, DROPOUT, terapipe=section(slices=lengths)) as engine:
        return planned, [float(engine.train_batch(iter(batch))) for batch in data(case, 2)]


@pytest.mark.full
def test_measuring_slices_leaves_the_random_states_as_they_were() -> None:
    """megatron-core's own as well, from which dropout draws under sequence parallelism."""
    for planned, given in rank_pool(2).run(train_as_planned):
        assert planned == given


def losses_of_both_modes(case: Case) -> tuple[float, float]:
    """Return the loss of the first step, and of an evaluation of the same data before it."""
    with engine_of(case) as engine:
        batch = data(case, 1)[0]
        return float(engine.eval_batch(iter(batch))), float(engine.train_batch(iter(batch)))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "changes",
    [{"attention": "window, sinks"}, {"attention": "latent queries", "qk_norm": True, "recompute": "mla_up_proj"}],
    ids=str,
)
def test_evaluation_sees_what_training_sees(changes: dict[str, Any]) -> None:
    case = Case("tp2_pp2_sp", accumulation=2, **changes)
    for evaluated, trained in rank_pool(4).run(losses_of_both_modes, case=case):
        assert evaluated == pytest.approx(trained, rel=1e-6)


def states_drawn_from(layout: str) -> dict[str, list[bytes]]:
    """Return the random state at each call of dropout in a step: it decides whether two ranks have the same masks."""
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
        patch.setattr(attention, "sliced_attention", attend)
        train(layout, **DROPOUT)
    return seen


@pytest.mark.parametrize("layout", ["tp2", "tp2_sp"])
def test_masks_differ_between_ranks_exactly_where_tokens_or_heads_do(layout: str) -> None:
    left, right = rank_pool(2).run(states_drawn_from, layout=layout)
    for what, own in (("hidden", layout == "tp2_sp"), ("attention", True)):
        assert len(left[what]) == len(right[what]) >= 2 * 2 * 4  # steps, micro-batches, slices
        for mine, theirs in zip(left[what], right[what], strict=True):
            assert (mine != theirs) == own, what


def test_the_stock_engine_trains_it_without_tensor_parallelism_to_the_same_losses() -> None:
    stock = rank_pool(2).run(train, layout="pp2", ds_config={"terapipe": None})
    assert losses_of("pp2")[0] == pytest.approx(stock[0], rel=1e-5)


def test_the_stock_engine_is_refused_with_tensor_parallelism() -> None:
    """Nothing would sum partial gradients there."""
    act = functools.partial(train, "tp2", ds_config={"terapipe": None}, qk_layernorm=True)
    for kind, text in rank_pool(2).run(raised_by, act=act):
        assert kind == MegatronConfigError.__name__ and "enable the terapipe section" in text


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_fp32_residual_stream_is_refused_where_only_deepspeed_knows_of_half_precision(precision: str) -> None:
    half = {precision: {"enabled": True}, "zero_optimization": {"stage": 1}}
    act = functools.partial(train, "pp2", ds_config=half, fp32_residual_connection=True)
    for kind, text in rank_pool(2).run(raised_by, act=act):
        assert kind == "TeraPipeConfigError" and "fp32_residual_connection with parameters in half precision" in text


def test_a_layer_spec_of_the_user_gets_sliced_attention_as_well() -> None:
    """With Megatron's own attention in it each slice would see its own tokens alone."""
    options = {"transformer_layer_spec": get_gpt_layer_local_spec()}
    assert rank_pool(2).run(train, layout="pp2", options=options) == losses_of("pp2")


class FrozenEmbedding(MegatronGPT):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("embeddings" not in name)


@pytest.mark.parametrize("recompute", [FULL, SELECTIVE], ids=["full", "selective"])
def test_recompute_after_a_frozen_embedding(recompute: dict[str, Any]) -> None:
    """Megatron's checkpoints pass no gradients on if no input has one: the first stage was not trained."""
    frozen = {"model_class": FrozenEmbedding}
    stock = rank_pool(2).run(train, layout="pp2", options=frozen, ds_config={"terapipe": None})
    assert rank_pool(2).run(train, layout="pp2", options=frozen, **recompute)[0] == pytest.approx(stock[0], rel=1e-6)


def recomputed_layers() -> list[int]:
    changes = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    case = replace(case_of("pp2"), num_layers=4)
    with engine_of(case, changes, terapipe=section(slices=2, partition=[0, 2, 7])) as engine:
        return [each.layer.layer_number for each in engine.module.forward_funcs if getattr(each, "recompute", False)]


def test_each_stage_recomputes_its_first_layers() -> None:
    """DeepSpeed's cut has layer 3 first on the second stage, where it stays and comes second."""
    assert rank_pool(2).run(recomputed_layers) == [[1], [2]]


def train_whole_logits(cross_entropy: str) -> list[float]:
    """Use a loss that has served a model whose ranks divide the logits."""
    loss_fn = VocabParallelLoss(cross_entropy)
    build_model(case_of("tp2"), loss_fn=loss_fn)
    checked = {"terapipe": section(verify="first_batch", slices=2)}
    return train("tp2", {"parallel_output": False, "loss_fn": loss_fn}, checked)


def test_logits_of_the_whole_vocabulary_on_each_rank() -> None:
    whole = rank_pool(2).run(train_whole_logits, cross_entropy="exact")
    assert whole[0] == whole[1] == pytest.approx(losses_of("tp2")[0], rel=1e-5)
    for _, text in rank_pool(2).run(raised_by, act=functools.partial(train_whole_logits, "megatron")):
        assert "takes logits whose vocabulary is split" in text


def loss_and_logits(cross_entropy: str) -> tuple[float, torch.Tensor]:
    case = case_of("tp2")
    with engine_of(case, options={"loss_fn": VocabParallelLoss(cross_entropy)}) as engine:
        loss, logits = engine.eval_batch(iter(data(case, 1)[0]), return_logits=True)
        return float(loss), logits


def test_megatrons_cross_entropy_leaves_the_logits_that_were_asked_for() -> None:
    """It works in place on fp32: its softmax came back as logits."""
    runs = [rank_pool(2).run(loss_and_logits, cross_entropy=kind) for kind in ("exact", "megatron")]
    for (loss, logits), (of_megatron, theirs) in zip(*runs, strict=True):
        assert torch.equal(logits, theirs) and loss == pytest.approx(of_megatron, rel=1e-6)


def within_a_function(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return VocabParallelLoss("megatron")(logits, labels)


def exact_within_a_function(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return VocabParallelLoss()(logits, labels)


@pytest.mark.parametrize("options", [
    {"loss_fn": within_a_function},
    {"loss_fn": exact_within_a_function},
    {"loss_fn": exact_within_a_function, "parallel_output": False},
], ids=["megatron", "exact", "exact, whole"])  # fmt: skip
def test_a_cross_entropy_finds_its_group_within_a_function_of_the_users(options: dict[str, Any]) -> None:
    losses = rank_pool(2).run(train, layout="tp2", options=options)
    assert losses[0] == losses[1] == pytest.approx(losses_of("tp2")[0], rel=1e-5)


def within_a_function_of_megatrons(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = vocab_parallel_cross_entropy(logits.transpose(0, 1).float().contiguous(), labels.t().contiguous())
    return losses.mean()


def evaluate_whole_logits(loss_fn: Any) -> None:
    case = case_of("tp2")
    unchecked = section(verify="off", slices=2)
    with engine_of(case, options={"loss_fn": loss_fn, "parallel_output": False}, terapipe=unchecked) as engine:
        engine.eval_batch(iter(data(case, 1)[0]))


@pytest.mark.parametrize(("loss_fn", "told"), [
    (within_a_function, "takes logits whose vocabulary is split"),
    (within_a_function_of_megatrons, "different gradients of the same logits"),
])  # fmt: skip
def test_whole_logits_for_a_loss_that_takes_them_for_shares(loss_fn: Any, told: str) -> None:
    """The sum of exponentials counted each logit twice: the loss was ln 2 too large, and its gradients were wrong."""
    whole, unchecked = {"loss_fn": loss_fn, "parallel_output": False}, {"terapipe": section(verify="off", slices=2)}
    for _, text in rank_pool(2).run(raised_by, act=functools.partial(train, "tp2", whole, unchecked)):
        assert told in text
    if loss_fn is within_a_function:
        for _, text in rank_pool(2).run(raised_by, act=functools.partial(evaluate_whole_logits, loss_fn)):
            assert told in text


SMOOTHED = {"loss_fn": LinearCrossEntropy(label_smoothing=0.1)}


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def whole_logits_of(layout: str) -> torch.Tensor:
    case = case_of(layout)
    with engine_of(case, options=SMOOTHED) as engine:
        return engine.eval_batch(iter(data(case, 1)[0]), return_logits=True)[1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["tp2_sp", "tp2"])
def test_a_loss_without_logits_over_a_divided_vocabulary(layout: str) -> None:
    """The check of the first batch asks for logits, and the loss takes those of the whole vocabulary."""
    stock = rank_pool(2).run(train, layout="pp2", options={"loss_fn": smoothed}, ds_config={"terapipe": None})
    checked = {"terapipe": section(verify="first_batch", slices=2)}
    for losses in rank_pool(2).run(train, layout=layout, options=SMOOTHED, ds_config=checked):
        assert losses == pytest.approx(stock[0], rel=1e-5)
    assert all(each.shape[-1] == 32 for each in rank_pool(2).run(whole_logits_of, layout=layout))


def embeddings_of_documents() -> tuple[torch.Tensor, torch.Tensor]:
    tokens, ids = torch.arange(14).view(2, 7), torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1]])
    embedding = build_model(case_of("tp2"), position_embedding_type="learned_absolute").forward_funcs[0]
    with documents(ids):
        return embedding(tokens).detach(), embedding((tokens, ids)).detach()


def test_learned_positions_of_documents_outside_of_the_engine() -> None:
    """A reference run gives the position ids to `attention.documents` alone."""
    for found, expected in rank_pool(2).run(embeddings_of_documents):
        assert torch.equal(found, expected)


def train_on_an_unknown_token() -> None:
    batch = data(case_of("tp2"), 1)[0]
    batch[1][0][0, 2] = 32
    with engine_of(case_of("tp2")) as engine:
        engine.train_batch(iter(batch))


def test_a_token_that_no_rank_embeds() -> None:
    """The ranks' sum of its embeddings was zero."""
    for _, text in rank_pool(2).run(raised_by, act=train_on_an_unknown_token):
        assert "tokens outside of the vocabulary of 32: 1, first token 32. Pad otherwise, or fix" in text


def of_a_share(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten() % logits.shape[-1])


def test_a_loss_that_takes_a_share_of_the_vocabulary_for_all_of_it() -> None:
    """With small labels it trained, each rank for logits of its own."""
    for kind, text in rank_pool(2).run(raised_by, act=functools.partial(train, "tp2", {"loss_fn": of_a_share})):
        assert kind == MegatronConfigError.__name__ and "different losses of the same batch" in text


def compare_copies(values: list[float]) -> bool | str:
    """Compare the copies of a parameter that each rank keeps, with a gradient for each rank."""
    module = torch.nn.Linear(2, 2, bias=False)
    module.weight.grad = torch.full((2, 2), values[torch.distributed.get_rank()])
    try:
        weights, optimizer = dict(module.named_parameters()), torch.optim.SGD(module.parameters())
        return require_equal_gradients(weights, optimizer, torch.distributed.group.WORLD, "")
    except ReplicatedGradientError as error:
        return str(error)


def test_copies_are_compared_once_their_gradients_are_finite() -> None:
    pool = rank_pool(2)
    assert pool.run(compare_copies, values=[1.0, 1.0]) == [True, True]
    assert pool.run(compare_copies, values=[float("inf"), float("inf")]) == [False, False]
    assert pool.run(compare_copies, values=[1.0, float("nan")]) == [False, False]
    assert all("weight" in str(text) for text in pool.run(compare_copies, values=[1.0, 2.0]))
