"""Train adapters of peft on stages, and in one process by peft itself. Runs inside the ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as torch_dist
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import terapipe_ds
from terapipe_ds.runtime.engine.build import NOTHING_TRAINED
from tests.distributed import engines
from tests.distributed.compare import relative_error
from tests.distributed.hugging_face_jobs import batches, differences, engine_of, train_whole, weights_of_all_stages
from tests.hugging_face_families import config_of
from tests.unit.models.hugging_face.sliced_model import in_fp64


def train_adapters(
    family: str,
    terapipe: dict[str, Any],
    layers: list[int],
    folder: str,
    stages: int = 2,
    is_bf16: bool = False,
    gradients_in: str = "bf16",
) -> dict[str, float]:
    """The largest errors on this rank; and whether peft reads what was saved, with the same values.

    In bf16, with ZeRO-1, of the losses alone.
    """
    dtype = torch.float32 if is_bf16 else torch.float64
    data_types = {"data_types": {"grad_accum_dtype": gradients_in}}  # in fp32 by another optimizer of DeepSpeed's
    changes = {"bf16": {"enabled": True}, **engines.ZERO1, **data_types} if is_bf16 else {}
    with contextlib.nullcontext() if is_bf16 else in_fp64():
        config = config_of(family)
        config.num_hidden_layers = 2 * stages
        adapter = LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], layers_to_transform=layers, init_lora_weights=False
        )
        module = terapipe_ds.from_config(config, num_stages=stages, dtype=dtype, adapter=adapter)
        weights = weights_of_all_stages(module)
        base = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model = get_peft_model(base, adapter).train()
        base.load_state_dict(weights, strict=False)
        data = batches(config.vocab_size)
        with engine_of(module, terapipe, **changes) as engine:
            run = engines.train(engine, [[module.to_tuple(batch) for batch in step] for step in data])
            terapipe_ds.save_pretrained(engine, folder)
            names = module.checkpoint_names()
        for each in (run.parameters, *run.gradients):
            each.pop(NOTHING_TRAINED, None)
        losses, gradients, parameters = train_whole(model, data)
        if is_bf16:
            return {"loss": max(relative_error(a, b) for a, b in zip(run.returned, losses, strict=True))}
        own = {key.removeprefix("base_model.model."): value for key, value in parameters.items()}
        cut = [{key.removeprefix("base_model.model."): g for key, g in step.items()} for step in gradients]
        errors = differences(run, names, losses, cut, own)
        torch_dist.barrier()
        fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        read = PeftModel.from_pretrained(fresh, folder).state_dict()
        saved = [
            float((read[f"base_model.model.{name}"] - module.get_parameter(local)).abs().max())
            for local, name in names.items()
            if ".lora_" in name
        ]
        errors["saved"] = max(saved, default=0.0)
        return errors
