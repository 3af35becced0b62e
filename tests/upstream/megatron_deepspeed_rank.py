"""One rank of a training run of an unmodified script, with the losses of its steps written down in full.

    python tests/upstream/megatron_deepspeed_rank.py LOSSES.json SCRIPT ARGUMENTS...

Upstream prints seven digits of a loss; what `train_batch` returns has all. Nothing else is changed, but that DeepSpeed
does not compile `deepspeed_shm_comm`, which it would do for a minute on a CPU, and for ever after a rank was killed
meanwhile.
"""

from __future__ import annotations

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
    """Write down the losses of ``engine`` by its steps, on rank 0; all ranks are given the same."""
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
