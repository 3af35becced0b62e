"""No schedule hangs over NCCL, whose order of connections and messages is emulated; see `nccl_emulator`."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.attention.active_slice import active_slice
from terapipe_ds.models.gpt import DecoderLayer
from terapipe_ds.runtime.links import groups, stage_links
from terapipe_ds.runtime.links.compression import Packing
from terapipe_ds.runtime.links.groups import Wires
from terapipe_ds.runtime.profiling import profiles
from terapipe_ds.runtime.profiling.all_parts import StageToPlan
from terapipe_ds.schedule import CHUNKED_SCHEDULES, SCHEDULE_NAMES
from tests.distributed import engines
from tests.distributed.engines import EXACT, violations
from tests.distributed.harness import RankFailure, rank_pool
from tests.distributed.nccl_emulator import emulated_nccl
from tests.small_models import tuples

LENGTH = 24
NUM_MICRO_BATCHES = 4


class Trained(NamedTuple):
    """Hold how far a training was from the stock engine's, and the messages posted during it."""

    differences: dict[str, float]
    evaluation_error: float
    messages: int
    connections: tuple[tuple[int, int, int], ...]
    synchronized_while_posted: tuple[str, ...]


def train_over_nccl(
    schedule: str,
    stages: int,
    slices: int | str | list[int],
    eager: bool,
    patience_s: float = 30.0,
    changes: dict[str, Any] | None = None,
    num_layers: int | None = None,
    mixed: bool = False,
    lengths: Sequence[int] = (LENGTH,) * 3,
    rows: Sequence[int] = (2,) * 3,
    frozen_steps: int = 0,
    **options: Any,
) -> Trained:
    """Train three steps, with an evaluation before the second and the third, as the stock engine does in one stage.

    Args:
        changes: keys of the `terapipe` section. The first batch is verified unless they say otherwise.
        mixed: whether layers hand on tensors of several dtypes.
        lengths, rows: of the sequences in each step, and their number, unless `mixed`.
        frozen_steps: decoder layers are not trained before this step.
        options: further options of `engines.build`.
    """
    chunks = {"chunks_per_stage": 2} if "interleaved" in schedule else {}
    section = engines.section(
        schedule=schedule,
        slices=slices,
        granularity_tokens=8,
        stall_timeout_s=60,
        **{"verify": "first_batch", **chunks, **(changes or {})},
    )
    num_layers = num_layers or max(4, stages * (2 if schedule in CHUNKED_SCHEDULES else 1))
    make = tuples.guided_layers if mixed else functools.partial(engines.gpt_layers, num_layers=num_layers)
    of_length = engines.micro_batch
    sizes = [{"length": length, "rows": count} for length, count in zip(lengths, rows, strict=True)]
    draws = [tuples.guided_micro_batch if mixed else functools.partial(of_length, **each) for each in sizes]
    data = [[draw(100 * step + index) for index in range(NUM_MICRO_BATCHES)] for step, draw in enumerate(draws)]
    options = {"gradient_accumulation_steps": NUM_MICRO_BATCHES, **options}
    with emulated_nccl(eager, patience_s) as nccl, engines.few_rounds():
        ours, evaluated = _train(make, section, data, frozen_steps, stages=stages, **options)
        seen = tuple(nccl.synchronized_while_posted)
    options.pop("module", None)  # recomputing changes no number, and the stock engine cannot do so with an embedding
    stock, expected = _train(make, None, data, frozen_steps, stages=1, **options)
    errors = engines.differences(ours, stock), engines.error_of(evaluated, expected)
    return Trained(*errors, nccl.messages, tuple(nccl.connections), seen)


def _train(
    layers: Callable[[], Sequence[Any]],
    section: dict[str, Any] | None,
    data: Sequence[engines.Batch],
    frozen_steps: int,
    **options: Any,
) -> tuple[engines.Run, list[float]]:
    evaluated: list[float] = []

    def evaluate(engine: PipelineEngine, step: int) -> None:
        for layer in engine.module.modules() if frozen_steps else ():
            if isinstance(layer, DecoderLayer):
                layer.requires_grad_(step >= frozen_steps)
        if step:
            evaluated.append(float(engine.eval_batch(iter(data[0]))))

    return engines.run_training(layers, section, data, before_step=evaluate, **options), evaluated


# -- the tests ----------------------------------------------------------------------------------------------------


IMPATIENT_S = 4.0
full = pytest.mark.full
# K, schedule, slices, eager. A bidirectional schedule needs an even K.
EVERYTHING = [
    (stages, schedule, slices, eager)
    for stages in (2, 3, 4)
    for schedule in SCHEDULE_NAMES
    if not (schedule.startswith("chimera") and stages % 2)
    for slices in ("auto", 3)
    for eager in (False, True)
]
SAMPLE = [(3, "zbv", "auto", False)]


def assert_right(ranks: list[Trained]) -> None:
    """Assert that every wait ended, and that the results are the stock engine's."""
    assert not violations([rank.differences for rank in ranks], EXACT)
    assert max(rank.evaluation_error for rank in ranks) < 1e-6
    assert not any(rank.synchronized_while_posted for rank in ranks)
    for rank in ranks:
        assert rank.messages > 10
        assert len(set(rank.connections)) == len(rank.connections)


@pytest.mark.parametrize(
    ("stages", "schedule", "slices", "eager"),
    [pytest.param(*case, marks=() if case in SAMPLE else full) for case in EVERYTHING],
)
def test_every_schedule(stages: int, schedule: str, slices: Any, eager: bool) -> None:
    assert_right(rank_pool(stages).run(train_over_nccl, schedule=schedule, stages=stages, slices=slices, eager=eager))


OTHERS: dict[str, tuple[int, dict[str, Any]]] = {
    "as many data as pipeline ranks": (4, {"schedule": "seq1f1b", "stages": 2, "slices": "auto"}),
    "both ways beside data parallel": (4, {"schedule": "chimera-seq", "stages": 2, "slices": 3}),
    "uneven slices": (3, {"schedule": "seq1f1b-zb", "stages": 3, "slices": [5, 16, 3]}),
    "activation checkpointing": (3, {"schedule": "seq1f1b", "stages": 3, "slices": 3,
                                     "module": {"activation_checkpoint_interval": 1}}),
    "numbers looked at": (3, {"schedule": "zbv", "stages": 3, "slices": 3, "changes": {"check_finite": "every_step"}}),
    "three parts per stage": (2, {"schedule": "seq1f1b-interleaved", "stages": 2, "slices": 3, "num_layers": 6,
                                  "changes": {"chunks_per_stage": 3}}),
    "every schedule ranked": (2, {"schedule": "auto", "stages": 2, "slices": "auto"}),
    "tensors of several dtypes": (3, {"schedule": "seq1f1b", "stages": 3, "slices": 3, "mixed": True}),
}  # fmt: skip


@pytest.mark.parametrize("eager", [pytest.param(False, marks=full), True], ids=["lazy", "eager"])
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name == "tensors of several dtypes" else full) for name in OTHERS
])  # fmt: skip
def test_other_layouts(name: str, eager: bool) -> None:
    ranks, job = OTHERS[name]
    assert_right(rank_pool(ranks).run(train_over_nccl, eager=eager, **job))


# -- what the emulator finds -----------------------------------------------------------------------------------------


def links_measured_over_the_first_group() -> contextlib.AbstractContextManager[Any]:
    """As long as any two stages had a wire over the first group, in which `connect` had connected others."""
    measure = profiles.measure_parts

    def over_the_first_group(stage: StageToPlan, wires: Wires, *rest: Any) -> Any:
        there, back = next(iter(stage.groups.by_wire.values()))
        of_first = {
            ends: (dataclasses.replace(activations, group=there), dataclasses.replace(gradients, group=back))
            for ends, (activations, gradients) in wires.by_ends.items()
        }
        return measure(stage, dataclasses.replace(wires, by_ends=of_first), *rest)

    return mock.patch.object(profiles, "measure_parts", over_the_first_group)


def wires_that_share_groups() -> contextlib.AbstractContextManager[Any]:
    """As gloo, which has tags, may have it."""
    return mock.patch.object(groups, "_keeps_order", lambda: False)


def train_with(fault: Callable[[], contextlib.AbstractContextManager[Any]], **job: Any) -> Trained:
    with fault():
        return train_over_nccl(patience_s=IMPATIENT_S, **job)


@pytest.mark.parametrize(("fault", "words", "job"), [
    (links_measured_over_the_first_group, "connects for a message from rank",
     {"schedule": "seq1f1b", "stages": 3, "slices": "auto", "eager": False}),
    pytest.param(links_measured_over_the_first_group, "connects for a message from rank",
                 {"schedule": "zbv", "stages": 3, "slices": "auto", "eager": True}, marks=full),
    pytest.param(wires_that_share_groups, "waits for the receive of message",
                 {"schedule": "seq1f1b", "stages": 4, "slices": 3, "eager": True}, marks=full),
])  # fmt: skip
def test_a_deadlock_ends_in_words(fault: Any, words: str, job: dict[str, Any]) -> None:
    with pytest.raises(RankFailure, match=f"NCCL would hang: rank . {words}"):
        rank_pool(job["stages"]).run(train_with, fault=fault, **job)


def group_of_the_first_rank() -> None:
    with emulated_nccl(eager=True, patience_s=IMPATIENT_S):
        torch_dist.new_group([0], backend="gloo")


def test_a_group_over_gloo_that_ranks_outside_wait_for_ends_in_words() -> None:
    with pytest.raises(RankFailure, match=r"NCCL would hang: rank 1 splits .*ranks \[0\] do not come"):
        rank_pool(2).run(group_of_the_first_rank)


@contextlib.contextmanager
def kernels_loaded_at_first() -> Iterator[None]:
    """The first time that a slice runs, its kernels are loaded, which waits for all that is at work on the device."""
    forward, loaded = DecoderLayer.forward, set()

    def load(kernel: Any, gradient: Any = None) -> None:
        if kernel not in loaded:
            loaded.add(kernel)
            get_accelerator().synchronize()

    def load_and_run(self: DecoderLayer, hidden: Any) -> Any:
        active = active_slice()
        is_trained = any(parameter.requires_grad for parameter in self.parameters())
        kernel = self.training, hidden.shape, active and active.start, is_trained
        load(kernel)
        hidden = forward(self, hidden)
        if hidden.requires_grad:
            hidden.register_hook(functools.partial(load, ("backward", *kernel)))
        return hidden

    with mock.patch.object(DecoderLayer, "forward", load_and_run):
        yield


@contextlib.contextmanager
def kernels_loaded_on_devices() -> Iterator[None]:
    """And the engine takes its messages for ones that wait on a device."""
    by_host = mock.patch.object(stage_links, "BATCHES_BY_HOST", 1)
    with kernels_loaded_at_first(), mock.patch.object(Wires, "post_on_device", True), by_host:
        yield


LOADING = {"slices": 3, "changes": {"verify": "off"}}  # a check of the first batch would have loaded them


@pytest.mark.parametrize("schedule", [
    "seq1f1b", *(pytest.param(name, marks=full) for name in SCHEDULE_NAMES if name != "seq1f1b")
])  # fmt: skip
def test_loading_kernels_in_the_first_batch_does_not_hang(schedule: str) -> None:
    job = {"schedule": schedule, "stages": 2, "eager": True, **LOADING}
    assert_right(rank_pool(2).run(train_with, fault=kernels_loaded_on_devices, **job))


@pytest.mark.parametrize("later", [{"lengths": (24, 30, 18)}, {"rows": (2, 3, 1)}, {"frozen_steps": 2}], ids=str)
def test_loading_kernels_of_other_batches_does_not_hang(later: dict[str, Any]) -> None:
    job = {"schedule": "seq1f1b", "stages": 2, "eager": True, **later, **LOADING}
    assert_right(rank_pool(2).run(train_with, fault=kernels_loaded_on_devices, **job))


@contextlib.contextmanager
def plans_built_for_each_length() -> Iterator[None]:
    """torch's attention builds a plan of cuDNN for each length, unless cuDNN is off; lengths soon count as known."""
    attention, built = F.scaled_dot_product_attention, set()

    def build_and_attend(q: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        if torch.backends.cuda.cudnn_sdp_enabled() and (q.requires_grad, q.shape) not in built:
            built.add((q.requires_grad, q.shape))
            get_accelerator().synchronize()
        return attention(q, *rest, **options)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(F, "scaled_dot_product_attention", build_and_attend))
        patches.enter_context(mock.patch.object(Wires, "post_on_device", True))
        patches.enter_context(mock.patch.object(stage_links, "BATCHES_BY_HOST", 1))
        yield


def test_building_plans_for_new_lengths_does_not_hang() -> None:
    job = {"schedule": "1f1b", "slices": 1, "stages": 2, "eager": True, "lengths": (24, 30, 27)}
    assert_right(rank_pool(2).run(train_with, fault=plans_built_for_each_length, changes={"verify": "off"}, **job))


@contextlib.contextmanager
def kernels_of_formats_loaded_at_first() -> Iterator[None]:
    """The first time that a stage packs a message, the kernels of the format are loaded."""
    pack, loaded = Packing.pack, set()

    def load_and_pack(self: Packing, tensors: Any) -> Any:
        if self not in loaded:
            loaded.add(self)
            get_accelerator().synchronize()
        return pack(self, tensors)

    with mock.patch.object(Packing, "pack", load_and_pack), mock.patch.object(Wires, "post_on_device", True):
        yield


def test_loading_kernels_of_a_format_while_links_are_measured_does_not_hang() -> None:
    job = {"changes": {"links": {"forward": "bf16", "backward": "bf16"}}, "stages": 2, "slices": "auto", "eager": True}
    for rank in rank_pool(2).run(train_with, fault=kernels_of_formats_loaded_at_first, schedule="seq1f1b", **job):
        assert not rank.synchronized_while_posted


def test_loading_kernels_behind_messages_on_the_device_would_hang() -> None:
    with pytest.raises(RankFailure, match="NCCL would hang: a wait for the whole device waits for the receive of"):
        rank_pool(2).run(train_with, fault=kernels_loaded_at_first, schedule="seq1f1b", stages=2, eager=True, **LOADING)
