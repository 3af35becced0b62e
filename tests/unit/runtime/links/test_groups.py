"""Groups of pipelines: few collectives over the whole job, as many on each rank, and the options of wires over NCCL."""

import dataclasses
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as torch_dist
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.runtime.layout.layout import Layout
from terapipe_ds.runtime.links import groups
from terapipe_ds.schedule import build
from terapipe_ds.schedule.action import Kind
from terapipe_ds.simulator import device_queues

STAGES, REPLICAS, TENSOR, CHUNKS = 4, 4, 8, 4


class Options:
    """Stand in for `ProcessGroupNCCL.Options`."""

    def __init__(self) -> None:
        self.is_high_priority_stream, self.config = False, SimpleNamespace(max_ctas=0)


def made_on(rank: int, backend: str, monkeypatch: pytest.MonkeyPatch, chunks: int = CHUNKS) -> list[dict[str, Any]]:
    """Return the groups that a rank asks torch for, and give it an object for each."""
    asked: list[dict[str, Any]] = []

    def new_group(ranks: Any = None, backend: str | None = None, pg_options: Any = None) -> Any:
        asked.append({"ranks": ranks, "backend": backend, "options": pg_options})
        return SimpleNamespace(number=len(asked))

    topology = PipeModelDataParallelTopology(num_pp=STAGES, num_mp=TENSOR, num_dp=REPLICAS)
    grid = SimpleNamespace(pipe_parallel_size=STAGES, topology=lambda: topology)
    monkeypatch.setattr(groups, "peers_of", lambda _: None)
    monkeypatch.setattr(torch_dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    for name, value in {"new_group": new_group, "get_rank": lambda: rank, "get_backend": lambda *_: backend}.items():
        monkeypatch.setattr(torch_dist, name, value)
    monkeypatch.setattr(torch_dist, "get_world_size", topology.world_size)
    layout = Layout(STAGES, build("interleaved", STAGES, 16, 1, chunks_per_stage=chunks).placement)
    made = groups.make_pipeline_groups(grid, layout)
    assert sorted(made.by_wire) == sorted(layout.wires()) and rank in made.ranks
    return asked


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_pipelines_share_the_groups_of_their_wires_over_nccl(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bound device a group of some ranks is a collective of all; groups per pipeline were 512."""
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    asked = made_on(0, backend, monkeypatch)
    wires = [each for each in asked if each["backend"] == "nccl"]
    assert len(wires) == 16 and all(each["ranks"] is None for each in wires)
    assert all(each["options"].is_high_priority_stream and each["options"].config.max_ctas == 4 for each in wires)
    monkeypatch.setenv("NCCL_MAX_CTAS", "8")
    left = [each["options"].config.max_ctas for each in made_on(0, backend, monkeypatch) if each["options"]]
    assert left == [0] * 16, "the number of the user"


def test_wires_that_would_share_a_stream_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has 32 of a priority, which it hands out in turn: as a device runs them, such a schedule waits for itself.

    Groups i and i + 32 have one stream, in which an operation begins after the end of the one before it.
    """

    def hangs_in_pool(chunks: int) -> bool:
        schedule = build("seq1f1b-interleaved", STAGES, 2 * STAGES, 4, chunks_per_stage=chunks)
        wires = groups.wires_apart(Layout(STAGES, schedule.placement))
        places = Layout(STAGES, schedule.placement).placement
        pair_of = {places[each[:2]]: number for number, of_round in enumerate(wires) for each in of_round}  # by source

        def in_pool(op: Any) -> Any:
            way, kind, part_id, _ = op.stream
            if way == "compute":
                return op
            is_forward = kind is Kind.FORWARD
            group = 2 * pair_of[part_id - ((way == "in") == is_forward)] + (not is_forward)
            return dataclasses.replace(op, stream=("pool", kind, group % 32, -1))

        return device_queues.hangs([[*map(in_pool, each)] for each in device_queues.programs_of(schedule)], None)

    assert not hangs_in_pool(8) and len(made_on(0, "nccl", monkeypatch, chunks=8)) > 32
    assert hangs_in_pool(9)
    with pytest.raises(
        TeraPipeConfigError, match="9 each.*36 groups of NCCL.*32 streams.*smaller terapipe.chunks_per_stage"
    ):
        made_on(0, "nccl", monkeypatch, chunks=9)
    made_on(0, "gloo", monkeypatch, chunks=9)


def test_no_rank_is_left_out_of_more_groups_than_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks outside of a group on the CPU split the job's communicator, and ranks inside do not: sums must agree."""
    outside: Counter[int] = Counter()
    order = []
    for rank in range(STAGES * REPLICAS * TENSOR):
        calls = made_on(rank, "nccl", monkeypatch)
        order.append([(call["ranks"], call["backend"]) for call in calls])
        outside[rank] = sum(call["ranks"] is not None and rank not in call["ranks"] for call in calls)
    assert all(each == order[0] for each in order), "all ranks make all groups in one order"
    assert set(outside.values()) == {REPLICAS * TENSOR - 1}


def test_over_gloo_each_pipeline_has_groups_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group connects each of its ranks with each other, and tags tell its messages apart."""
    calls = made_on(0, "gloo", monkeypatch)
    assert Counter(len(call["ranks"] or range(128)) for call in calls) == {STAGES: 3 * REPLICAS * TENSOR, 128: 1}


def test_every_group_gets_the_limit_of_the_watchdog_as_torch_has_wrapped_it() -> None:
    """`TORCH_DISTRIBUTED_DEBUG=DETAIL` wraps each backend in one without that method; MPI has none either."""
    limits: list[object] = []
    plain = SimpleNamespace(_set_default_timeout=limits.append)
    backends = [plain, SimpleNamespace(wrapped_pg=plain), SimpleNamespace()]
    control, everyone, other = (
        SimpleNamespace(_device_types=["cpu"], _get_backend=lambda kind, backend=backend: backend)
        for backend in backends
    )
    of = groups.PipelineGroups((0, 1), {(0, 0, 1, 0): (control, other)}, control, everyone)
    of.leave_hangs_to_watchdog()
    assert limits == [groups.NO_LIMIT] * 2
