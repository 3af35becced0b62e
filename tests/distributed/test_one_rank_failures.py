"""Test that after any fault of one rank at any place all ranks end or raise in time, and name fault and rank."""

import re
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from terapipe_ds.runtime.failures.watchdog import LONG_CALL
from tests.distributed.failures.faults import Fault
from tests.distributed.failures.job import Job, run
from tests.distributed.harness import rank_pool
from tests.distributed.test_failures import end_pool

STALL_TIMEOUT_S, DATA_TIMEOUT_S = 2.0, 3.0
Outcomes = list[tuple[float, bool]]
REPORT_S = 5.0  # from the limit to the end of the last rank: the promised time

STRUCK = {
    "load": ("SIGINT", "raise", "hang", "kill"),
    "plan": ("raise", "kill", "hang"),
    "save": ("hang", "SIGINT", "stop", "out of memory"),
    "verify": ("hang", "SIGINT", "stop"),
    "before F": ("hang", "kill", "stop"),
    "F": ("raise", "kill", "out of memory"),
    "B": ("raise", "stop", "SIGINT", "out of memory"),
    "W": ("hang", "kill", "out of memory"),
    "reduce": ("raise", "kill", "stop"),
    "step": ("hang", "SIGINT", "out of memory"),
    "eval": ("kill", "raise", "stop"),
    "data": ("hang", "kill", "SIGINT", "out of memory"),
}
PAIRS = [(place, fault) for place, faults in STRUCK.items() for fault in faults]

CAUSES = {  # the report of each survivor, for the rank r
    "raise": "BrokenError.*: the {place} is broken",
    "hang": r"Stage {r} \(rank {r}\) holds up the job(?s:.*)Rank {r} is here:(?s:.*)in wait_for_ever",
    "kill": r"Rank {r} \(stage {r}\): does not answer|Stage {r} \(rank {r}\) holds up the job: does not answer",
    "SIGINT": "KeyboardInterrupt",
    "out of memory": r"(OutOfMemory|Memory)Error",
}
SECTIONS: dict[str, dict[str, Any]] = {
    "plan": {"slices": "auto", "granularity_tokens": 4},
    "verify": {"verify": "first_batch"},
    "W": {"schedule": "seq1f1b-zb"},
}
STEPS = {"load": 0, "plan": 1, "verify": 1, "before F": 1}  # the others are struck in the second one
CAUSES["stop"] = CAUSES["kill"]
STORE_IS_GONE = r"|Rank 0, or the launcher|lost the connection to another rank .* stage 0"  # rank 0 serves it


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[Outcomes]:
    """Collect per case the seconds from the limit to the last end, and whether all named the cause; print them last."""
    found: Outcomes = []
    yield found
    if not found:
        return
    after_s, are_named = zip(*found, strict=True)
    in_time, named = sum(seconds < REPORT_S for seconds in after_s), sum(are_named)
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(
            f"\n{len(found)} one-rank failures: {in_time} ended everywhere in time, {named} named on all ranks; "
            f"seconds after the limit: median {statistics.median(after_s):.1f}, at most {max(after_s):.1f}"
        )


def test_the_table_has_forty_pairs() -> None:
    assert len(set(PAIRS)) == 40 and len(STRUCK) == 12 and min(map(len, STRUCK.values())) >= 3
    assert all(sum(kind == each for _, each in PAIRS) >= 5 for kind in CAUSES)


@pytest.mark.sample(3)
@pytest.mark.parametrize("stages", [2, 3, 4], ids="K{}".format)
@pytest.mark.parametrize(("place", "kind"), PAIRS, ids=lambda name: name.replace(" ", "_"))
def test_all_ranks_end_and_name_the_cause(
    place: str, kind: str, stages: int, outcomes: Outcomes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = (0, stages // 2, stages - 1)[(PAIRS.index((place, kind)) + stages) % 3]
    rank = 0 if place == "data" and rank < stages - 1 else rank  # only the ends draw
    fault = Fault(kind, place, rank, step=STEPS.get(place, 2), unit=(0, 0) if place == "before F" else (1, 2))
    long_s = {"data": DATA_TIMEOUT_S, "load": LONG_CALL * STALL_TIMEOUT_S, "save": LONG_CALL * STALL_TIMEOUT_S}
    limit_s = long_s.get(place, STALL_TIMEOUT_S) if kind == "hang" else STALL_TIMEOUT_S
    job = Job(stages, stall_timeout_s=STALL_TIMEOUT_S, folder=str(tmp_path), saves=(2,) if place == "save" else ())
    if place == "load":
        rank_pool(stages).run(run, job=replace(job, steps=1, saves=(1,)))
    section = {"data_timeout_s": DATA_TIMEOUT_S, **SECTIONS.get(place, {})}
    job = replace(job, fault=fault, section=section, resume="global_step1" if place == "load" else "")
    ended = end_pool(stages, job, monkeypatch, grace_s=limit_s + 2 * REPORT_S)
    after_s = ended.seconds_after_fault - limit_s
    cause = CAUSES[kind].format(place=place, r=rank)
    cause += STORE_IS_GONE if rank == 0 and kind in ("kill", "stop") else ""
    others = [other for other in range(stages) if other != rank]
    silent = [other for other in others if not re.search(cause, ended.outputs[other])]
    outcomes.append((after_s, not silent))
    assert None not in [ended.exit_codes[other] for other in range(stages) if other != rank or kind != "stop"], ended
    assert after_s < REPORT_S, f"{after_s:.1f} s after the limit: {ended}"
    assert not silent, f"ranks {silent} do not say {cause!r}: {ended}"
