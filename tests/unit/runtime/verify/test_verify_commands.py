"""`terapipe verify`, and `terapipe_ds.run --verify` around an unmodified script."""

import contextlib
import functools
import io
import json
import re
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from terapipe_ds.attention.call import Call
from terapipe_ds.commands import verify
from terapipe_ds.commands.verify import _plan
from terapipe_ds.config import TeraPipeConfig
from terapipe_ds.plan import SlicePlan
from tests.distributed.engines import raised_by
from tests.distributed.harness import rank_pool
from tests.processes import run_python

SCRIPT = """
import os, sys
import deepspeed, torch
from deepspeed.pipe import LayerSpec, PipelineModule
from tests.small_models import faulty
from terapipe_ds.models import gpt

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
layers = gpt.gpt_layers(gpt.GPTConfig(vocab_size=19, hidden_size=16, num_layers=1, num_heads=2))
layers.insert(2, LayerSpec(faulty.RunningSum))
model = PipelineModule(layers, num_stages=1, loss_fn=gpt.gpt_loss)
config = {"train_micro_batch_size_per_gpu": 1, "terapipe": {"enabled": True, "slices": 2, "granularity_tokens": 1},
          "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
tokens = torch.randint(19, (1, 13))
engine.train_batch(iter([(tokens[:, :-1], tokens[:, 1:])]))
print("trained")
"""


def test_the_script_ends_at_its_first_batch_with_the_report(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    rendezvous = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        rendezvous["MASTER_PORT"] = str(free.getsockname()[1])
    done = run_python("-m", "terapipe_ds.run", "--local_rank=0", "--verify", str(script), **rendezvous)
    assert done.returncode == 1, done.stderr[-4000:]
    heading = "verify: 2 slices (6 + 6) of a sequence of 12 tokens do not give what the whole sequence gives:"
    assert heading in done.stdout
    assert "layer 2 (RunningSum): output of tokens 6.. differs by" in done.stdout
    assert "slices after the first differ" in done.stdout
    assert "trained" not in done.stdout and "Traceback" not in done.stderr


def verify_by_command(folder: Path, section: dict[str, Any], pipeline: dict[str, int]) -> tuple[set[str], str]:
    """Return the modes in which attention ran, and what the command printed."""
    model, ds_config, modes = folder / "model.json", folder / "ds.json", set[str]()
    model.write_text(json.dumps({"vocab_size": 31, "hidden_size": 16, "num_layers": 1, "num_heads": 2}))
    raw = {"train_micro_batch_size_per_gpu": 1, "pipeline": pipeline}
    ds_config.write_text(json.dumps({**raw, "terapipe": {"enabled": True, "slices": 3, **section}}))
    attend = Call._attend

    def noted(self: Call, *tensors: Any) -> Any:
        modes.add(self.active.mode)
        return attend(self, *tensors)

    with mock.patch.object(Call, "_attend", noted), contextlib.redirect_stdout(io.StringIO()) as printed:
        verify.run(verify.VerifyOptions(config=str(ds_config), model=str(model), sequence_length=24))
    return modes, printed.getvalue()


@pytest.mark.parametrize(("section", "pipeline", "again", "note"), [
    ({"slices": "auto", "granularity_tokens": 6}, {}, False, ""),
    ({"recompute": [3]}, {}, True, "; layers with parameters were recomputed"),
    ({}, {"activation_checkpoint_interval": 1}, True, "; layers with parameters were recomputed"),
    (
        {"recompute": "full", "keep_attention": True},
        {},
        False,
        "; layers with parameters were recomputed, and kept their attention",
    ),
])  # fmt: skip
def test_the_command_recomputes_as_training_does(
    section: dict[str, Any], pipeline: dict[str, int], again: bool, note: str, tmp_path: Path
) -> None:
    ((modes, printed),) = rank_pool(1).run(verify_by_command, folder=tmp_path, section=section, pipeline=pipeline)
    assert modes == ({"train", "recompute"} if again else {"train"})
    slices = "4 slices" if "slices" in section else r"3 slices \(8 \+ 8 \+ 8\)"
    told = rf"verify: 4 layers and the loss agree on {slices} of a sequence of 24 tokens with the whole, [\d.]+ s{note}"
    assert re.fullmatch(told, printed.rstrip())


def verify_with_notes(folder: Path) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as told:
        verify_by_command(folder, {"compile": True, "documents": 3}, {})
    return told.getvalue()


def test_the_command_names_settings_that_only_a_job_has(tmp_path: Path) -> None:
    (told,) = rank_pool(1).run(verify_with_notes, folder=tmp_path)
    assert "the layers run without terapipe.compile = True and terapipe.documents = 3 of --config" in told


@pytest.mark.parametrize(
    ("recompute", "interval"), [([0, 3], 2), ([0, 3], 1), ([1], 1), ("auto", 1), ([0, 1], 1), ("full", 1)]
)
def test_the_command_names_stages_that_an_interval_contradicts(recompute: Any, interval: int, tmp_path: Path) -> None:
    """As training does; stages from the first on may be all that there are, and then an interval of 1 is the same."""
    section = {"recompute": recompute} | ({"planner": {"memory_limit_gb": 1}} if recompute == "auto" else {})
    words = {"section": section, "pipeline": {"activation_checkpoint_interval": interval}}
    if recompute in ([0, 1], "full"):
        ((_, printed),) = rank_pool(1).run(verify_by_command, folder=tmp_path, **words)
        assert "layers with parameters were recomputed" in printed
        return
    shown = re.escape(repr(recompute))
    ((kind, text),) = rank_pool(1).run(raised_by, act=functools.partial(verify_by_command, folder=tmp_path, **words))
    assert kind == "TeraPipeConfigError"
    assert re.search(rf"terapipe\.recompute = {shown}: .* = {interval}, which says otherwise", text)


@pytest.mark.parametrize(("section", "length", "lengths"), [
    ({}, 100, (32, 32, 32, 4)),
    ({}, 3, (1, 1, 1)),
    ({}, 1, (1,)),
    ({"granularity_tokens": 64}, 100, (64, 36)),
    ({"slices": 2}, 32, (16, 16)),
])  # fmt: skip
def test_four_slices_by_default(section: dict[str, Any], length: int, lengths: tuple[int, ...]) -> None:
    assert _plan(TeraPipeConfig(**section), length, None) == SlicePlan(lengths)
