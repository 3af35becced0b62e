"""Is a wrong gradient seen? Deliberate faults, one at a time, and what catches each.

    make mutations
    python -m tests.mutation_check [FAULT ...]

Each fault of `tests/distributed/faults.py` breaks one thing in the ranks while a small configuration trains, and the
training is compared with the plain single-process one (as `test_random_training.py` does). It is caught where the
engine refuses to go on, or where the comparison finds an error above the contract. First every configuration is trained
without a fault, which must pass. Exit code 1 where a fault survives, or where nothing is broken and something is found.
"""

import argparse
import contextlib
import functools
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from tests.distributed import cases
from tests.distributed.cases import Case, RankRecord
from tests.distributed.faults import FAULTS, Fault
from tests.distributed.harness import RankFailure, rank_pool
from tests.distributed.training import train_alone, train_case

TIMEOUT_S = 60.0
SURVIVED = "SURVIVED"
COMPARISON = "same training"
OURS = (
    "SliceStoreError", "InFlightError", "ScheduleError", "BatchError", "LinkError", "PlanError", "PlainAttentionError",
    "TeraPipeConfigError", "VerifyError", "SliceLossError",
)  # fmt: skip
"""Errors that the engine raises because something is wrong; any other may come from the fault's own patch."""


@dataclass(frozen=True)
class Verdict:
    """What caught a fault: a net's name, or SURVIVED; and what it said."""

    net: str
    said: str


def main(names: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="all of them by default")
    wanted = parser.parse_args(names).faults or list(FAULTS)
    if unknown := [name for name in wanted if name not in FAULTS]:
        parser.error(f"unknown {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    begin_s = time.monotonic()
    print(f"{COMPARISON!r}: the comparison of test_random_training.py, with the errors that are above the contract.")
    print("An error: what the engine raised by itself, on the rank that failed first.\n")
    print(f"{'fault':<40} {'in':<10} caught by")
    wrong = [name for name in wanted if not _report(FAULTS[name])]
    for configuration in dict.fromkeys(FAULTS[name].configuration for name in wanted):
        if not is_right(configuration):
            wrong.append(f"nothing broken ({configuration})")
    print(f"{len(wanted)} faults in {time.monotonic() - begin_s:.0f} s: ", end="")
    print("all caught, and nothing else" if not wrong else f"NOT RIGHT: {', '.join(wrong)}")
    return 1 if wrong else 0


def _report(fault: Fault) -> bool:
    """Try a fault and print a line for each net that was tried; True where all of them caught it."""
    verdicts = [caught_by(fault)]
    if fault.in_layers:
        verdicts.append(caught_by_verify(fault))
    for verdict in verdicts:
        print(f"{fault.name:<40} {fault.where:<10} {verdict.net}: {verdict.said}", flush=True)
    return all(verdict.net != SURVIVED for verdict in verdicts)


def caught_by(fault: Fault) -> Verdict:
    """Train under the fault; the comparison with the reference, or the first error of a rank.

    Without the engine's own check of the first batch, which would come before either: `caught_by_verify` looks at it.
    """
    try:
        run = _run(fault.configuration, fault=fault.name, **{"verify": "off", **fault.section})
    except RankFailure as failure:
        return _judged(_refusal(failure), fault)
    violations = _violations(run, fault.configuration, fault.name if fault.in_layers else None)
    return Verdict(COMPARISON, "; ".join(_short(line) for line in violations)) if violations else Verdict(SURVIVED, "")


def _run(configuration: Case, **options: Any) -> list[RankRecord]:
    return rank_pool(configuration.world_size).run(train_case, case=configuration, timeout_s=TIMEOUT_S, **options)


def _judged(refusal: Verdict, fault: Fault) -> Verdict:
    """An error counts where it is one of ours, or the one that the fault names; a crash or a hang catches nothing."""
    expected = fault.stopped_by is not None and re.search(fault.stopped_by, refusal.said)
    if expected or refusal.net in OURS:
        return refusal
    return Verdict(SURVIVED, f"not a refusal of ours ({refusal.net}: {refusal.said})")


def caught_by_verify(fault: Fault) -> Verdict:
    """The slice-safety check must refuse the layer before the first step."""
    try:
        _run(fault.configuration, fault=fault.name, **{**fault.section, "verify": "first_batch"})
    except RankFailure as failure:
        verdict = _refusal(failure)
        if "VerifyError" not in str(failure):
            return Verdict(SURVIVED, f"verify passed it ({verdict.said})")
        named = re.search(r"^\s*(layer \d+ \(.*)$", failure.first.detail, re.MULTILINE)
        return Verdict("verify", named[1][:90] if named else verdict.said)
    return Verdict(SURVIVED, "verify passed it")


def is_right(configuration: Case) -> bool:
    """Nothing is broken, and nothing is found."""
    found = _violations(_run(configuration), configuration, None)
    if found:
        print(f"without a fault, {configuration}: {'; '.join(found)}")
    return not found


def _violations(run: list[RankRecord], configuration: Case, fault: str | None) -> list[str]:
    found = cases.errors(run, _reference(configuration, fault))
    return cases.violations(found, cases.contract(configuration))


@functools.cache
def _reference(configuration: Case, fault: str | None) -> list[RankRecord]:
    """Under a fault in a layer the reference has the same layer, on whole sequences."""
    with contextlib.nullcontext() if fault is None else FAULTS[fault].broken():
        return train_alone(configuration)


def _refusal(failure: RankFailure) -> Verdict:
    """The error of the rank that failed first: its class and its first words."""
    report = failure.first
    errors = re.findall(r"^\s*(?:[\w.]+\.)?(\w+(?:Error|Exception)): (.+)$", report.detail, re.MULTILINE)
    if errors:
        kind, text = errors[-1]
        return Verdict(kind, text[:90])
    ends = re.search(r"terapipe_ds: rank \d.*", report.output)
    return Verdict(f"rank {report.status}", (ends[0] if ends else report.detail.strip())[:90])


def _short(line: str) -> str:
    """ "loss: 1.2e-03 (rank 1, ...) > 1e-10" -> "loss 1e-03"."""
    kind, _, rest = line.partition(": ")
    return f"{kind} {float(rest.split()[0]):.0e}"


if __name__ == "__main__":
    sys.exit(main())
