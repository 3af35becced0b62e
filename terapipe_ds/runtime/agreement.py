"""All ranks have the same config before it matters: a mismatch is an error that shows both sides, never a hang."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as torch_dist

from terapipe_ds.config import TeraPipeConfigError

# What decides the order and the size of collectives and messages. Monitors and printing may differ.
COMPARED_SECTIONS = (
    "terapipe", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "fp16", "bf16",
    "zero_optimization", "pipeline", "gradient_clipping", "prescale_gradients", "optimizer", "data_types",
    "activation_checkpointing", "communication_data_type",
)  # fmt: skip


def _compared(raw: Mapping[str, Any]) -> dict[str, str]:
    return {name: json.dumps(raw.get(name), sort_keys=True, default=str) for name in COMPARED_SECTIONS}


def _is_enabled(values: Mapping[str, str]) -> bool:
    section = json.loads(values["terapipe"])
    return isinstance(section, dict) and section.get("enabled") is True


def raise_on_every_rank(problem: str | None) -> None:
    """Raise ``TeraPipeConfigError`` on every rank when one of them has found a problem, in the layers of its stage say.

    A collective over all ranks.
    """
    everyone: list[Any] = [problem]
    if torch_dist.get_world_size() > 1:
        everyone = _gathered(problem)
    found = {rank: text for rank, text in enumerate(everyone) if text is not None}
    if found:
        texts = "; ".join(sorted(set(found.values())))
        raise TeraPipeConfigError(texts if len(everyone) == 1 else f"on rank {min(found)}: {texts}")


def _gathered(mine: Any) -> list[Any]:
    """One object of each rank, exchanged on the CPU: DeepSpeed may not have chosen this rank's device yet."""
    everyone: list[Any] = [None] * torch_dist.get_world_size()
    group = torch_dist.new_group(backend="gloo")
    torch_dist.all_gather_object(everyone, mine, group=group)
    torch_dist.destroy_process_group(group)
    return everyone


def require_equal_configs(raw: Mapping[str, Any]) -> None:
    """Raise ``TeraPipeConfigError`` on *every* rank when ranks differ in what their engines must agree on.

    A collective over all ranks. Nothing is compared where no rank has an enabled ``terapipe`` section.
    """
    if not torch_dist.is_initialized() or torch_dist.get_world_size() == 1:
        return
    everyone = _gathered(_compared(raw))
    if not any(_is_enabled(values) for values in everyone):
        return
    differences = list(_differences(everyone))
    if differences:
        raise TeraPipeConfigError(
            "the ranks have different DeepSpeed configs; every rank must be given the same one:\n  "
            + "\n  ".join(differences)
        )


def _differences(everyone: list[dict[str, str]]) -> list[str]:
    lines = []
    for name in COMPARED_SECTIONS:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, values in enumerate(everyone):
            ranks_by_value.setdefault(values[name], []).append(rank)
        if len(ranks_by_value) > 1:
            sides = "; ".join(f"ranks {ranks}: {value}" for value, ranks in ranks_by_value.items())
            lines.append(f"{name}: {sides}")
    return lines
