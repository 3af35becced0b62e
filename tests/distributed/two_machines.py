"""Run a rank that may have a machine to itself: a working folder, a cache, traces and checkpoints by short paths.

torchrun --nnodes 2 --nproc-per-node 1 --node-rank 0 ... two_machines.py SHARED_FOLDER

writes the outcome to `result.json` in the working folder. The same job runs in the ranks of one machine.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as torch_dist

from tests.distributed.engines import batches, engine_of, gpt_layers, micro_batch, raised_by, section

STEPS = 3
MEASURED = section(slices="auto", granularity_tokens=8, planner={"cache_dir": "cache"}, trace_dir="traces")


def train_and_save(shared: str, folder: str = ".") -> dict[str, Any]:
    """Train in a working folder, save to a folder of each machine, then to one that all see, and load that."""
    with contextlib.chdir(folder):
        return _train_and_save(shared)


def _train_and_save(shared: str) -> dict[str, Any]:
    with engine_of(gpt_layers(), MEASURED) as engine:
        result: dict[str, Any] = {"losses": _losses(engine, range(STEPS))}
        result["save"] = raised_by(lambda: engine.save_checkpoint("saved"))
        engine.save_checkpoint(shared)
        result["after"] = _losses(engine, range(STEPS, STEPS + 1))
    with engine_of(gpt_layers(), MEASURED) as engine:
        engine.load_checkpoint(shared)
        result["resumed"] = _losses(engine, range(STEPS, STEPS + 1))
    return result


def try_mistakes(shared: str) -> dict[str, Any]:
    """Make mistakes with machines that differ; return the errors."""
    result: dict[str, Any] = {}
    only_here = Path("only_here")
    rank = torch_dist.get_rank()
    with engine_of(gpt_layers(), section()) as engine:
        engine.save_checkpoint(shared, tag="copied")
        if rank == 0:
            only_here.symlink_to(shared)
        torch_dist.barrier()
        result["load"] = raised_by(lambda: engine.load_checkpoint("only_here", tag="copied"))
        other_length = [[micro_batch(seed, length=23 + rank) for seed in range(2)]]
        result["lengths"] = raised_by(lambda: engine.train_batch(iter(other_length[0])))
    result["config"] = raised_by(lambda: engine_of(gpt_layers(), section(slices=3 + rank)).__enter__())
    Path("order.csv").write_text(f"of rank {rank}\n")
    result["file"] = raised_by(lambda: engine_of(gpt_layers(), section(schedule="order.csv")).__enter__())
    local = {"checkpoint": {"use_node_local_storage": True}}
    with engine_of(gpt_layers(), section(), **local) as engine:
        engine.train_batch(iter(batches(1)[0]))
        result["local storage"] = raised_by(lambda: engine.save_checkpoint("local"))
    return result


def _losses(engine: Any, steps: range) -> list[float]:
    return [float(engine.train_batch(iter(batches(1, first_seed=1000 * step)[0]))) for step in steps]


def main() -> None:
    shared = sys.argv[1]
    # DeepSpeed would compile this operator, for a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    result = train_and_save(shared) | try_mistakes(shared)
    result["local_rank"], result["rank"] = os.environ["LOCAL_RANK"], torch_dist.get_rank()
    Path("result.json").write_text(json.dumps(result))
    torch_dist.destroy_process_group()


if __name__ == "__main__":
    main()
