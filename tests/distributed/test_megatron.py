"""Test sliced Megatron layers over TP x PP x DP against megatron-core's own model, unsliced in one process.

The tests compare the loss of every replica and step, every gradient of all steps (shards joined, each copy by
itself) and the parameters after them. The default run covers every pair of values of the dimensions in
`megatron_cases.py`; with TERAPIPE_TEST_FULL=1 also the product of the dimensions that slices can get wrong.
"""

import functools
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as torch_dist
from deepspeed.runtime.pipe.topology import ProcessTopology
from megatron.core import parallel_state

from terapipe_ds.attention.call import Call
from terapipe_ds.models import rank_gradients
from terapipe_ds.models.megatron import MegatronConfigError, MegatronGPT
from terapipe_ds.models.rank_gradients import ReplicatedGradientError, require_equal_gradients
from tests.distributed import megatron_cases, megatron_models
from tests.distributed.cases import FULL, Worst, violations
from tests.distributed.harness import rank_pool
from tests.distributed.megatron_cases import LAYOUTS, Case, Record
from tests.distributed.megatron_models import (
    build_model,
    is_gated,
    job_build,
    job_ours,
    job_reference,
    own_parallel_state,
)


def refusal(case: Case, **options: Any) -> str:
    """Return the error of building the model on this rank; empty if it is built."""
    try:
        build_model(case, **options)
    except MegatronConfigError as error:
        return str(error)
    return ""


# -- groups ---------------------------------------------------------------------------------------------------


def job_axes(case: Case, axes: list[str]) -> str:
    tensor, stages, data, _ = LAYOUTS[case.layout]
    sizes = {"model": tensor, "pipe": stages, "data": data}
    return refusal(case, topology=ProcessTopology(axes=axes, dims=[sizes[axis] for axis in axes]))


class _OtherTensorGroup(MegatronGPT):
    """Replace the grid's tensor-parallel group by one of other ranks before any code reads it."""

    def _partition_layers(self, method: str = "uniform") -> None:
        pairs = [[0, 2], [1, 3]]
        groups = [torch_dist.new_group(pair) for pair in pairs]
        [group] = [group for group, pair in zip(groups, pairs, strict=True) if torch_dist.get_rank() in pair]
        self._grid.slice_proc_group = group
        super()._partition_layers(method)


def job_parallel_state_in_another_order(case: Case, order: str, after_a_model: bool) -> str:
    """Initialize Megatron's groups in another order, perhaps after a model of ours was built."""
    tensor, stages, _, _ = LAYOUTS[case.layout]
    if after_a_model:
        assert refusal(case) == ""
    sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": stages}
    with own_parallel_state(order=order, **sizes):
        return refusal(case)


@contextlib.contextmanager
def parallel_state_of_the_user(case: Case) -> Iterator[list[str]]:
    tensor, stages, _, _ = LAYOUTS[case.layout]
    with own_parallel_state(tensor_model_parallel_size=tensor, pipeline_model_parallel_size=stages):
        theirs = parallel_state.get_tensor_model_parallel_group()
        yield []
        assert parallel_state.get_tensor_model_parallel_group() is theirs


# -- gradients ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def errors_let_pass() -> Iterator[list[str]]:
    """Let the check of replicated gradients record its findings, and training go on."""
    caught: list[str] = []

    def check(*args: Any) -> bool:
        try:
            return require_equal_gradients(*args)
        except ReplicatedGradientError as error:
            caught.append(str(error))
            return True

    with mock.patch.object(rank_gradients, "require_equal_gradients", check):
        yield caught


@contextlib.contextmanager
def without_the_sum() -> Iterator[list[str]]:
    """Keep ``before_reduce`` from summing partial gradients."""
    with mock.patch.object(rank_gradients, "sum_gradients", lambda *_: None):
        with errors_let_pass() as caught:
            yield caught


@contextlib.contextmanager
def with_an_unmarked_norm() -> Iterator[list[str]]:
    """Keep one norm of the second layer from marking its gradient as partial under sequence parallelism."""
    load = megatron_models.load_weights

    def unmark_and_load(model: Any, *args: Any) -> None:
        for name, parameter in model.named_parameters():
            if name.startswith("2.layer.pre_mlp_layernorm."):
                parameter.sequence_parallel = False
        load(model, *args)

    with mock.patch.object(megatron_models, "load_weights", unmark_and_load), errors_let_pass() as caught:
        yield caught


def job_large_replica() -> str:
    """Compare a very large parameter with another gradient on each rank: the limit may not outgrow the difference."""
    layer = torch.nn.Embedding(10_000, 1_000)
    generator = torch.Generator().manual_seed(torch_dist.get_rank())
    layer.weight.grad = torch.randn(layer.weight.shape, generator=generator)
    try:
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        require_equal_gradients(dict(layer.named_parameters()), optimizer, torch_dist.group.WORLD, "")
    except ReplicatedGradientError as error:
        return str(error)
    return ""


CASES = megatron_cases.all_cases() if FULL else megatron_cases.default_cases()
SEQUENCE_PARALLEL = Case(layout="tp2_pp2_sp", heads="gqa")


@functools.cache
def reference(case: Case) -> list[Record]:
    """Return the records of megatron-core's own model, run once for all cases that it serves."""
    assert case == case.reference()
    return rank_pool(1).run(job_reference, case=case)[0]


def ours(case: Case, **options: Any) -> list[Record]:
    initial = reference(case.reference())[0].initial
    return rank_pool(case.world_size).run(job_ours, case=case, weights=initial, **options)


def errors(case: Case, **options: Any) -> dict[str, Worst]:
    return errors_of(ours(case, **options), case)


def errors_of(run: list[Record], case: Case) -> dict[str, Worst]:
    return megatron_cases.errors(run, reference(case.reference()), is_gated(case))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sample(2)
def test_training_equals_megatrons_own_model(case: Case) -> None:
    assert not violations(errors(case), case.limits())


WHAT_THE_PAIRS_LEAVE_OUT = [
    # megatron-core empties the memory of outputs that it computes again, which is not offloaded
    Case(layout="pp2", recompute="offloaded, layernorm", accumulation=2),
    Case(layout="tp2_pp2_sp", recompute="offloaded, mla_up_proj", attention="latent queries", qk_norm=True),
    Case(layout="one", plan="uneven", accumulation=2, tied=True),
    Case(layout="tp2_pp2_sp", block="moe", heads="gqa"),
    Case(layout="pp2_dp2", block="moe", tied=True),
    Case(layout="dp2_pp2", accumulation=2, tied=True, clipping=True),
    # stages with two parts, and parts at two places
    Case(layout="tp2_pp2_sp", schedule="zbv", accumulation=2, heads="gqa", tied=True, clipping=True),
    Case(
        layout="tp2_pp2",
        schedule="chimera-seq",
        accumulation=2,
        tied=True,
        clipping=True,
        recompute="block",
        positions="learned",  # which the copy of the last stage lacks
    ),
    pytest.param(Case(layout="dp2_pp2_tp2_sp", accumulation=2, tied=True, recompute="block"), marks=pytest.mark.full),
]


ATTENTION = [
    Case(layout="tp2_pp2", attention="window, sinks", heads="gqa", recompute="core_attn"),
    Case(layout="tp2_pp2_sp", attention="sinks", accumulation=2, clipping=True, schedule="zbv"),
    Case(layout="tp2_pp2", attention="latent", schedule="seq1f1b-zb", accumulation=2, qk_norm=True),
    Case(layout="tp2_pp2", attention="latent queries", qk_norm=True, clipping=True),
    Case(layout="tp2_pp2_sp", attention="latent queries", qk_norm=True, recompute="uniform"),
    Case(layout="one", attention="window"),
    Case(layout="one", attention="window 1", heads="mqa"),
    Case(layout="one", attention="window, every second"),
    Case(layout="one", attention="window, listed", heads="gqa"),
    Case(layout="one", attention="off-by-one", heads="gqa"),
    Case(layout="one", attention="sinks", recompute="block", precision="fp32"),
    Case(layout="one", attention="latent, window, sinks", recompute="core_attn"),
    Case(layout="one", attention="latent queries", precision="fp32", positions="learned"),
    Case(layout="one", attention="latent queries", qk_norm=True, recompute="mla_up_proj"),
]
DOCUMENTS = [  # against a mask of [B, 1, L, L], which hides other documents
    Case(layout="pp2", attention="window", documents=True),
    Case(layout="one", attention="latent, window, sinks", documents=True),
    Case(layout="tp2_pp2_sp", heads="gqa", positions="learned_given", recompute="core_attn", documents=True),
    Case(layout="pp2", schedule="seq1f1b-zb", accumulation=2, labels="ignored", documents=True),
]


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", [*DOCUMENTS, *WHAT_THE_PAIRS_LEAVE_OUT, *ATTENTION], ids=str)
def test_further_cases_equal_megatrons_own_model(case: Case) -> None:
    assert not violations(errors(case), case.limits())


@contextlib.contextmanager
def kernels_run_again() -> Iterator[list[Any]]:
    attend, layers = Call._attend, []  # type: ignore[var-annotated]

    def noted(self: Call, *tensors: Any) -> Any:
        layers.extend([self.layer] * (self.active.mode == "recompute"))
        return attend(self, *tensors)

    with mock.patch.object(Call, "_attend", noted):
        yield layers


KEPT = [
    Case(layout="tp2_pp2_sp", recompute="kept", heads="gqa", schedule="seq1f1b-zb", accumulation=2),
    Case(layout="one", recompute="kept", attention="latent, window, sinks", documents=True),
    Case(layout="tp2_pp2", recompute="kept, core_attn", qk_norm=True),  # Megatron recomputes within DeepSpeed's range
]


@pytest.mark.parametrize("case", KEPT, ids=str)
@pytest.mark.sample(1)
def test_layers_that_keep_their_attention_equal_megatrons_own(case: Case) -> None:
    run = ours(case, prepare=kernels_run_again)
    assert not violations(errors_of(run, case), case.limits())
    layers_of_stage = case.num_layers // LAYOUTS[case.layout][1]
    again = megatron_cases.NUM_STEPS * layers_of_stage * case.accumulation * 4  # slices, unless all is kept
    for record in run:
        assert len(record.caught) == (0 if case.recompute == "kept" else again)


@pytest.mark.full
@pytest.mark.slow
def test_eight_processes() -> None:
    case = Case(layout="tp2_pp2_dp2_sp", accumulation=2, heads="gqa", tied=True, labels="ignored", qk_norm=True)
    assert not violations(errors(case), case.limits())


def test_groups_that_the_user_has_made_by_megatron_serve_as_well() -> None:
    case = Case(layout="tp2_pp2", heads="gqa")
    prepare = functools.partial(parallel_state_of_the_user, case)
    assert not violations(errors(case, prepare=prepare), case.limits())


class TestShards:
    """Test Megatron's rules of cutting, as this comparison has them."""

    @pytest.mark.parametrize("block", ["swiglu", "gelu"])
    def test_megatron_marks_what_is_cut_and_draws_the_same_weights_for_any_layout(self, block: str) -> None:
        case = Case(layout="tp2_pp2", block=block, positions="learned")
        [(whole, _)] = rank_pool(1).run(job_build, case=replace(case, layout="one"))
        seen: set[str] = set()
        results = rank_pool(4).run(job_build, case=case)
        for record, marks in results:
            for name, part in record.initial.items():
                columns = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
                assert marks[name] == ((True, int(columns)) if megatron_cases.is_cut(name) else (False, -1)), name
                expected = megatron_cases.shard(name, whole.initial[name], record.tensor_rank, 2, is_gated(case))
                assert (part == expected).all(), name
            seen |= record.initial.keys()
        assert seen == whole.initial.keys()


class TestMistakesAreCaught:
    @pytest.mark.parametrize(
        ("layout", "axes"),
        [
            ("tp2_pp2", ["model", "pipe", "data"]),
            pytest.param("tp2_dp2", ["pipe", "model", "data"], marks=pytest.mark.full),
        ],
    )
    def test_another_rank_order(self, layout: str, axes: list[str]) -> None:
        texts = rank_pool(4).run(job_axes, case=Case(layout=layout), axes=axes)
        for text in texts:
            assert f"(axes {axes})" in text
            assert "Build the topology with PipeModelDataParallelTopology" in text

    def test_a_tensor_group_of_other_ranks(self) -> None:
        texts = rank_pool(4).run(refusal, case=Case(), model_class=_OtherTensorGroup)
        for text in texts:
            assert "the model group of rank 0 holds the ranks [0, 2], by the topology it is [0, 1]" in text
            assert "the model group of rank 3 holds the ranks [1, 3], by the topology it is [2, 3]" in text

    @pytest.mark.parametrize("after_a_model", [False, True])
    def test_a_parallel_state_in_another_order(self, after_a_model: bool) -> None:
        texts = rank_pool(4).run(
            job_parallel_state_in_another_order,
            case=Case(),
            order="pp-cp-ep-dp-tp",
            after_a_model=after_a_model,
        )
        for text in texts:
            assert "parallel_state was initialized with other tensor groups: rank 0 is in [0, 2] there" in text

    def test_a_missing_sum_over_sequence_parallel_ranks(self) -> None:
        run = ours(SEQUENCE_PARALLEL, prepare=without_the_sum)
        for record in run:
            [text] = record.caught
            assert "input_layernorm.weight" in text
        found = errors_of(run, SEQUENCE_PARALLEL)
        assert found["gradient"].error > 0.1
        assert any("parameter" in text for text in violations(found, SEQUENCE_PARALLEL.limits()))

    def test_a_norm_that_is_not_marked_as_sequence_parallel(self) -> None:
        run = ours(SEQUENCE_PARALLEL, prepare=with_an_unmarked_norm)
        for record in run:
            assert len(record.caught) == (1 if record.stage_id == 0 else 0)  # on both of its tensor-parallel ranks
            assert all("1 of " in text and "2.layer.pre_mlp_layernorm.weight" in text for text in record.caught)
        assert errors_of(run, SEQUENCE_PARALLEL)["gradient"].error > 0.1

    def test_a_large_parameter_is_compared_as_well(self) -> None:
        for text in rank_pool(2).run(job_large_replica):
            assert "1 of 1 parameters" in text
