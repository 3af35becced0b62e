"""Whether a checkpoint fits the layout that loads it: asked before DeepSpeed reads it, answered alike on every rank.

Nothing of plan or schedule is in a checkpoint, so any of them may follow any other. What does not fit is TP x PP x DP:
DeepSpeed (0.19.8) fails with a word on its own models where the tensor-parallel size differs, and where the number of
stages differs it fills the optimizer of a stage with the states of other layers, or with zeros.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from deepspeed.checkpoint import constants
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from terapipe_ds.config import TeraPipeConfigError
from terapipe_ds.runtime.agreement import done_on_each_rank
from terapipe_ds.runtime.checkpoint_manifest import CheckpointError

logger = logging.getLogger("terapipe_ds")

MODEL_SIZES = "terapipe_model_sizes"  # in ``universal_checkpoint_info`` of a module, and so in its checkpoints
_CONVERT = (
    "Convert the checkpoint (python -m deepspeed.checkpoint.ds_to_universal; its writer must use ZeRO stage 1) and "
    'load it with "checkpoint": {"load_universal": true}'
)
_ANOTHER = "Load another checkpoint, by its tag"


def check_checkpoint(
    engine: Any, load_dir: str, tag: str | None, load_optimizer_states: bool, load_module_only: bool
) -> None:
    """Refuse what would be loaded wrongly. A collective over all ranks; the first one reads. The arguments are those of
    ``load_checkpoint``.

    Raises:
        TeraPipeConfigError: on every rank.
        CheckpointError: on every rank: the file to look at cannot be read.
    """

    def look() -> str | None:
        problem = None if load_module_only else _problem_of_masters(engine, load_optimizer_states)
        saved = _first_file(engine, load_dir, tag) if problem is None else None
        return problem if saved is None else _problem(engine, saved, load_optimizer_states and not load_module_only)

    problem = done_on_each_rank(look if torch_dist.get_rank() == 0 else None)[0]
    if problem is not None:
        raise TeraPipeConfigError(problem)


def warn_of_checkpoints(engine: Any) -> None:
    """Say it before hours of training, not when a checkpoint is needed."""
    if isinstance(engine.optimizer, BF16_Optimizer) and not engine.zero_optimization():
        logger.warning(
            "bf16 without ZeRO: DeepSpeed saves the optimizer states of one replica and cannot load them again; only "
            'parameters can be resumed. Set "zero_optimization": {"stage": 1} and "data_types": {"grad_accum_dtype": '
            '"fp32"}'
        )


def _problem_of_masters(engine: Any, load_optimizer_states: bool) -> str | None:
    """Without ZeRO, DeepSpeed loads half-precision parameters and leaves their fp32 copies behind as they were, unless
    it loads these too: the next step would undo the load."""
    if engine.zero_optimization() or not hasattr(engine.optimizer, "refresh_fp32_params"):
        return None
    if isinstance(engine.optimizer, BF16_Optimizer):
        return (
            "DeepSpeed cannot load optimizer states in bf16 without ZeRO: it has saved those of one replica. Load the "
            'parameters alone, with load_module_only=True, and set "zero_optimization": {"stage": 1} for the next time'
        )
    if not load_optimizer_states:
        return (
            "load_optimizer_states=False leaves the fp32 copies of the parameters as they are, so that the next step "
            "undoes the load. Use load_module_only=True"
        )
    return None


def _first_file(engine: Any, load_dir: str, tag: str | None) -> Mapping[str, Any] | None:
    """The states that the first rank saved; None where there are none, which is for DeepSpeed to say."""
    folder = folder_of(engine, load_dir, tag)
    path = None if folder is None else folder / "mp_rank_00_model_states.pt"
    if path is None or not path.is_file():
        return None
    return read_states(path, lambda: engine.checkpoint_engine.load(str(path), map_location=torch.device("cpu")))


def read_states(path: Path, read: Callable[[], Any]) -> Mapping[str, Any]:
    """What ``read`` finds in the file ``path`` of a checkpoint.

    Raises:
        CheckpointError: nothing that can be read. Unpickling raises errors of any kind, none with the name of the file.
    """
    try:
        states = read()
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}). {_ANOTHER}") from error
    if not isinstance(states, Mapping):
        raise CheckpointError(f"{path} holds a {type(states).__name__}, not the states of a rank. {_ANOTHER}")
    return states


def folder_of(engine: Any, load_dir: str, tag: str | None) -> Path | None:
    """Where DeepSpeed will look for a checkpoint; None where nothing names one."""
    if tag is None:
        latest = Path(load_dir, "latest_universal" if engine.load_universal_checkpoint() else "latest")
        if not latest.is_file():
            return None
        tag = latest.read_text().strip()
    return Path(load_dir, str(tag))


def states_folder(
    engine: Any, load_dir: str, tag: str | None, load_optimizer_states: bool, load_module_only: bool
) -> Path | None:
    """The same, where it will read optimizer states of stages there; ZeRO's fp32 copies are among these."""
    if load_module_only or engine.load_universal_checkpoint():
        return None
    return folder_of(engine, load_dir, tag) if load_optimizer_states or engine.zero_optimization() else None


def _problem(engine: Any, saved: Mapping[str, Any], with_optimizer: bool) -> str | None:
    return _problem_of_model(engine.module, saved) or (
        _problem_of_universal(engine)
        if engine.load_universal_checkpoint()
        else _problem_of_layout(engine, saved, with_optimizer)
    )


def _problem_of_universal(engine: Any) -> str | None:
    if engine.zero_optimization_stage() == 1:
        return None
    return (
        f"a universal checkpoint is loaded by ZeRO stage 1, not by stage {engine.zero_optimization_stage()}, which "
        'would pass over its parameters. Set "zero_optimization": {"stage": 1}'
    )


def _problem_of_layout(engine: Any, saved: Mapping[str, Any], with_optimizer: bool) -> str | None:
    dimensions = saved.get(constants.CHECKPOINT_PARALLEL_DIMS)
    if not isinstance(dimensions, Mapping):  # of another version of DeepSpeed
        return None
    grid = engine.grid
    tensor, stages = grid.get_slice_parallel_world_size(), grid.get_pipe_parallel_world_size()
    saved_tensor, saved_stages = (
        dimensions.get(key) for key in (constants.CHECKPOINT_TP_DEGREE, constants.CHECKPOINT_PP_DEGREE)
    )
    if saved_tensor != tensor:
        return (
            f"the checkpoint was saved by {saved_tensor} tensor-parallel ranks, and {tensor} would load it: each holds "
            f"another part of the parameters. {_CONVERT}"
        )
    if saved_stages != stages and with_optimizer:
        return (
            f"the checkpoint was saved by {saved_stages} stages, and {stages} would load it: optimizer states are "
            f"saved by stage. Load the parameters alone, with load_module_only=True. To keep the states: {_CONVERT}"
        )
    replicas, saved_replicas = engine.dp_world_size, saved.get("dp_world_size")
    if engine.zero_optimization() and with_optimizer and saved_replicas != replicas:
        return (
            f"the checkpoint was saved by {saved_replicas} data-parallel replicas, and {replicas} would load it: ZeRO "
            f"splits optimizer states over them. Load the parameters alone, with load_module_only=True. To keep the "
            f"states: {_CONVERT}"
        )
    return None


def with_description(engine: Any, client_state: Mapping[str, Any] | None) -> dict[str, Any]:
    """``client_state``, with the description of the module's parameters where a method gives it and it is not there.

    DeepSpeed (0.19.8) takes ``universal_checkpoint_info`` for a dict and would save the method, which takes the module
    and its process groups along. Megatron-DeepSpeed, where it is a method, gives its dict as the client's state.
    """
    given, name = dict(client_state or {}), constants.UNIVERSAL_CHECKPOINT_INFO
    if name in given or engine.has_moe_layers or not callable(getattr(engine.module, name, None)):
        return given  # with experts DeepSpeed makes a dict of it itself, and takes none from the client
    return {**given, name: _described(engine.module)}


def _described(module: Any) -> Any:
    """How a module describes its parameters to DeepSpeed's converter, in a dict or by a method; None: not at all."""
    info = getattr(module, constants.UNIVERSAL_CHECKPOINT_INFO, None)
    return info() if callable(info) else info


def _sizes(info: Any) -> Mapping[str, Any] | None:
    return info.get(MODEL_SIZES) if isinstance(info, Mapping) else None


def _problem_of_model(module: Any, saved: Mapping[str, Any]) -> str | None:
    """Sizes that a module writes down beside its parameters: shapes alone do not tell heads from head size."""
    theirs = _sizes(saved.get(constants.UNIVERSAL_CHECKPOINT_INFO))
    ours = None if theirs is None else _sizes(_described(module))
    if theirs is None or ours is None:
        return None
    different = [
        f"{name}={theirs.get(name)} there and {ours.get(name)} here"
        for name in sorted({*theirs, *ours})
        if theirs.get(name) != ours.get(name)
    ]
    if not different:
        return None
    return f"the checkpoint is of another model: {', '.join(different)}. Build the one that was saved"
