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
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.distributed.harness import RankFailure, RankPool
from tests.distributed.killed_job import Training, job_train

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
