"""What a search for a strategy takes, in CPU seconds and memory: `python -m studies.strategy_times`.

Every question runs in a process of its own. Its peak memory is that of the process, and Linux begins to count it with
what the process that started it had. `--table` asks for 64, 256 and 1,024 devices, and for models that do not fit on
as many. Limits count processor time, so that other programs do not matter.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from terapipe_ds.bench.ranks import progress_bar
from terapipe_ds.planner.errors import MemoryLimitError
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
    offload_optimizer: bool | None = None  # None: searched

    @property
    def name(self) -> str:
        devices = self.nodes * self.devices_per_node
        name = f"{self.model}, {devices:,} {self.device}, {self.global_batch} x {self.sequence_length} tokens"
        return name if self.offload_optimizer is None else f"{name}, optimizer on the devices"


QUESTIONS = {
    "small": Question("llama-3-70b", "h100", 8, 8, 256, 32768, 10.0),
    "large": Question("gpt3-175b", "h100", 128, 8, 1536, 2048, 60.0),
}


TABLE = (
    Question("llama-3-70b", "h100", 8, 8, 256, 8192),
    Question("llama-3-405b", "h100", 32, 8, 256, 8192),
    Question("llama-3-405b", "h100", 128, 8, 1024, 8192),
    Question("llama-3-405b", "a100-40gb", 8, 8, 256, 8192),
    Question("llama-3-405b", "v100-16gb", 32, 8, 256, 8192, offload_optimizer=False),
    Question("deepseek-v3", "v100-16gb", 128, 8, 1024, 4096, offload_optimizer=False),
)


@dataclass(frozen=True)
class Answer:
    """Hold the search's cost. `peak_gib`: of the whole process; `started_gib` of it was in use before the search.

    Where nothing fits, `ranked` is 0, and `best` is the end of the error.
    """

    cpu_s: float
    peak_gib: float
    started_gib: float
    ranked: int
    best: str
    gap: float
    is_complete: bool = True


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def search(question: Question, time_limit_s: float = math.inf) -> Answer:
    """Return the cost of the search in this process."""
    started_gib, start_s = _peak_gib(), time.process_time()
    cluster = Cluster(question.device, question.nodes, question.devices_per_node)
    batch, length = question.global_batch, question.sequence_length
    found, problem = [], ""
    try:
        found = rank_strategies(
            question.model,
            cluster,
            global_batch_size=batch,
            sequence_length=length,
            offload_optimizer=question.offload_optimizer,
            stop=lambda: time.process_time() - start_s >= time_limit_s,
        )
    except MemoryLimitError as error:
        problem = str(error).rpartition("; ")[2]
    took = time.process_time() - start_s, _peak_gib(), started_gib
    if not found:
        return Answer(*took, 0, problem, 0.0)
    return Answer(*took, len(found), str(found[0]), found[0].gap, found[0].is_complete)


def answers(questions: Sequence[Question], time_limit_s: float = math.inf) -> Iterator[tuple[Question, Answer]]:
    """Yield every question with its cost, one after the other in new processes."""
    context = multiprocessing.get_context("spawn")
    with progress_bar(0, len(questions), "searches") as bar:
        for question in questions:
            with context.Pool(1, maxtasksperchild=1) as pool:
                answer = pool.apply(search, (question, time_limit_s))
            bar.update()
            yield question, answer


def _row(question: Question, answer: Answer) -> str:
    """Return a row of the table."""
    if not answer.ranked:
        return f"| {question.name} | {1e3 * answer.cpu_s:.0f} ms | none: {answer.best} | |"
    ended = "" if answer.is_complete else ", stopped"
    best = answer.best.partition(" (proven")[0]
    return f"| {question.name} | {answer.cpu_s:.1f} s{ended} | {best} | {answer.gap:.0%} |"


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
    parser.add_argument("--table", action="store_true", help="64, 256 and 1,024 devices, and models that do not fit")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="processor seconds of a search")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    own = (options.device, options.nodes, options.devices_per_node, options.global_batch, options.sequence_length)
    chosen = [QUESTIONS[name] for name in options.question or ([] if options.model else QUESTIONS)]
    chosen += [Question(options.model, *own)] if options.model else []
    taken = list(answers(TABLE if options.table else chosen, options.time_limit))
    if options.json:
        print(json.dumps([asdict(question) | asdict(answer) for question, answer in taken], indent=1))
        return
    if options.table:
        print("| question | processor time | best strategy | gap to the bound |\n|---|---|---|---|")
        print("\n".join(_row(*one) for one in taken))
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
