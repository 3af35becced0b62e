"""Test that after a kill (-9) of four ranks two go on in another layout, by examples/resume_elsewhere.py, equally."""

import contextlib
import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.distributed.harness import RankFailure, rank_pool
from tests.processes import ROOT

EXAMPLES = ROOT / "examples"
SAVE_EVERY, KILLED_AT, LAST = 2, 3, 4
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 0.0,
    "steps_per_print": 10**9,
    "terapipe": {"enabled": True, "slices": 4},
}
MODEL = f"""--model tiny --sequence-length 64 --max-bytes 65536 --partition-method uniform --no-pin --plot=
    --eval-every 1000 --save-every {SAVE_EVERY} --save-dir saved --metrics metrics.jsonl --steps {LAST}"""
# fp32: sums over replicas, micro-batches and slices run in another order, and Adam's first steps enlarge the difference
TOLERANCE = 1e-5

pytestmark = pytest.mark.slow


def train(folder: str, options: tuple[str, ...], killed_at: int | None) -> dict[int, float]:
    """Run train_gpt.py in a rank, which may kill itself after a step; return the loss of each step."""
    import deepspeed

    with contextlib.chdir(folder), mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        import train_gpt

        record = train_gpt.MetricsFile.record

        def record_and_die(self: Any, **entry: Any) -> None:
            record(self, **entry)
            if entry["step"] == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)

        with (
            mock.patch.object(sys, "argv", ["train_gpt.py", *MODEL.split(), *options]),
            mock.patch.object(train_gpt.MetricsFile, "record", record_and_die),
            mock.patch.object(deepspeed.comm, "destroy_process_group"),  # the ranks are used again
        ):
            train_gpt.main()
    lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def look_again(folder: str) -> tuple[str, dict[str, int], dict[str, bool]]:
    """Return the checkpoint that the script would go on from, its degrees, and the error of a config without a move."""
    with contextlib.chdir(folder), mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        import resume_elsewhere as script

        saved = script.Saved.last(Path("saved"))
        strategy = script.Strategy.from_json(Path("elsewhere/strategy.json").read_bytes())
        config = script.new_config(saved, strategy, Path("strategy.json"), is_universal=strategy.grid != saved.grid)
        return saved.tag, saved.grid, config["checkpoint"]


def resume_elsewhere(folder: str, plan: tuple[str, ...]) -> str:
    """Run the script in rank 0; return what it prints."""
    command = ["resume_elsewhere.py", "--save-dir", "saved", "--out", "elsewhere", "--"]
    options = ["--model", "tiny", "--device", "cpu-core", *plan]  # as long sequences as the checkpoint had
    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
        mock.patch.object(sys, "argv", [*command, *options]),
        contextlib.redirect_stdout(io.StringIO()) as said,
    ):
        import resume_elsewhere as script

        if os.environ["RANK"] == "0":
            script.main()
    return said.getvalue()


@pytest.mark.parametrize(("changes", "options", "layout"), [
    ({"train_batch_size": 8}, (), "2 pipe x 2 data x 1 model"),
    (
        {"sequence_parallel_size": 2, "pipeline": {"stages": 1}},
        ("--pipeline-stages", "1", "--sequence-parallel", "2"),
        "1 pipe x 2 data x 1 model x 2 sequence",
    ),
], ids=["replicas", "sequence"])  # fmt: skip
def test_two_ranks_go_on_where_four_were_killed(
    changes: dict[str, Any], options: tuple[str, ...], layout: str, tmp_path: Path
) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for folder in (killed, whole):
        folder.mkdir()
        (folder / "ds.json").write_text(json.dumps(CONFIG | changes))
    options = ("--deepspeed_config", "ds.json", *(options or ("--pipeline-stages", "2")))
    (never_killed, *_) = run(4, whole, *options)
    with pytest.raises(RankFailure, match="exit code -9"):
        run(4, killed, *options, killed_at=KILLED_AT)
    saved = f"global_step{SAVE_EVERY}"
    assert (killed / "saved" / "latest").read_text() == saved

    plan = ("--devices", "2", "--stages", "2", "--tensor-parallel", "1")
    said, _ = rank_pool(2).run(resume_elsewhere, folder=str(killed), plan=plan)
    assert f"{saved} was saved by {layout}, and 2 pipe x 1 data x 1 model will go on" in said
    assert (killed / "saved" / "latest_universal").read_text() == f"{saved}_universal"
    assert json.loads((killed / "elsewhere" / "ds.json").read_text())["checkpoint"] == {"load_universal": True}

    resumed, _ = run(2, killed, "--deepspeed_config", "elsewhere/ds.json", "--resume")
    assert list(resumed) == list(never_killed) == list(range(1, LAST + 1)), "the curve goes on where it was"
    assert resumed == pytest.approx(never_killed, rel=TOLERANCE)

    assert (
        rank_pool(2).run(look_again, folder=str(killed))
        == [(f"global_step{LAST}", {"pipe": 2, "data": 1, "model": 1}, {"load_universal": False})] * 2
    ), "the universal checkpoint is older than the last one, which has the layout already"


def run(ranks: int, folder: Path, *options: str, killed_at: int | None = None) -> list[dict[int, float]]:
    return rank_pool(ranks).run(train, folder=str(folder), options=options, killed_at=killed_at)
