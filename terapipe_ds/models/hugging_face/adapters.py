"""Put adapters of peft into the modules of a stage, and write them as peft does."""

from __future__ import annotations

import copy
import zlib
from pathlib import Path

import torch
import torch.distributed as torch_dist
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from terapipe_ds.files.atomic import write_atomically
from terapipe_ds.models.hugging_face.outline import Outline
from terapipe_ds.models.hugging_face.refusals import ModelRefusedError

_NAME = "default"  # of the adapter, as peft calls the first one


class Adapters:
    """Low-rank adapters beside frozen weights, in the modules that a config of peft names.

    Their initial values depend on the seed and the name of a module alone.

    Args:
        config: peft's.
        model: the model with parameters on the device "meta"; it is changed.
        outline: which modules of it have weights.

    Raises:
        ModelRefusedError: no module has such a name, or what is asked does not end at a module of a stage.
    """

    def __init__(self, config: LoraConfig, model: PreTrainedModel, outline: Outline, seed: int) -> None:
        self.config, self._outline, self._seed = config, outline, seed
        if config.modules_to_save or config.bias != "none":
            raise ModelRefusedError("adapters with modules_to_save or bias are not supported: train the whole model")
        try:
            inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
        except ValueError as error:
            raise ModelRefusedError(str(error)) from error
        names = [name for name, _ in model.named_parameters() if f".{_NAME}." in name]
        self._owners = {owner for owner in outline.names if any(name.startswith(f"{owner}.") for name in names)}
        if outline.tied is not None and self._owners & {outline.embedding, outline.head}:
            raise ModelRefusedError("its embedding is the output matrix as well, and takes no adapter")

    def put_into(self, name: str, module: nn.Module) -> nn.Module:
        """Return the module with frozen weights, and with adapters where the config names some of it."""
        module.requires_grad_(False)
        if name not in self._owners:
            return module
        whole = module
        for part in reversed(name.split(".")):  # so that its parts have the names that the config speaks of
            whole, inner = nn.Module(), whole
            whole.add_module(part, inner)
        whole.config = self._outline.config  # type: ignore[assignment]
        with torch.random.fork_rng([]):
            torch.manual_seed(self._seed * 1_000_003 + zlib.crc32(f"adapters of {name}".encode()))
            inject_adapter_in_model(copy.deepcopy(self.config), whole)
        return whole.get_submodule(name)

    def save(self, pieces: dict[str, dict[str, Tensor]], source: Path | None, folder: Path) -> None:
        """Write the adapters of all stages and their config, as `PeftModel.save_pretrained` does. Rank 0 writes."""
        mark = f".{_NAME}."
        here = {
            f"base_model.model.{key.replace(mark, '.')}": value.detach().cpu().clone()
            for state in pieces.values()
            for key, value in state.items()
            if mark in key
        }
        everyone: list[dict[str, Tensor]] = [{} for _ in range(torch_dist.get_world_size())]
        torch_dist.all_gather_object(everyone, here)
        if torch_dist.get_rank() == 0:
            tensors = {key: value for stage in everyone for key, value in stage.items()}
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / "adapter_model.safetensors"
            write_atomically(file, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
            config = copy.deepcopy(self.config)
            config.inference_mode = True
            config.base_model_name_or_path = None if source is None else str(source)
            config.save_pretrained(folder)
