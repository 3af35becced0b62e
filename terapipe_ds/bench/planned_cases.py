"""Measure the costs of slices on this run's own model and machine, and plan from them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as torch_dist

from terapipe_ds.bench.attempts import Position
from terapipe_ds.bench.cases import AUTO, CUTS, Case, Job
from terapipe_ds.bench.ranks import build_engine, gpt_config, micro_batches
from terapipe_ds.costs.fitted import CostModel
from terapipe_ds.costs.profile import Profile
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner import best_schedule, plan_slices
from terapipe_ds.planner.memory import MemoryModel
from terapipe_ds.runtime.profiling.cache import memory_of


@dataclass
class PlannedCases:
    """What was measured before the first turn, by the cut of the layers, and the plans from it.

    With fewer cores than stages the seconds of slices are processor time, as those of the replayed steps are; messages
    are timed by the clock all the same.
    """

    job: Job
    costs: dict[str, list[CostModel]] = field(default_factory=dict)
    memory: dict[str, MemoryModel] = field(default_factory=dict)

    @classmethod
    def measure(cls, job: Job, cases: Sequence[Case], folder: Path, position: Position) -> PlannedCases:
        """Let engines measure their slices as `"slices": "auto"` does. A collective.

        One has whole stages, and one each other cut for which a plan is asked.

        Args:
            cases: of the job, those that can be built.
        """
        planned, ours = cls(job), [case for case in cases if case.system == "terapipe"]
        left_out = {failed.cut for failed in job.left_out}
        for cut, case in {case.cut if case.needs_costs else "whole stages": case for case in ours}.items():
            if cut in left_out:
                continue
            position.at_cut(cut)
            one = Case("terapipe", CUTS[cut][-1]) if cut in CUTS else case
            planned._measure(cut, one, folder / cut.replace(" ", "-"))
        return planned

    def _measure(self, cut: str, case: Case, folder: Path) -> None:
        job = self.job
        section = {
            "enabled": True,
            "schedule": case.schedule,
            "chunks_per_stage": case.chunks_per_stage,
            "slices": "auto",
            "granularity_tokens": job.granularity,
            "planner": {"cache_dir": str(folder)},
        }
        work = dataclasses.replace(job.work, accumulation=1)
        engine = build_engine(section, work, ds_config=job.ds_config, gpt=job.gpt)
        engine.slice_clock = time.process_time if job.replayed else None
        data = micro_batches(work, 1, int(gpt_config(work, job.gpt).vocab_size))
        engine.train_batch(iter(data))
        engine.destroy()
        torch_dist.barrier()  # rank 0 has written the profile
        (path,) = folder.glob("profile-*.json")
        profile = Profile.load(path)
        memory = memory_of(profile)
        if memory is None:
            raise ValueError("no memory of slices was measured: leave out the profiler in --config that prevents it")
        self.memory[cut] = memory
        self.costs[cut] = CostModel.from_profile(profile)

    def plan(self, case: Case, accumulation: int) -> SlicePlan:
        """Return the planner's plan, the same on all ranks. A collective.

        Raises:
            ValueError: on all ranks: there is none.
        """
        found: list[Any] = [None, None]
        if torch_dist.get_rank() == 0:
            try:
                found[0] = plan_slices(
                    self.costs[case.cut],
                    self.job.work.sequence_length,
                    self.job.work.stages,
                    accumulation,
                    self.job.granularity,
                    case.schedule,
                    case.max_slices,
                    chunks_per_stage=case.chunks_per_stage,
                    schedule_options=case.schedule_options,
                ).plan
            except ValueError as error:
                found[1] = str(error)
        torch_dist.broadcast_object_list(found, src=0)
        plan, problem = found
        if problem is not None:
            raise ValueError(problem)
        assert isinstance(plan, SlicePlan)
        return plan

    def schedule(self, case: Case, accumulation: int, plan: SlicePlan) -> str:
        """Return the case's own schedule; for "auto" the best with `plan` of those that have one part per stage."""
        if case.schedule != AUTO:
            return case.schedule
        return best_schedule(self.costs[case.cut], plan, self.job.work.stages, accumulation).schedule
