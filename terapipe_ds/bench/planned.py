"""The costs that a run measures of its own model and machine, and the planner's plans from them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as torch_dist

from terapipe_ds.bench.cases import Job
from terapipe_ds.bench.ranks import build_engine, gpt_config, micro_batches
from terapipe_ds.cost_model import CostModel
from terapipe_ds.cost_profile import Profile
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner import plan_slices


@dataclass
class Planned:
    """What was measured before the first turn; ``costs`` is None where nothing needs it, or where it cannot be had:
    with fewer cores than stages bytes are what they are, but seconds mean nothing."""

    job: Job
    costs: list[CostModel] | None = None
    profile: str | None = None
    memory: list[dict[str, Any]] | None = None

    @classmethod
    def measure(cls, job: Job, folder: Path) -> Planned:
        """Let an engine measure its slices as ``"slices": "auto"`` does. A collective."""
        if not any(case.system == "terapipe" for case in job.cases):
            return cls(job)
        section = {
            "enabled": True, "schedule": "seq1f1b", "slices": "auto", "granularity_tokens": job.granularity,
            "planner": {"cache_dir": str(folder)},
        }  # fmt: skip
        work = dataclasses.replace(job.work, accumulation=1)
        engine = build_engine(section, work, ds_config=job.ds_config, gpt=job.gpt)
        data = micro_batches(work, 1, int(gpt_config(work, job.gpt).vocab_size))
        engine.train_batch(iter(data))
        engine.destroy()
        torch_dist.barrier()  # rank 0 has written the profile
        memory_path = next(folder.glob("profile-*.memory.json"))
        (path,) = [file for file in folder.glob("profile-*.json") if file != memory_path]
        memory = json.loads(memory_path.read_text())
        if job.replayed:
            return cls(job, memory=memory)
        text = path.read_text()
        return cls(job, CostModel.from_profile(Profile.from_json(text)), text, memory)

    def plan(self, schedule: str, accumulation: int) -> SlicePlan:
        """The planner's plan, the same on all ranks.

        Raises:
            ValueError: nothing was measured.
        """
        if self.costs is None:
            raise ValueError("to measure and plan slices, the machine needs a core for each stage")
        plans: list[Any] = [None]
        if torch_dist.get_rank() == 0:
            result = plan_slices(
                self.costs, self.job.work.sequence_length, self.job.work.stages, accumulation, self.job.granularity,
                schedule,
            )  # fmt: skip
            plans = [result.plan]
        torch_dist.broadcast_object_list(plans, src=0)
        plan: SlicePlan = plans[0]
        return plan

    def found(self) -> dict[str, Any]:
        """For the record of a rank."""
        return {"profile": self.profile, "memory": self.memory}
