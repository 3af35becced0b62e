"""Check the lengths of slices against the module's requirements."""

from __future__ import annotations

import math
from collections.abc import Sequence

from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.messages import logger


def problem_of_lengths(what: str, lengths: Sequence[int], multiple: int, shortest: int = 1) -> str | None:
    """Return why slices of these lengths cannot run; None if they can. `what` names their source."""
    if len(lengths) > 1 and min(lengths) < shortest:
        return (
            f"{what} = {list(lengths)}: a slice has {min(lengths)} token, which layers of the model take for a step of "
            f"generation: give slices of {shortest} tokens or more"
        )
    bad = [str(length) for length in lengths if length % multiple]
    if not bad:
        return None
    return (
        f"{what} = {list(lengths)}: slices of {', '.join(dict.fromkeys(bad[:4]))} tokens are no multiples of "
        f"{multiple}, the model's slice_length_multiple (sequence parallelism divides the tokens of a slice over so "
        "many ranks, and fp8 divides them into blocks). Give multiples of it, or switch the two off."
    )


def with_multiple(config: TeraPipeConfig, multiple: int, rank: int) -> TeraPipeConfig:
    """Return the config with a granularity that every slice can be cut by; listed slices do not change."""
    raised = math.lcm(config.granularity_tokens, multiple)
    is_cut = config.slices != 1 and not isinstance(config.slices, tuple)
    if raised != config.granularity_tokens and is_cut and rank == 0:
        shorter = "" if "granularity_tokens" in config.model_fields_set else ", of fewer where sequences are short"
        logger.info(
            f"terapipe.granularity_tokens is raised from {config.granularity_tokens} to {raised}{shorter}: slices must "
            f"be multiples of {multiple} tokens, the model's slice_length_multiple"
        )
    return config.with_multiple(multiple)
