"""What a search for a strategy takes, in CPU seconds and memory: `python -m studies.strategy_times`.

Every question runs in a process of its own. Its peak memory is that of the process, and Linux begins to count it with
what the process that started it had.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from terapipe_ds.planner.strategy import Cluster, rank_strategies

MEMORY_LIMIT_GIB = 2.0


@dataclass(frozen=True)
class Question:
    """Hold a model on a cluster, and the CPU seconds that its answer may take; None: not limited."""

    model: str
    device: str
    nodes: int
    devices_per_node: int
    global_batch: int
    sequence_length: int
    limit_s: float | None = None

    @property
    def name(self) -> str:
        devices = self.nodes * self.devices_per_node
        return f"{self.model}, {devices:,} {self.device}, {self.global_batch} x {self.sequence_length} tokens"


QUESTIONS = {
    "small": Question("llama-3-70b", "h100", 8, 8, 256, 32768, 10.0),
    "large": Question("gpt3-175b", "h100", 128, 8, 1536, 2048, 60.0),
}


@dataclass(frozen=True)
class Answer:
    """Hold the search's cost. `peak_gib`: of the whole process; `started_gib` of it was in use before the search."""

    cpu_s: float
    peak_gib: float
    started_gib: float
    ranked: int
    best: str
    gap: float


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def search(question: Question) -> Answer:
    """Return the cost of the search in this process."""
    started_gib, start_s = _peak_gib(), time.process_time()
    cluster = Cluster(question.device, question.nodes, question.devices_per_node)
    batch, length = question.global_batch, question.sequence_length
    found = rank_strategies(question.model, cluster, global_batch_size=batch, sequence_length=length)
    cpu_s = time.process_time() - start_s
    return Answer(cpu_s, _peak_gib(), started_gib, len(found), str(found[0]), found[0].gap)


def answers(questions: Sequence[Question]) -> Iterator[tuple[Question, Answer]]:
    """Yield every question with its cost, one after the other in new processes."""
    context = multiprocessing.get_context("spawn")
    for question in questions:
        with context.Pool(1, maxtasksperchild=1) as pool:
            yield question, pool.apply(search, (question,))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the answers."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.strategy_times", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--question", choices=QUESTIONS, action="append", help="again for more (default: all)")
    parser.add_argument("--model", help="another question, of this model, with the options below")
    parser.add_argument("--device", default="h100")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--devices-per-node", type=int, default=8)
    parser.add_argument("--global-batch", type=int, default=256)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    own = (options.device, options.nodes, options.devices_per_node, options.global_batch, options.sequence_length)
    chosen = [QUESTIONS[name] for name in options.question or ([] if options.model else QUESTIONS)]
    chosen += [Question(options.model, *own)] if options.model else []
    taken = list(answers(chosen))
    if options.json:
        print(json.dumps([asdict(question) | asdict(answer) for question, answer in taken], indent=1))
        return
    for question, answer in taken:
        limit = "" if question.limit_s is None else f" (limit {question.limit_s:g} s)"
        print(question.name)
        print(f"  search       {answer.cpu_s:.2f} CPU seconds{limit}, {answer.ranked} strategies replayed")
        memory = f"{answer.peak_gib:.2f} GiB, {answer.started_gib:.2f} of them before"
        print(f"  peak memory  {memory} (limit {MEMORY_LIMIT_GIB:g} GiB)")
        print(f"  best         {answer.best}")


if __name__ == "__main__":
    main()
