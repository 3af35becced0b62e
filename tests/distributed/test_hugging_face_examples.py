"""Test examples/finetune_hf.py and pretrain_hf.py on two stages: they learn, resume, and export their own weights."""

import contextlib
import importlib
import io
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers", reason="needs the extra hf: pip install terapipe_ds[hf]")

from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.distributed.harness import rank_pool

EXAMPLES = Path(__file__).parents[2] / "examples"
LENGTH = 192
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "steps_per_print": 10**9,
    "terapipe": {"enabled": True, "slices": 3},
}


def run_example(name: str, folder: str, *options: str) -> list[dict[str, Any]]:
    """Run in the ranks all that a script does between start and end of torch.distributed."""
    sys.path.insert(0, str(EXAMPLES))
    before = os.getcwd()
    os.chdir(folder)
    try:
        script = importlib.import_module(name)
        return script.run(script.parse_arguments(["--deepspeed_config=ds.json", *options])).entries
    finally:
        os.chdir(before)
        sys.path.remove(str(EXAMPLES))


def finetune(folder: str, *options: str) -> tuple[list[dict[str, Any]], str]:
    """Return the entries, and the printed text."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        entries = run_example("finetune_hf", folder, "--out=trained", f"--sequence-length={LENGTH}", *options)
    return entries, printed.getvalue()


def adapters_and_all_weights(folder: str) -> list[tuple[list[dict[str, Any]], str]]:
    return [
        finetune(folder, "--lora=8", "--pack", "--steps=8", "--out=adapters", "--new-tokens=4"),
        finetune(folder, "--steps=1", "--pack", "--model=adapters", "--out=further", "--new-tokens=0"),
        finetune(folder, "--steps=4", "--model=adapters/start", "--prompt=What is a slice?", "--new-tokens=4"),
    ]


def loss_of_export(folder: Path, monkeypatch: pytest.MonkeyPatch, is_packed: bool) -> float:
    """Return the mean loss of the exported model on each held-out document alone, by transformers' own code."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    hf_data = importlib.import_module("hf_data")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    entries = hf_data.read_entries([EXAMPLES / "data/chats.jsonl"])
    documents, _ = hf_data.documents_of(entries, tokenizer, LENGTH)
    _, held_out = hf_data.split(documents, 0.1, 1234)
    rows = hf_data.packed(held_out, LENGTH) if is_packed else [[document] for document in held_out]
    losses = []
    for row in rows:
        total, count = 0.0, 0
        for document in row:
            with torch.no_grad():
                logits = model(torch.tensor([document.tokens])).logits[0, :-1]
            labels = torch.tensor(document.labels[1:])
            total += float(F.cross_entropy(logits, labels, reduction="sum"))
            count += int((labels != -100).sum())
        losses.append(total / count)
    size = CONFIG["gradient_accumulation_steps"]
    cycled = list(itertools.islice(itertools.cycle(losses), -(-len(losses) // size) * size))
    return sum(cycled) / len(cycled)


def test_finetuned_models_are_exported_and_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters on packed rows, and all weights on padded ones; loss falls, and the exported models have the same."""
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    first, second = rank_pool(2).run(adapters_and_all_weights, folder=str(tmp_path), timeout_s=240)
    (adapters, _), (further, _), _ = first
    assert further[0]["validation_loss"] == pytest.approx(adapters[-1]["validation_loss"], rel=1e-5)  # it goes on
    assert (tmp_path / "further/adapter_model.safetensors").exists()
    for (entries, printed), name in zip(first[::2], ("adapters", "trained"), strict=True):
        before, after = (entry["validation_loss"] for entry in entries if "validation_loss" in entry)
        losses = [entry["loss"] for entry in entries if "loss" in entry]
        assert 6.5 < before < 7.3 and after < before - 0.2, name  # ln(1024) = 6.93: an untrained model
        assert losses[-1] < losses[0] - 0.2, name
        assert loss_of_export(tmp_path / name, monkeypatch, name == "adapters") == pytest.approx(after, rel=1e-5)
        assert f"exported: {name}" in printed and "generated: " in printed
    assert "prompt: 'user:\\nWhat is a slice?\\n\\nassistant:\\n'" in first[2][1]
    assert (tmp_path / "adapters/adapter_model.safetensors").exists()
    assert not (tmp_path / "adapters/model.safetensors").exists()
    assert all(printed == "" for _, printed in second)  # the first rank speaks


def pretrain_and_go_on(folder: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    text = str(EXAMPLES.parent / "docs/schedules.md")
    options = ["--out=run", f"--data={text}", "--sequence-length=64", "--eval-batches=1", "--eval-every=3"]
    whole = run_example("pretrain_hf", folder, *options, "--steps=6", "--save-every=3")
    torch.distributed.barrier()  # the name is read after all have met once more
    Path(folder, "run/checkpoints/latest").write_text("global_step3")
    return whole, run_example("pretrain_hf", folder, *options, "--steps=6", "--resume", "--metrics=resumed.jsonl")


def test_pretraining_learns_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    (whole, resumed), *others = rank_pool(2).run(pretrain_and_go_on, folder=str(tmp_path))
    losses = [entry["loss"] for entry in whole if "loss" in entry]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.5
    assert [entry["step"] for entry in whole if "validation_loss" in entry] == [3, 6]

    def numbers(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in entry.items() if key != "seconds"} for entry in entries]

    assert numbers(resumed) == numbers(whole)
    assert all(numbers(entries) == numbers(whole) for rank in others for entries in rank)
    assert resumed[-2]["seconds"] != whole[-2]["seconds"]  # it ran again
    assert [json.loads(line) for line in (tmp_path / "resumed.jsonl").read_text().splitlines()] == resumed
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path / "run/model"))
