"""Whatever strikes one rank wherever it is, all ranks end or raise in time, and say what has struck which of them."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from terapipe_ds.runtime.failures.watchdog import LONG_CALL
from tests.distributed import harness
from tests.distributed.failures.job import FAULT_MARK, Fault, Job
from tests.distributed.failures.one_rank import FAULTS, PLACES, run_struck
from tests.distributed.harness import RankFailure, rank_pool

STALL_TIMEOUT_S, DATA_TIMEOUT_S = 2.0, 3.0
Outcomes = list[tuple[float, bool]]
REPORT_S = 5.0  # from the limit to the end of the last rank: what is promised

STRUCK = {
    "load": ("SIGINT", "raise", "hang", "kill"),
    "plan": ("raise", "kill", "hang"),
    "save": ("hang", "SIGINT", "stop", "out of memory"),
    "verify": ("hang", "SIGINT", "stop"),
    "first batch": ("hang", "kill", "stop"),
    "F": ("raise", "kill", "out of memory"),
    "B": ("raise", "stop", "SIGINT", "out of memory"),
    "W": ("hang", "kill", "out of memory"),
    "reduce": ("raise", "kill", "stop"),
    "step": ("hang", "SIGINT", "out of memory"),
    "eval": ("kill", "raise", "stop"),
    "data": ("hang", "kill", "SIGINT", "out of memory"),
}
PAIRS = [(place, fault) for place, faults in STRUCK.items() for fault in faults]

CAUSES = {  # what each survivor says, for the rank r
    "raise": "BrokenError.*: the {place} is broken",
    "hang": r"Stage {r} \(rank {r}\) holds up the job(?s:.*)Rank {r} is here:(?s:.*)in wait_for_ever",
    "kill": r"Rank {r} \(stage {r}\): does not answer|Stage {r} \(rank {r}\) holds up the job: does not answer",
    "SIGINT": "KeyboardInterrupt",
    "out of memory": r"(OutOfMemory|Memory)Error",
}
CAUSES["stop"] = CAUSES["kill"]
STORE_IS_GONE = r"|Rank 0, or the launcher|lost the connection to another rank .* stage 0"  # rank 0 serves it


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[Outcomes]:
    """Per case: the seconds from the limit to the last end, and whether all have named the cause; printed at last."""
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
    assert len(PAIRS) == 40 and STRUCK.keys() == PLACES.keys() and min(map(len, STRUCK.values())) >= 3
    assert all(sum(fault == each for _, each in PAIRS) >= 5 for fault in FAULTS)


@pytest.mark.sample(6)
@pytest.mark.parametrize("stages", [2, 3, 4], ids="K{}".format)
@pytest.mark.parametrize(("place", "fault"), PAIRS, ids=lambda name: name.replace(" ", "_"))
def test_all_ranks_end_and_name_the_cause(
    place: str, fault: str, stages: int, outcomes: Outcomes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = (0, stages // 2, stages - 1)[(PAIRS.index((place, fault)) + stages) % 3]
    rank = 0 if place == "data" and rank < stages - 1 else rank  # only the ends draw
    long_s = {"data": DATA_TIMEOUT_S, "load": LONG_CALL * STALL_TIMEOUT_S, "save": LONG_CALL * STALL_TIMEOUT_S}
    limit_s = long_s.get(place, STALL_TIMEOUT_S) if fault == "hang" else STALL_TIMEOUT_S
    monkeypatch.setattr(harness, "LOG_TAIL_CHARS", 1_000_000)
    monkeypatch.setattr(harness, "GRACE_S", limit_s + 2 * REPORT_S)
    section, folder = {"data_timeout_s": DATA_TIMEOUT_S}, str(tmp_path)
    job = Job(stages, fault=Fault(fault, rank), stall_timeout_s=STALL_TIMEOUT_S, folder=folder, section=section)
    with pytest.raises(RankFailure) as failure:
        rank_pool(stages).run(run_struck, job=job, place=place, timeout_s=60.0)
    reports = failure.value.reports
    begin_s = re.search(rf"{FAULT_MARK} ([\d.]+)", reports[rank].output)
    assert begin_s, f"the fault did not strike: {failure.value}"
    ended_s = [one.ended_s for one in reports if one.rank != rank or fault != "stop"]
    after_s = max(ended_s) - float(begin_s[1]) - limit_s
    cause = CAUSES[fault].format(place=place, r=rank)
    cause += STORE_IS_GONE if rank == 0 and fault in ("kill", "stop") else ""
    silent = [one.rank for one in reports if one.rank != rank and not re.search(cause, one.output + one.detail)]
    outcomes.append((after_s, not silent))
    assert after_s < REPORT_S, f"{after_s:.1f} s after the limit: {failure.value}"
    assert not silent, f"ranks {silent} do not say {cause!r}: {failure.value}"
