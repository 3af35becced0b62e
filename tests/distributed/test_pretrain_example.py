"""Test examples/pretrain_gpt_megatron.py over TP 2 x PP 2: it learns, and resumes from a checkpoint seamlessly."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.distributed.harness import rank_pool

pytest.importorskip("megatron.core", reason="needs the extra megatron")

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, SAVED = 6, 3
OPTIONS = f"""--deepspeed_config ds.json --tensor-parallel 2 --pipeline-parallel 2 --sequence-parallel
    --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 64 --make-vocab-size-divisible-by 8
    --eod-mask-loss --train-iters {STEPS} --eval-interval {SAVED} --eval-iters 1 --plot loss.png"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "gradient_clipping": 1.0,
    "steps_per_print": 10**9,
    "terapipe": {"enabled": True, "slices": [24, 22, 18]},
}


def pretrain(folder: str, *options: str) -> list[dict[str, Any]]:
    """Run in the ranks all that the script does between start and end of torch.distributed."""
    with contextlib.chdir(folder), mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        import pretrain_gpt_megatron as script

        return script.run(script.parse_arguments([*OPTIONS.split(), *options])).entries


def pretrain_and_go_on(folder: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    whole = pretrain(folder, "--save=saved", f"--save-interval={SAVED}", "--metrics=whole.jsonl")
    # a rank reads the name after it has built an engine, for which all ranks meet: after the last of these writes
    Path(folder, "saved", "latest").write_text(f"global_step{SAVED}")
    return whole, pretrain(folder, "--load=saved", "--metrics=loaded.jsonl")


def test_learns_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    (whole, loaded), *others = rank_pool(4).run(pretrain_and_go_on, folder=str(tmp_path))
    losses = [entry["loss"] for entry in whole if "loss" in entry]
    assert len(losses) == STEPS
    assert 5.4 < losses[0] < 5.8  # ln(272) = 5.61: an untrained model
    assert losses[-1] < losses[0] - 1
    assert [entry["step"] for entry in whole if "validation_loss" in entry] == [SAVED, STEPS]

    def numbers(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in entry.items() if key != "seconds"} for entry in entries]

    assert numbers(loaded) == numbers(whole)
    assert all(numbers(entries) == numbers(whole) for rank in others for entries in rank)
    on_file = [json.loads(line) for line in (tmp_path / "loaded.jsonl").read_text().splitlines()]
    assert on_file == loaded
    assert loaded[-1] is not whole[-1] and loaded[-2]["seconds"] != whole[-2]["seconds"]  # it ran again
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out").is_dir()  # with data of its own making
