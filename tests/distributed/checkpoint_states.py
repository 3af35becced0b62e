"""Read the states that a checkpoint must restore: the states of parameters, by DeepSpeed's own functions."""

import argparse
import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from terapipe_ds.runtime.checkpoints.manifest import MANIFEST

MOMENTS = ("exp_avg", "exp_avg_sq")


def states_of(engine: PipelineEngine) -> dict[str, dict[str, Tensor]]:
    """Map each parameter to its value, the copy that the optimizer trains, and the optimizer's states of it."""
    return {name: _state_of(engine, p) for name, p in engine.module.named_parameters()}


def _state_of(engine: PipelineEngine, parameter: torch.nn.Parameter) -> dict[str, Tensor]:
    if not hasattr(parameter, "_hp_mapping"):
        state = engine.optimizer.state[trained_copy(engine, parameter)]
    else:
        mapping, tell = parameter._hp_mapping, deepspeed.utils.safe_get_full_optimizer_state
        if mapping is not None:  # after a load DeepSpeed does so at the next step
            flat = engine.optimizer.optimizer.param_groups[mapping.param_group_index]["params"][0]
            mapping.set_optim_state_fragment(flat, engine.optimizer.optimizer.state[flat])
        state = {key: tell(parameter, key) for key in MOMENTS}
    found = {"value": parameter, "copy": trained_copy(engine, parameter), **state}
    return {key: value.detach().clone() for key, value in found.items()}


def trained_copy(engine: PipelineEngine, parameter: torch.nn.Parameter) -> Tensor:
    """Return the tensor that the optimizer trains: the parameter or, in half precision and with ZeRO, an fp32 copy."""
    if hasattr(parameter, "_hp_mapping"):
        return deepspeed.utils.safe_get_full_fp32_param(parameter)
    if hasattr(engine.optimizer, "fp32_groups"):
        for group, copies in zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True):
            for half, copy in zip(group, copies, strict=True):
                if half is parameter:
                    return copy
    return parameter


def as_older_versions(folder: str) -> None:
    """Rewrite the checkpoints of a folder in the older form of this package, without checksums and ids of jobs."""
    for path in Path(folder).glob(f"*/{MANIFEST}") if torch.distributed.get_rank() == 0 else ():
        document = json.loads(path.read_text())
        assert document.pop("checksum") and document.pop("checksums") and document.pop("job")
        path.write_text(json.dumps(document))


def convert(folder: str, tag: str, inject_missing_state: bool = False) -> None:
    """Run DeepSpeed's converter on rank 0, in this process: `folder`/`tag` -> `folder`/`tag`_universal."""
    from deepspeed.checkpoint import ds_to_universal

    arguments: dict[str, Any] = {
        "input_folder": f"{folder}/{tag}",
        "output_folder": f"{folder}/{tag}_universal",
        "num_extract_workers": 1,
        "num_merge_workers": 1,
        "keep_temp_folder": False,
        "strict": True,
        "inject_missing_state": inject_missing_state,
    }
    if torch.distributed.get_rank() == 0:
        ds_to_universal.main(argparse.Namespace(**arguments))
    torch.distributed.barrier()
