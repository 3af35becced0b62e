"""The job as a training script for the launcher; what to do stands in an environment variable, as JSON."""

from __future__ import annotations

import os

import deepspeed
import torch

from tests.distributed.failures.job import ENVIRONMENT, Job, run


def main() -> None:
    torch.set_num_threads(1)
    # DeepSpeed would compile this operator now, for a minute and behind a lock that outlives a killed rank.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for step, loss in enumerate(run(Job.from_json(os.environ[ENVIRONMENT])), start=1):
        print(f"step {step}: loss {loss}", flush=True)


if __name__ == "__main__":
    main()
