"""Test that a resume after a kill (-9) at a chosen point of training or saving goes on as if nothing had happened."""

import random
from pathlib import Path

import pytest

from terapipe_ds.runtime.checkpoints.save import CheckpointPaths
from tests.distributed.harness import RankFailure, rank_pool
from tests.distributed.kills import TRAININGS, History, Kill, Training, chain, histories_in, job_train, problems

SHORT = Training(stages=1, zero_stage=1, tag="last", steps=6)
# Each: the checkpoint that must be there after the kill.
KILLS = {
    "one rank has its files, the other not": (Kill(rank=1, point="file", step=4, nth=1), 2),
    "all files are there, the old one is moved away": (Kill(rank=0, point="rename", step=4, nth=2), 4),
    "in the middle of a step": (Kill(rank=1, point="forward", step=4, nth=3), 2),
    "half a file": (Kill(rank=0, point="half a file", step=4, nth=2), 2),
    "no list of files": (Kill(rank=0, point="manifest", step=4), 2),
    "nothing is named yet": (Kill(rank=0, point="rename", step=4, nth=1), 2),
    "named, but not as the latest": (Kill(rank=0, point="latest", step=4), 4),
    "the first one": (Kill(rank=1, point="file", step=2), 0),
    "the first one, before it is the latest": (Kill(rank=0, point="latest", step=2), 2),
}


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory: pytest.TempPathFactory) -> list[History]:
    folder = tmp_path_factory.mktemp("never_killed")
    rank_pool(2).run(job_train, training=SHORT, folder=str(folder))
    return histories_in(folder)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (index >= 2)) for index, name in enumerate(KILLS)]
)
def test_training_goes_on_after_a_kill(name: str, tmp_path: Path, never_killed: list[History]) -> None:
    (kill, from_step), folder = KILLS[name], tmp_path
    with pytest.raises(RankFailure, match="exit code -9"):
        rank_pool(2).run(job_train, training=SHORT, folder=str(folder), kill=kill)
    rank_pool(2).run(job_train, training=SHORT, folder=str(folder))
    after = histories_in(folder)
    assert problems(after, never_killed) == []
    for history, expected in zip(after, never_killed, strict=True):
        assert history.attempts[-1][0] == ["resumed", str(from_step)]
        assert history.end == expected.end is not None
    place = CheckpointPaths(folder / "saved", "last")
    assert place.final.is_dir()
    assert place.all_saving() == []
    assert not place.replaced.exists()


@pytest.mark.full
@pytest.mark.parametrize("training", TRAININGS, ids=str)
def test_kills_at_random_points(training: Training) -> None:
    phases, wrong = chain(training, random.Random(str(training)), wanted=9)
    assert wrong == [] and phases.total() > 0


# -- the judge ---------------------------------------------------------------------------------------------------


def written(tmp_path: Path, *ranks: str) -> list[History]:
    for rank, text in enumerate(ranks):
        (tmp_path / f"rank{rank}.log").write_text(text.replace("|", "\n"))
    return histories_in(tmp_path)


GOOD = "resumed 0|step 1 a|saving 1|saved 1|step 2 b|saving 2|resumed 1|step 2 b|end h"


def test_the_judge_sees_wrong_resumes(tmp_path: Path) -> None:
    reference = written(tmp_path, *["resumed 0|step 1 a|step 2 b|step 3 b|end h"] * 2)
    assert problems(written(tmp_path, GOOD, GOOD), reference) == []
    begun = GOOD.replace("resumed 1|step 2 b|end h", "resumed 2|end h")
    assert problems(written(tmp_path, begun, begun), reference) == []
    for bad, text in (
        (GOOD.replace("resumed 1|step 2 b", "resumed 0|step 1 a"), "1 was saved"),
        (GOOD.replace("resumed 1", "resumed 3"), "nothing after 2 was begun"),
        (GOOD.replace("step 2 b|end", "step 2 c|end"), "step 2: loss c and b"),
        (GOOD.replace("end h", "end i"), "other parameters"),
        (begun, "different steps, [1, 2]"),
        (GOOD.replace("resumed 1|step 2", "resumed 1|step 3"), "with steps [3]"),
    ):
        assert text in " ".join(problems(written(tmp_path, GOOD, bad), reference))
