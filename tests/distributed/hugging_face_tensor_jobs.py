"""Train tiny models of transformers on stages x tensor-parallel ranks. Runs inside the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as torch_dist
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor

import terapipe_ds
from terapipe_ds.models.hugging_face.layers import Piece
from terapipe_ds.models.hugging_face.tensor_parallel.layers import gathered_copy, share_of
from tests.distributed import engines
from tests.distributed.hugging_face_jobs import batches, differences, engine_of, train_whole
from tests.hugging_face_families import config_of
from tests.unit.models.hugging_face.sliced_model import in_fp64, whole_model

Grid = tuple[int, int, int]


def topology(grid: Grid) -> PipeModelDataParallelTopology:
    """Return the topology of stages, data-parallel and tensor-parallel ranks."""
    return PipeModelDataParallelTopology(num_pp=grid[0], num_dp=grid[1], num_mp=grid[2])


def whole_weights(module: Any) -> dict[str, Tensor]:
    """Return the whole weights of all stages by their names in the model of transformers. A collective."""
    here = {
        f"{name}.{key}": p.detach().clone()
        for piece in module.modules()
        if isinstance(piece, Piece)
        for name, held in zip(piece.names, piece.held, strict=True)
        for key, p in gathered_copy(held).named_parameters()
    }
    everyone: list[Any] = [None] * torch_dist.get_world_size()
    torch_dist.all_gather_object(everyone, here)
    return {name: weight for stage in everyone for name, weight in stage.items()}


def changed_config(family: str, changes: dict[str, Any]) -> Any:
    config = config_of(family)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def train_divided(
    family: str, grid: Grid, terapipe: dict[str, Any], changes: dict[str, Any] | None = None, **options: Any
) -> dict[str, float]:
    """Return the largest errors on this rank against the whole model in this process, by the model's own class."""
    with in_fp64():
        config = changed_config(family, changes or {})
        module = terapipe_ds.from_config(config, topology=topology(grid), dtype=torch.float64, **options)
        whole = whole_model(config, whole_weights(module))
        data = batches(config.get_text_config().vocab_size)
        with engine_of(module, terapipe, tensor_parallel={"autotp_size": grid[2]}) as engine:
            run = engines.train(engine, [[module.to_tuple(batch) for batch in step] for step in data])
            names, parameters = module.checkpoint_names(), dict(module.named_parameters())
        key_of = {key: parameters[name] for name, key in names.items()}
        losses, gradients, after = train_whole(whole, data)

        def shared(tensors: Any) -> dict[str, Tensor]:
            return {key: share_of(key_of[key], t.detach()) if key in key_of else t for key, t in tensors.items()}

        return differences(run, names, losses, list(map(shared, gradients)), shared(after))
