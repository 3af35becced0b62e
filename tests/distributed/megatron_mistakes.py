"""Make on purpose mistakes that tensor parallelism invites. Runs inside the ranks."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as torch_dist
from deepspeed.runtime.pipe.topology import ProcessTopology
from megatron.core import parallel_state
from torch.distributed import distributed_c10d

from terapipe_ds.models.megatron import MegatronConfigError, MegatronGPT, gradients
from terapipe_ds.models.megatron import module as megatron_module
from terapipe_ds.models.rank_gradients import ReplicatedGradientError
from tests.distributed import megatron_models
from tests.distributed.megatron_cases import LAYOUTS, Case
from tests.distributed.megatron_models import build_model, own_parallel_state


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

    lies = False  # the group lists the right ranks

    def _partition_layers(self, method: str = "uniform") -> None:
        right = torch_dist.get_process_group_ranks(self._grid.slice_proc_group)
        pairs = [[0, 2], [1, 3]]
        groups = [torch_dist.new_group(pair) for pair in pairs]
        [group] = [group for group, pair in zip(groups, pairs, strict=True) if torch_dist.get_rank() in pair]
        if self.lies:
            distributed_c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(right)}
        self._grid.slice_proc_group = group
        super()._partition_layers(method)


class _LyingTensorGroup(_OtherTensorGroup):
    lies = True


def job_other_group(case: Case, lies: bool) -> str:
    return refusal(case, model_class=_LyingTensorGroup if lies else _OtherTensorGroup)


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
            return gradients.require_equal_replicas(*args)
        except ReplicatedGradientError as error:
            caught.append(str(error))
            return True

    with mock.patch.object(megatron_module, "require_equal_replicas", check):
        yield caught


@contextlib.contextmanager
def without_the_sum() -> Iterator[list[str]]:
    """Keep ``before_reduce`` from summing partial gradients."""
    with mock.patch.object(megatron_module, "sum_partial_gradients", lambda *_: None):
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
        gradients.require_equal_replicas(layer, torch.optim.SGD(layer.parameters(), lr=1.0), torch_dist.group.WORLD)
    except ReplicatedGradientError as error:
        return str(error)
    return ""
