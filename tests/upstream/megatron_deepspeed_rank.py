"""Run one rank of an unmodified training script, and write the losses of its steps with all digits.

    python tests/upstream/megatron_deepspeed_rank.py LOSSES.json SCRIPT ARGUMENTS...

Upstream prints seven digits of a loss; `train_batch` returns all of them. One other thing is changed: DeepSpeed does
not compile `deepspeed_shm_comm`. Compiling takes about a minute on a CPU, and blocks for ever if a rank was killed
while it compiled.
"""

import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import deepspeed


def main() -> None:
    losses_path, script, *arguments = sys.argv[1:]
    os.environ["LOCAL_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]  # how many CPUs DeepSpeed takes for devices
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    sys.path.insert(0, str(Path(script).parent))
    training = importlib.import_module("megatron.training")
    set_up = training.setup_model_and_optimizer  # type: ignore[attr-defined]

    def set_up_and_record(*args: Any, **kwargs: Any) -> Any:
        (engine,), *others = set_up(*args, **kwargs)
        record(engine, Path(losses_path))
        return [engine], *others

    training.setup_model_and_optimizer = set_up_and_record  # type: ignore[attr-defined]
    sys.argv = [script, *arguments, "--local_rank", os.environ["LOCAL_RANK"]]  # as DeepSpeed's launcher does
    runpy.run_path(script, run_name="__main__")


def record(engine: Any, path: Path) -> None:
    """Write the losses of `engine` by its steps, on rank 0, since `train_batch` returns the same on all ranks."""
    train_batch, losses = engine.train_batch, {}

    def train_batch_and_record(*args: Any, **kwargs: Any) -> Any:
        loss = train_batch(*args, **kwargs)
        losses[engine.global_steps] = float(loss)
        if os.environ["RANK"] == "0":
            path.write_text(json.dumps({"engine": type(engine).__name__, "losses": losses}), encoding="utf-8")
        return loss

    engine.train_batch = train_batch_and_record


if __name__ == "__main__":
    main()
