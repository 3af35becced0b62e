"""An export over an older one loses neither: on disks that fail and through kills, as checkpoints do."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra hf: pip install terapipe_ds[hf]")

from tests.distributed.export_faults import after_the_kill, killed_in_the_moves, saves
from tests.distributed.harness import RankFailure, rank_pool

FAULTS = ("killed", "EIO", "ENOSPC", "EDQUOT", "EACCES")


@pytest.mark.sample(2)
@pytest.mark.parametrize("older", ["shards", "single"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_moment_loses_nothing_and_no_failed_save_is_reported_as_good(
    fault: str, older: str, tmp_path: Path
) -> None:
    """After an error the old model or the new one is there; after a kill once the next load or save has come by."""
    ((moments, without, wrong),) = rank_pool(1).run(saves, folder=str(tmp_path), fault=fault, older=older)
    assert wrong == [] and moments > 30
    assert (0 < without < moments / 2) == (fault == "killed"), "a kill between the moves leaves none for a while"


@pytest.mark.sample(2)
@pytest.mark.parametrize(("whose", "least"), [(0, 50), (1, 4)], ids=["rank 0", "rank 1"])
@pytest.mark.parametrize("fault", FAULTS[1:])
def test_a_fault_of_one_rank_loses_nothing(fault: str, whose: int, least: int, tmp_path: Path) -> None:
    """Of two that write shards, over shards."""
    given = {"folder": str(tmp_path), "fault": fault, "older": "shards", "whose": whose}
    for moments, without, wrong in rank_pool(2).run(saves, **given):
        assert wrong == [] and without == 0 and moments >= least


@pytest.mark.sample(1)
@pytest.mark.parametrize("nth", [7, *range(1, 7), *range(8, 14)])  # the index is written; six files go, and six come
def test_a_kill_between_the_moves_is_finished_by_the_next_load(nth: int, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="exit code -9"):
        rank_pool(2).run(killed_in_the_moves, folder=str(tmp_path), nth=nth)
    for is_none, is_right, left in rank_pool(2).run(after_the_kill, folder=str(tmp_path)):
        assert is_right and left == [] and is_none == (nth > 2)
