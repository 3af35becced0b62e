"""Run a training that saves as it goes, and may be killed at a named point. Runs inside the ranks.

One log per rank records each event in a line, written at once: the process may be gone a moment later.

    resumed 4 | step 5 0x1.8p+1 | saving 6 | saved 6 | end <hash of the parameters>
"""

import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from terapipe_ds.runtime.checkpoints import save as checkpoint_save
from tests.distributed.engines import engine_of, gpt_layers, micro_batch, section
from tests.distributed.failures.faults import wrap

MICRO_BATCHES = 2


@dataclass(frozen=True)
class Training:
    """Describe the training and how it is saved.

    Args:
        stages: 2 ranks of a pipeline, or 1: two replicas.
        tag: None: a name for each step; else one that every save replaces.
    """

    stages: int = 2
    zero_stage: int = 0
    tag: str | None = None
    steps: int = 6
    save_every: int = 2
    slices: int = 3

    def __str__(self) -> str:
        return f"K{self.stages}-zero{self.zero_stage}-{self.tag or 'steps'}"


@dataclass(frozen=True)
class Kill:
    """Hold where a rank kills itself: at ``point``, the ``nth`` time that the step (or save) ``step`` reaches it."""

    rank: int
    point: str  # forward | file | half a file | manifest | rename | latest
    step: int
    nth: int = 1


def job_train(training: Training, folder: str, kill: Kill | None = None) -> None:
    """Go on from the last checkpoint in ``folder``, to the end."""
    rank = distributed.get_rank()
    log = os.open(Path(folder, f"rank{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    changes = {"zero_optimization": {"stage": training.zero_stage}} if training.zero_stage else {}
    layers, own = gpt_layers(dtype="float32"), section(slices=training.slices)
    with engine_of(layers, own, stages=training.stages, **changes) as engine:
        saved = Path(folder, "saved")
        engine.load_checkpoint(str(saved))
        first = engine.global_steps
        _note(log, f"resumed {first}")
        if kill is not None and kill.rank == rank:
            _lay(kill, engine)
        data = _data(engine, first)
        for step in range(first + 1, training.steps + 1):
            _note(log, f"step {step} {float(engine.train_batch(data)).hex()}")
            if step % training.save_every == 0:
                _note(log, f"saving {step}")
                engine.save_checkpoint(str(saved), tag=training.tag, client_state={"step": step})
                _note(log, f"saved {step}")
        parameters = [p.detach().reshape(-1) for p in engine.module.parameters()]
        _note(log, f"end {hashlib.sha256(torch.cat(parameters).numpy().tobytes()).hexdigest()[:16]}")
    os.close(log)


def _data(engine: Any, first_step: int) -> Iterator[Any]:
    """Yield micro-batches from the first unused one on, as a training script resumes its data."""
    replica = engine.grid.get_data_parallel_rank()
    return (micro_batch(seed=1000 * replica + index) for index in count(first_step * MICRO_BATCHES))


def _note(log: int, text: str) -> None:
    os.write(log, f"{text}\n".encode())


# -- where a kill may strike ---------------------------------------------------------------------------------


def _lay(kill: Kill, engine: Any) -> None:
    """Make this rank kill itself."""
    counter = count(1)

    def strike(step: int, path: str | None = None) -> None:
        """Die at the chosen place, with half of the file `path`."""
        if step == kill.step and next(counter) == kill.nth:
            if path is not None:
                os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    def before(owner: Any, name: str) -> None:
        wrap(owner, name, lambda: strike(engine.global_steps))

    def after_a_file(halve: bool) -> None:
        save = engine.checkpoint_engine.save

        def save_and_strike(state_dict: Any, path: str) -> None:
            save(state_dict=state_dict, path=path)
            strike(engine.global_steps, path if halve else None)

        engine.checkpoint_engine.save = save_and_strike

    points: dict[str, Callable[[], Any]] = {
        "forward": lambda: engine.module.register_forward_pre_hook(lambda *_: strike(engine.global_steps + 1)),
        "file": lambda: after_a_file(halve=False),
        "half a file": lambda: after_a_file(halve=True),
        "manifest": lambda: before(checkpoint_save.Manifest, "write"),
        "rename": lambda: before(Path, "rename"),
        "latest": lambda: before(checkpoint_save, "write_text"),
    }
    points[kill.point]()
