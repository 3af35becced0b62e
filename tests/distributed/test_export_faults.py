"""An export over an older one loses neither: on disks that fail and through kills, as checkpoints do."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra hf: pip install terapipe_ds[hf]")

from tests.distributed.export_faults import saves
from tests.distributed.harness import rank_pool

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
