"""Kill ranks at random moments, and see that every resume is right.

    python -m tests.distributed.kills --kills 50 --seed 0

Two ranks train and save; one of them is killed (-9) at a random time: while it trains, while it saves or while it
resumes. The job starts again in the same folder, and so on. After each kill

- both ranks go on from the same step, which is that of the last checkpoint whose save had returned, or of one that was
  under way then;
- every loss is bit by bit that of a training that was never killed, and the parameters at the end are.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from terapipe_ds.runtime.checkpoints import save as checkpoint_save
from tests.distributed.engines import engine_of, gpt_layers, micro_batch, section
from tests.distributed.failures.faults import wrap
from tests.distributed.harness import RankFailure, RankPool

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


TRAININGS = [
    Training(stages=stages, zero_stage=zero_stage, tag=tag, steps=60, save_every=1)
    for stages, zero_stage in ((2, 0), (2, 1), (1, 1))
    for tag in (None, "last")
]
AFTER_FIRST_STEP_S = 0.7  # a kill comes up to this long after the first step
AFTER_START_S = 0.4  # or up to this long after the start, while ranks build their engines and load


@dataclass
class History:
    """Hold the lines of one rank, by attempt; an attempt begins with a line ``attempt``, or else ``resumed``."""

    attempts: list[list[list[str]]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> History:
        history = cls()
        for line in path.read_text().splitlines() if path.exists() else ():
            words = line.split()
            if words[0] == "attempt" or (words[0] == "resumed" and (not history.attempts or history.attempts[-1])):
                history.attempts.append([])
            if words[0] != "attempt":
                history.attempts[-1].append(words)
        return history

    def losses(self) -> Iterator[tuple[int, str]]:
        for attempt in self.attempts:
            yield from ((int(words[1]), words[2]) for words in attempt if words[0] == "step")

    @property
    def end(self) -> str | None:
        last = self.attempts[-1][-1:] if self.attempts else []
        return last[0][1] if last and last[0][0] == "end" else None


def histories_in(folder: Path) -> list[History]:
    return [History.read(folder / f"rank{rank}.log") for rank in range(2)]


def problems(histories: list[History], reference: list[History]) -> list[str]:
    """Return the problems of a chain of attempts."""
    found = []
    expected = [dict(one.losses()) for one in reference]
    for rank, history in enumerate(histories):
        for step, loss in history.losses():
            if loss != expected[rank][step]:
                found.append(f"rank {rank}, step {step}: loss {loss} and {expected[rank][step]} without a kill")
        if history.end is not None and history.end != reference[rank].end:
            found.append(f"rank {rank}: other parameters at the end")
    return [*found, *_wrong_starts(histories)]


def _wrong_starts(histories: list[History]) -> Iterator[str]:
    saved = begun = 0
    for ranks in zip(*(history.attempts for history in histories), strict=True):
        firsts = {int(attempt[0][1]) for attempt in ranks if attempt}
        if len(firsts) > 1:
            yield f"the ranks go on from different steps, {sorted(firsts)}"
        for first in firsts:
            if not saved <= first <= begun:
                yield f"goes on from step {first}; {saved} was saved, and nothing after {begun} was begun"
        for attempt in filter(None, ranks):
            steps = [int(words[1]) for words in attempt if words[0] == "step"]
            first = int(attempt[0][1])
            if steps != list(range(first + 1, first + 1 + len(steps))):
                yield f"went on from step {first} with steps {steps}"
            saved = max([saved, *(int(words[1]) for words in attempt if words[0] == "saved")])
            begun = max([begun, *(int(words[1]) for words in attempt if words[0] == "saving")])


class Killer:
    """Kill one rank of a pool at a random moment of a job."""

    def __init__(self, rng: random.Random, pool: RankPool, folder: Path, while_starting: bool) -> None:
        self._rank, self._share = rng.randrange(pool.world_size), rng.random()
        self._pid, self._while_starting = pool.pids[self._rank], while_starting
        self._log = folder / f"rank{self._rank}.log"
        self._steps_before = self._steps()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._wait_and_kill, daemon=True)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def struck(self) -> str:
        """Return the work that the kill interrupted."""
        last = self._log.read_text().splitlines()[-1].split()[0] if self._log.exists() else "nothing"
        if self._while_starting and self._steps() == self._steps_before:
            return "resuming"
        return "saving" if last == "saving" else "training"

    def _steps(self) -> int:
        return self._log.read_text().count("step ") if self._log.exists() else 0

    def _wait_and_kill(self) -> None:
        assert self._pid is not None
        while not self._while_starting and self._steps() == self._steps_before:
            if self._over.wait(0.005):
                return
        if not self._over.wait(self._share * (AFTER_START_S if self._while_starting else AFTER_FIRST_STEP_S)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)


def chain(training: Training, rng: random.Random, wanted: int) -> tuple[Counter[str], list[str]]:
    """Kill one training up to `wanted` times, each time followed by a resume; less often if it comes to its end.

    Returns how often each kind of work was struck, and the problems.
    """
    phases, wrong, pool = Counter[str](), [], RankPool(2)
    with tempfile.TemporaryDirectory(prefix="terapipe-kills-") as name:
        reference, folder = Path(name, "reference"), Path(name, "killed")
        for each in (reference, folder):
            each.mkdir()
        never_saves = replace(training, save_every=training.steps + 1)
        pool.run(job_train, training=never_saves, folder=str(reference))
        expected = histories_in(reference)
        was_starting = True
        while phases.total() < wanted and not wrong:
            was_starting = not was_starting and rng.random() < 0.25  # never twice: each resume shows steps
            pool.start()
            for rank in range(pool.world_size):
                with (folder / f"rank{rank}.log").open("a") as log:
                    log.write("attempt\n")
            with Killer(rng, pool, folder, was_starting) as killer:
                try:
                    pool.run(job_train, training=training, folder=str(folder))
                except RankFailure as failure:
                    wrong += [] if "exit code -9" in str(failure) else [str(failure)]
                else:
                    break
            phases[killer.struck] += 1
            wrong += problems(histories_in(folder), expected)
        if phases.total() == wanted and not wrong:
            pool.run(job_train, training=training, folder=str(folder))  # its first line is its beginning
        wrong += problems(histories_in(folder), expected)
    pool.close()
    return phases, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-training", type=int, default=6, help="kills of one training, then comes the next kind")
    arguments = parser.parse_args()
    rng, begin_s, total, wrong = random.Random(arguments.seed), time.monotonic(), Counter[str](), []
    for index in range(10 * arguments.kills):
        wanted = min(arguments.per_training, arguments.kills - total.total())
        if wanted == 0 or wrong:
            break
        training = TRAININGS[(index + arguments.seed) % len(TRAININGS)]
        phases, wrong = chain(training, rng, wanted)
        total += phases
        print(f"{training}: {phases.total()} kills {dict(phases)}{', WRONG' if wrong else ''}", flush=True)
    print(f"{total.total()} kills {dict(total)}; {time.monotonic() - begin_s:.0f} s")
    for text in wrong:
        print(f"WRONG: {text}")
    raise SystemExit(1 if wrong or total.total() != arguments.kills else 0)


if __name__ == "__main__":
    main()
