"""Save and load the state of a loss module, which belongs to no layer: DeepSpeed writes a file for each layer alone."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from terapipe_ds.runtime.checkpoints.manifest import CheckpointError

logger = logging.getLogger("terapipe_ds")


def save_loss_state(engine: PipelineEngine, folder: str, without_frozen: bool) -> None:
    """Write parameters and buffers of a loss module, on one rank that knows the loss and has seen all its gradients."""
    module, loss_fn = engine.module, engine.module.loss_fn
    if not isinstance(loss_fn, nn.Module) or not engine.is_last_stage() or engine.grid.data_parallel_id != 0:
        return
    frozen = {name for name, each in loss_fn.named_parameters() if not each.requires_grad} if without_frozen else set()
    state = {name: each for name, each in loss_fn.state_dict().items() if name not in frozen}
    if state:
        engine.checkpoint_engine.save(state_dict=state, path=_path(module, folder))


def load_loss_state(engine: PipelineEngine, folder: str, strict: bool) -> None:
    """Read the state of a loss module on every stage.

    Raises:
        CheckpointError: with `strict`, the checkpoint has no values of what is trained, as DeepSpeed's own has none.
    """
    module, loss_fn = engine.module, engine.module.loss_fn
    if not isinstance(loss_fn, nn.Module) or not loss_fn.state_dict():
        return
    path = _path(module, folder)
    if Path(path).is_file():
        state = engine.checkpoint_engine.load(path, map_location="cpu")
        loss_fn.load_state_dict(state, strict=strict)
        return
    trained = [f"loss_fn.{name}" for name, each in loss_fn.named_parameters() if each.requires_grad]
    if trained and strict:
        raise CheckpointError(
            f"the checkpoint has no values of {', '.join(trained[:4])}, trained parameters of the loss module: "
            "DeepSpeed's own engine, its converter and older versions of this package save layers alone. Give the "
            "module its values yourself and load with load_module_strict=False, which leaves them as they are"
        )
    if engine.global_rank == 0:
        logger.warning("the checkpoint has nothing of loss_fn (%s), which stays as it is", type(loss_fn).__name__)


def _path(module: Any, folder: str) -> str:
    """Return the file of this tensor-parallel rank: that of a layer by another name."""
    path = Path(module.ckpt_layer_path(folder, 0))
    return str(path.with_name(re.sub(r"^layer_\d+", "loss_fn", path.name)))
