"""A small training job, and the faults that strike one of its ranks in the middle of a batch.

It is run by the ranks of `harness.RankPool` and, as a script, by DeepSpeed's own launcher.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import distributed
from torch.utils.data import DataLoader

import terapipe_ds
from terapipe_ds.attention import active_slice
from terapipe_ds.models import gpt

SEQUENCE_LENGTH = 16
PLAN = [4, 4, 4, 4]
MICRO_BATCHES = 2
VOCAB_SIZE = 17
STRUCK_SLICE = 2  # in which the loss function breaks
FAULT_MARK = "the fault strikes at"
ENVIRONMENT = "TERAPIPE_TEST_JOB"

Batch = tuple[Any, Any]


@dataclass(frozen=True)
class Fault:
    """What goes wrong, on which stage of which pipeline, in which step (from 1).

    `kind`: a key of `FAULTS` or of `hangs.PLACES`; or loss, hang_data, kill_data, kill_between (two
    batches), leaves (it stops training).
    """

    kind: str
    stage: int = 0
    pipeline: int = 0
    step: int = 2
    unit: tuple[int, int] = (1, 2)  # micro-batch and slice


@dataclass(frozen=True)
class Job:
    """Train `steps` steps, and save a checkpoint in `folder` after those of `saves`."""

    stages: int = 2
    steps: int = 3
    fault: Fault | None = None
    recompute: bool = False
    evaluate: bool = False  # in the step of the fault, instead of training
    stall_timeout_s: float = 60.0
    folder: str = ""
    saves: tuple[int, ...] = ()
    resume: str = ""  # the tag of a checkpoint in `folder` to start from
    workers: int = 0  # processes that a data loader forks; 0: data without a loader
    section: dict[str, Any] = field(default_factory=dict)  # on top of the usual `terapipe` section

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        fields = json.loads(text)
        fault = fields.pop("fault")
        return replace(cls(**fields), fault=None if fault is None else Fault(**fault))


def run(job: Job, places: Mapping[str, Callable[[Any, Fault], None]] = MappingProxyType({})) -> list[float]:
    """Return the losses of the steps. Called on every rank. `places`: what a kind of fault does to an engine."""
    engine = build_engine(job)
    try:
        return list(_train(engine, job, places))
    finally:
        arm(None)
        engine.destroy()


def _train(engine: PipelineEngine, job: Job, places: Mapping[str, Callable[[Any, Fault], None]]) -> Iterator[float]:
    pipeline_id = engine.grid.get_data_parallel_id()
    _exchange_pids()
    loader = _loader(job.workers) if job.workers else None
    if job.resume:
        path, _ = engine.load_checkpoint(job.folder, job.resume)
        assert path is not None, f"no checkpoint in {job.folder}"
    for step in range(engine.global_steps + 1, job.steps + 1):
        fault = job.fault
        struck = fault is not None and (fault.step, fault.stage, fault.pipeline) == (step, engine.stage_id, pipeline_id)
        arm(fault if struck else None)
        if _is_armed("leaves"):
            mark()
            return
        if _is_armed("kill_between"):
            die()
        if struck and fault.kind in places:
            places[fault.kind](engine, fault)
        evaluates = job.evaluate and fault is not None and fault.step == step
        run_batch = engine.eval_batch if evaluates else engine.train_batch
        yield float(run_batch(_drawn(loader or batches(step, pipeline_id))))
        if step in job.saves:
            engine.save_checkpoint(job.folder)


def _drawn(data: Iterator[Batch]) -> Iterator[Batch]:
    """The data of a step. This rank may hang or be killed before the second micro-batch."""
    yield next(data)
    if _is_armed("hang_data"):
        hang()
    if _is_armed("kill_data"):
        die()
    yield from data


def _loader(workers: int) -> Iterator[Batch]:
    """An iterator whose workers are forked from this rank, and hold whatever it holds."""
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]
        sequences = [sequence for step in range(1, 50) for sequence in batches(step)]
        return iter(DataLoader(sequences, batch_size=None, num_workers=workers, multiprocessing_context="fork"))


def batches(step: int, pipeline_id: int = 0, length: int = SEQUENCE_LENGTH) -> Iterator[Batch]:
    """The micro-batches of one step: token ids and labels, both [B, L]."""
    generator = torch.Generator().manual_seed(100 * step + pipeline_id)
    tokens = torch.randint(VOCAB_SIZE, (MICRO_BATCHES, 2, length + 1), generator=generator)
    return iter([(sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()) for sequence in tokens])


# -- the engine ----------------------------------------------------------------------------------------------


def build_engine(job: Job, changes: dict[str, Any] | None = None) -> PipelineEngine:
    """An engine whose stages have one decoder layer each. `changes`: to the DeepSpeed config; None removes a key."""
    model = build_model(job)
    values = {**deepspeed_config(job), **(changes or {})}
    return terapipe_ds.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={key: value for key, value in values.items() if value is not None},
    )[0]


def build_model(job: Job) -> PipelineModule:
    """Makes process groups: a collective over all ranks."""
    config = gpt.GPTConfig(vocab_size=VOCAB_SIZE, hidden_size=16, num_layers=job.stages, num_heads=2, ffn_size=16)
    return PipelineModule(
        layers=[
            LayerSpec(gpt.TokenEmbedding, config),
            *[LayerSpec(StruckLayer, config, index) for index in range(job.stages)],
            LayerSpec(gpt.FinalNorm, config),
            LayerSpec(gpt.LMHead, config),
        ],
        num_stages=job.stages,
        loss_fn=struck_loss,
        partition_method="type:StruckLayer",
    )


def deepspeed_config(job: Job) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "steps_per_print": 10**9,
        "terapipe": {"enabled": True, "slices": PLAN, "stall_timeout_s": job.stall_timeout_s, **job.section},
    }
    if job.recompute:
        config["pipeline"] = {"activation_checkpoint_interval": 1, "use_reentrant": False}
    return config


class StruckLayer(gpt.DecoderLayer):
    """A decoder layer in which the fault strikes that is armed on this rank."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(hidden)
        active = active_slice()
        if _armed is None or active is None:
            return hidden
        if active.mode == "probe" or (active.micro_batch_id, active.slice_id) != tuple(_armed.unit):
            return hidden
        strike = FAULTS.get(_armed.kind)
        return hidden if strike is None else strike(hidden, active.mode)


def struck_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    active = active_slice()
    if _is_armed("loss") and active is not None and active.slice_id == STRUCK_SLICE:
        _fail("the loss function is broken")
    return gpt.gpt_loss(logits, labels)


# -- the faults ----------------------------------------------------------------------------------------------

_armed: Fault | None = None
_pids: list[int] = []


class BrokenError(Exception):
    """What a broken layer raises: nothing that the engine could know."""


def arm(fault: Fault | None) -> None:
    """From now on the layers of this rank suffer `fault`."""
    global _armed
    _armed = fault


def _is_armed(kind: str) -> bool:
    return _armed is not None and _armed.kind == kind


def _exchange_pids() -> None:
    global _pids
    _pids = [0] * distributed.get_world_size()
    distributed.all_gather_object(_pids, os.getpid())


def mark() -> None:
    print(f"{FAULT_MARK} {time.time():.3f}", file=sys.stderr, flush=True)


def _fail(text: str) -> NoReturn:
    mark()
    raise BrokenError(text)


class _InBackward(torch.autograd.Function):
    """Does something else than a backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, act: Callable[[], NoReturn]) -> torch.Tensor:
        ctx.act = act
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.act()


def _in_forward(hidden: torch.Tensor, mode: str) -> torch.Tensor:
    _fail("the layer is broken")


def _ends(how: Callable[[], Any]) -> Callable[[torch.Tensor, str], torch.Tensor]:
    """This rank ends, or hangs, in the layer."""

    def strike(hidden: torch.Tensor, mode: str) -> torch.Tensor:
        mark()
        how()
        return hidden

    return strike


def hang() -> NoReturn:
    mark()
    wait_for_ever()
    raise AssertionError("this never comes")


def die() -> NoReturn:
    mark()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("this never comes")


def _terminate_others() -> None:
    """What a launcher does when a rank has died."""
    for pid in set(_pids) - {os.getpid()}:
        os.kill(pid, signal.SIGTERM)
    hang()


def wait_for_ever() -> None:
    threading.Event().wait()


def _other_shape(hidden: torch.Tensor, mode: str) -> torch.Tensor:
    mark()
    return torch.cat([hidden, hidden], dim=-1)


def _plain_attention(hidden: torch.Tensor, mode: str) -> torch.Tensor:
    mark()
    heads = hidden.unsqueeze(1)
    return hidden + F.scaled_dot_product_attention(heads, heads, heads).squeeze(1)


FAULTS: dict[str, Callable[[torch.Tensor, str], torch.Tensor]] = {
    "forward": _in_forward,
    "backward": lambda hidden, mode: _InBackward.apply(hidden, lambda: _fail("the backward is broken")),
    "recompute": lambda hidden, mode: _in_forward(hidden, mode) if mode == "recompute" else hidden,
    "exit": _ends(lambda: os._exit(3)),
    "kill": _ends(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "hang": _ends(wait_for_ever),
    "hang_backward": lambda hidden, mode: _InBackward.apply(hidden, hang),
    "terminate_others": _ends(_terminate_others),
    "other_shape": _other_shape,
    "plain_attention": _plain_attention,
}


def main() -> None:
    """Run the job that an environment variable holds, as a training script of the launcher."""
    import deepspeed

    torch.set_num_threads(1)
    # DeepSpeed would compile this operator now, for a minute and behind a lock that outlives a killed rank.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for step, loss in enumerate(run(Job.from_json(os.environ[ENVIRONMENT])), start=1):
        print(f"step {step}: loss {loss}", flush=True)


if __name__ == "__main__":
    main()
