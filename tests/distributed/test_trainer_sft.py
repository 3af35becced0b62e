"""Test that SFTTrainer over stages gives what SFTTrainer gives in one process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.utils.distributed import get_free_port

pytest.importorskip("trl", reason="needs the extra trl: pip install terapipe_ds[trl]")

from tests.distributed.harness import rank_pool
from tests.distributed.sft_jobs import compare, losses_beside_4_bits, most_tokens_with_logits, tokens_of_an_epoch
from tests.distributed.test_trainer import IS_5, check_same, usual

EVALUATE = {"eval_strategy": "steps", "eval_steps": 3}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
SETTINGS: dict[str, dict[str, Any]] = {
    "chats": {"args": EVALUATE},
    "assistant only, recomputed": {"args": {"assistant_only_loss": True, "gradient_checkpointing": True, **EVALUATE}},
    "completion only": {"data": "pairs", "args": EVALUATE},
    "packed": {"args": {"packing": True, **EVALUATE}, "phases": ["evaluate", "train", "evaluate"]},
    "by name": {"is_by_name": True, "args": {"model_init_kwargs": {"dtype": "auto"}}, "phases": ["train", "save"]},
    "DFT": {"args": {"loss_type": "dft"}},
    "smoothed": {"args": {"label_smoothing_factor": 0.1}},
    "LoRA, saved and resumed": {
        "lora": LORA,
        "args": {"save_strategy": "steps", "save_steps": 4, "max_steps": 6},
        "phases": ["train", "save", "resume"],
    },
}


USUAL = ("assistant only, recomputed", "packed", "by name")


@pytest.mark.parametrize("name", usual(USUAL, SETTINGS))
def test_sft_trains_as_in_one_process(name: str, tmp_path: Path) -> None:
    check_same(rank_pool(2).run(compare, given=SETTINGS[name], folder=str(tmp_path))[0], 1e-4)


GROUPS: dict[str, dict[str, Any]] = {
    "tensor-parallel ranks": {
        "args": {"assistant_only_loss": True, "max_steps": 3, **EVALUATE}, "model": {"vocab_size": 31},
        "ds": {"tensor_parallel": {"autotp_size": 2}},
    },
    "sequence ranks": {
        "args": {"assistant_only_loss": True, "max_steps": 3, "pad_to_multiple_of": 6, **EVALUATE},
        "ds": {"sequence_parallel_size": 2}, "section": {"slices": 3, "granularity_tokens": 2},
    },
    "sequence ranks, labels on one of them": {
        "args": {"max_steps": 2, "pad_to_multiple_of": 16, "per_device_train_batch_size": 1,
                 "per_device_eval_batch_size": 1, **EVALUATE}, "data": "pairs",
        "ds": {"sequence_parallel_size": 2}, "section": {"slices": 1, "granularity_tokens": 2},
    },
    "sequence ranks, packed, LoRA": {
        "args": {"packing": True, "max_steps": 3, "pad_to_multiple_of": 6, **EVALUATE}, "lora": LORA,
        "ds": {"sequence_parallel_size": 2}, "section": {"slices": 3, "granularity_tokens": 2},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", usual(("tensor-parallel ranks", "sequence ranks, labels on one of them"), GROUPS))
def test_sft_trains_over_stages_of_two_ranks(name: str, tmp_path: Path) -> None:
    check_same(rank_pool(4).run(compare, given=GROUPS[name], folder=str(tmp_path))[0], 1e-4)


def test_texts_that_fill_up_a_last_batch_count_once(tmp_path: Path) -> None:
    """The second replica gets the first text again, as in SFTTrainer, which leaves it out of what it logs."""
    for counted, in_data in rank_pool(2).run(tokens_of_an_epoch, folder=str(tmp_path)):
        assert counted == in_data


@pytest.mark.skipif(not IS_5, reason="4-bit layers need transformers 5")
def test_sft_trains_beside_4_bit_weights(tmp_path: Path) -> None:
    """TRL rounds adapters beside quantized weights to bf16, and stages do not: the losses differ by that."""
    found = rank_pool(2).run(losses_beside_4_bits, folder=str(tmp_path))
    whole, staged, _ = found[0]
    assert len(whole) == 3 and staged == pytest.approx(whole, rel=2e-3)
    assert found[1][1] == staged and all(count > 0 for *_, count in found)


NO_LOGITS: dict[str, dict[str, Any]] = {
    "assistant only": {"assistant_only_loss": True},
    "packed": {"packing": True, "per_device_train_batch_size": 4},
    **({"smoothed": {"label_smoothing_factor": 0.1}} if IS_5 else {}),
    "DFT": {"loss_type": "dft"},
}


def test_no_tensor_has_the_logits_of_a_slice(tmp_path: Path) -> None:
    """A slice has at least 25 tokens, a chunk of the loss 8, and the output matrix 16 columns."""
    for name, args in NO_LOGITS.items():
        job = {"given": args, "folder": str(tmp_path), "vocabulary": 97, "chunk": 8}
        assert rank_pool(2).run(most_tokens_with_logits, **job)[1] == (16, 16), name


def test_the_example_is_short() -> None:
    assert len((Path(__file__).parents[2] / "examples/sft_trl.py").read_text().splitlines()) <= 60


@pytest.mark.full
def test_the_example_trains_goes_on_and_answers(tmp_path: Path) -> None:
    """In processes of their own, by DeepSpeed's launcher."""
    root = Path(__file__).parents[2]
    script = root / "examples/sft_trl.py"
    launcher, port = str(Path(sys.executable).with_name("deepspeed")), str(get_free_port())
    launch = [launcher, "--num_gpus", "2", "--master_port", port, str(script), "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(root), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 500, "env": environment, "check": True}
    printed = subprocess.run([*launch, "--steps", "50"], **options).stdout
    assert "What follows three? " in printed and (tmp_path / "checkpoint-50").is_dir()
    again = subprocess.run([*launch, "--steps", "52"], **options)
    assert "52/52" in again.stdout + again.stderr and " 49/52" not in again.stdout + again.stderr
    assert (tmp_path / "checkpoint-52").is_dir()
