"""Choose the formats of a pipeline's links, refuse links that cannot be packed, and explain the formats."""

from __future__ import annotations

from dataclasses import replace

import torch

from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.config.values import LinksConfig
from terapipe_ds.messages import logger, show_value
from terapipe_ds.runtime.layout.layout import Layout, WireEnds
from terapipe_ds.runtime.links.groups import Wires


def problem_of_links(config: TeraPipeConfig, layout: Layout, device: torch.device) -> str | None:
    """Return why this rank cannot use `terapipe.links`; None if it can."""
    links = config.links
    if links.is_exact:
        return None
    shown = f"terapipe.links = {show_value(links.model_dump(exclude_defaults=True))}"
    wires = layout.wires()
    if not wires:
        return f"{shown}: all layers are on one stage, and nothing is sent; leave the key out"
    if _exact_wires(links, layout) >= set(wires):
        last = layout.num_parts - 2
        return f"{shown}: no link begins at that part or later; give exact_until_part at most {last}"
    if links.forward == "fp8":
        problem = _problem_of_fp8(device)
        if problem is not None:
            return f'{shown}: {problem}; take "int8" or "bf16"'
    return None


def _problem_of_fp8(device: torch.device) -> str | None:
    try:
        torch.ones(1, device=device).to(torch.float8_e4m3fn).to(torch.float32)
    except (RuntimeError, TypeError) as error:
        return f"torch cannot convert to float8_e4m3fn on {device} ({error})"
    return None


def packed_wires(wires: Wires, config: TeraPipeConfig, layout: Layout) -> Wires:
    """Return the wires with the formats of the config for activations and gradients; some links stay exact."""
    links, packed = config.links, dict(wires.by_ends)
    for ends in packed.keys() - _exact_wires(links, layout):
        there, back = packed[ends]
        packed[ends] = replace(there, wire_format=links.forward), replace(back, wire_format=links.backward)
    return replace(wires, by_ends=packed)


def _exact_wires(links: LinksConfig, layout: Layout) -> set[WireEnds]:
    return {ends for ends in layout.wires() if layout.placement[ends[0], ends[1]] < links.exact_until_part}


def warn_of_links(config: TeraPipeConfig) -> None:
    """Warn once, on rank 0, that results differ from the stock engine's."""
    links = config.links
    if not links.is_exact:
        logger.warning(
            f"terapipe.links: activations travel as {links.forward or 'they are'}, gradients as "
            f"{links.backward or 'they are'}. The wires round wider numbers, so that training is no longer equal to "
            "training in DeepSpeed's stock engine. Evaluations and the check of the first batch send exact messages"
        )
