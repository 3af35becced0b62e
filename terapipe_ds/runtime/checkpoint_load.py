"""Agree over all ranks on the checkpoint to load."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from terapipe_ds.runtime.agreement import done_on_each_rank
from terapipe_ds.runtime.checkpoint_choice import Found, choose_checkpoint
from terapipe_ds.runtime.checkpoint_manifest import CheckpointError
from terapipe_ds.runtime.checkpoint_save import leads_its_files

logger = logging.getLogger("terapipe_ds")


def find_checkpoint(engine: Any, load_dir: str, tag: str | None, with_optimizer: bool) -> Found:
    """What :func:`choose_checkpoint` finds. A collective over all ranks: those look that name files.

    Raises:
        CheckpointError: on every rank: what is asked for is not whole, with the files that are missing.
    """
    folder = Path(load_dir)
    if engine.load_universal_checkpoint():  # what DeepSpeed's converter has made has no manifest
        return Found(tag, tag)

    def choose() -> Found:
        try:
            return choose_checkpoint(folder, None if tag is None else str(tag), with_optimizer)
        except (OSError, ValueError) as error:
            raise CheckpointError(str(error)) from error

    answers = done_on_each_rank(choose if leads_its_files(engine) else None)
    tags = {answer.tag for answer in answers if answer is not None}
    if len(tags) > 1:
        raise CheckpointError(
            f"the last whole checkpoint in {folder} is not the same on every node: {', '.join(map(str, tags))}; name "
            "one that all have, as load_checkpoint's tag"
        )
    found = [answer for answer in answers[: engine.global_rank + 1] if answer is not None][-1]
    if found.note is not None and engine.global_rank == 0:
        logger.warning("%s", found.note)
    return found
