"""`train_case`: a few steps of a tiny GPT by DeepSpeed's stock engine or by ours. Runs inside the ranks."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any, Literal

import deepspeed
import numpy as np
import numpy.typing as npt
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine

from terapipe_ds.models import gpt
from tests.distributed.cases import (
    ADAM_EPS,
    BATCH_SIZE,
    CLIP_NORM,
    FULL,
    LEARNING_RATE,
    LOSS_SCALE,
    MIXED_LENGTHS,
    NUM_STEPS,
    PLANS,
    SEQUENCE_LENGTH,
    Case,
)
from tests.distributed.compare import RankRecord
from tests.distributed.engines import reduce_in_fp64, torch_attention

System = Literal["stock", "terapipe"]
VOCAB_SIZE = 61
IGNORE_INDEX = -100
GRADIENT_STEPS = (1, NUM_STEPS)
EVALUATION_AFTER_STEPS = (2, NUM_STEPS)  # in between too: evaluation must not disturb training
EVALUATION_STEP_ID = 1000  # seeds data that no training step sees


def train_case(case: Case, system: System) -> RankRecord:
    """Train the case and record what the equality contract speaks of. Called on every rank."""
    with torch_attention() if system == "stock" else contextlib.nullcontext():
        engine = build_engine(case, system)
        try:
            return _train(engine, case)
        finally:
            engine.destroy()


def _train(engine: PipelineEngine, case: Case) -> RankRecord:
    pipeline_id = engine.grid.get_data_parallel_id()
    record = RankRecord(engine.global_rank, engine.stage_id, pipeline_id, type(engine).__name__)
    snapshots = record_gradients(engine)
    for step in range(1, NUM_STEPS + 1):
        returned = engine.train_batch(batches(case, pipeline_id, step))
        # the last stage returns fp64, the others what they were sent
        record.returned.append(float(np.float32(float(returned))))
        assert len(snapshots) == step, f"{len(snapshots)} optimizer steps in {step} batches"
        if case.clipping and engine.get_global_grad_norm() is not None:
            record.norms.append(float(engine.get_global_grad_norm()))
        if engine.is_last_stage():
            record.losses.append(float(engine.total_loss) / case.micro_batches)
        if step in EVALUATION_AFTER_STEPS:
            data = batches(case, pipeline_id, EVALUATION_STEP_ID + step)
            evaluation = engine.eval_batch(data, bcast_loss=False)
            if engine.is_last_stage():
                record.evaluations.append(float(evaluation))
    record.gradients = {step: snapshots[step - 1] for step in GRADIENT_STEPS}
    record.parameters = {name: to_numpy(parameter) for name, parameter in engine.module.named_parameters()}
    return record


# -- the engine ----------------------------------------------------------------------------------------------


def build_engine(case: Case, system: System) -> PipelineEngine:
    """A PipelineEngine of DeepSpeed's own or of ours, with the same weights whatever the number of stages."""
    model = PipelineModule(
        layers=gpt.gpt_layers(gpt_config(case)),
        num_stages=case.stages,
        loss_fn=small_loss,
        partition_method="uniform",
        checkpointable_layers=["DecoderLayer"] if case.checkpointing == "reentrant" else None,
    )
    _initialize_weights(model)
    config = deepspeed_config(case)
    initialize = deepspeed.initialize
    if system == "terapipe":
        import terapipe_ds

        config["terapipe"] = terapipe_section(case)
        initialize = terapipe_ds.initialize
    engine = initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    assert isinstance(engine, PipelineEngine)
    assert (type(engine) is PipelineEngine) == (system == "stock")
    if case.dtype == "fp64":
        reduce_in_fp64(engine)
    return engine


def small_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The model's own loss times a power of two, which rounds nothing.

    It makes the gradients of this tiny model as small as those of a real one. Unscaled, their rounding noise
    in fp32 reaches Adam's eps, and Adam turns noise of that size in a gradient near zero into a visible step.
    """
    return LOSS_SCALE * gpt.gpt_loss(logits, labels)


def gpt_config(case: Case) -> gpt.GPTConfig:
    return gpt.GPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_layers=case.decoder_layers,
        num_heads=4,
        num_kv_heads=2 if case.gqa else 4,
        ffn_size=48,
        max_sequence_length=SEQUENCE_LENGTH,
        tied_embedding=case.tied,
        positions="learned" if case.learned else "rope",
        dtype="float64" if case.dtype == "fp64" else "float32",
    )


def deepspeed_config(case: Case) -> dict[str, Any]:
    """The config of both engines; ours gets the `terapipe` section on top."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH_SIZE,
        "gradient_accumulation_steps": case.micro_batches,
        "optimizer": {"type": "Adam", "params": {"lr": LEARNING_RATE, "eps": ADAM_EPS, "torch_adam": True}},
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": case.zero_stage},
        "gradient_clipping": CLIP_NORM if case.clipping else 0.0,
    }
    if case.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if case.checkpointing != "off":
        reentrant = case.checkpointing != "non_reentrant"
        config["pipeline"] = {"activation_checkpoint_interval": 1, "use_reentrant": reentrant}
    return config


def terapipe_section(case: Case) -> dict[str, Any]:
    """Return the section of a case; the usual run leaves the check of the layers to the tests of the check."""
    section = {"enabled": True, "schedule": case.schedule, "slices": PLANS[case.plan], "granularity_tokens": 1}
    section |= {} if FULL else {"verify": "off"}
    return section | ({"chunks_per_stage": 2} if "interleaved" in case.schedule else {})


def _initialize_weights(model: torch.nn.Module) -> None:
    """Weights that depend on the parameter's name alone: large enough that tokens matter to later ones, and
    numbers that bf16 can hold, so that runs in all precisions start from the very same model.
    """
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(parameter.shape, generator=generator)
        drawn = drawn / drawn.shape[-1] ** 0.5 if drawn.dim() > 1 else 1.0 + 0.1 * drawn
        with torch.no_grad():
            parameter.copy_(drawn.bfloat16())


# -- the data ------------------------------------------------------------------------------------------------


def batches(case: Case, pipeline_id: int, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches of one step: token ids and labels, both [B, L]."""
    return iter([_micro_batch(case, pipeline_id, step, index) for index in range(case.micro_batches)])


def _micro_batch(case: Case, pipeline_id: int, step: int, micro_batch_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10_000 * pipeline_id + 10 * step + micro_batch_id)
    length = MIXED_LENGTHS[(step + micro_batch_id) % len(MIXED_LENGTHS)] if case.mixed else SEQUENCE_LENGTH
    tokens = torch.randint(VOCAB_SIZE, (BATCH_SIZE, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    if case.masked:
        labels[_masked_out((step + micro_batch_id) % 3, length, generator)] = IGNORE_INDEX
    return tokens[:, :-1].contiguous(), labels


def _masked_out(pattern: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """True where a label does not count, [B, L]. Rows differ much, and two patterns empty whole slices."""
    masked = torch.zeros(BATCH_SIZE, length, dtype=torch.bool)
    if pattern == 0:  # the first tokens only: one of one row, two thirds of the other
        masked[0] = True
        masked[0, 1] = False
        masked[1, 2 * length // 3 :] = True
    elif pattern == 1:  # none of one row, the last label of the other
        masked[0] = True
        masked[1, :-1] = True
    else:  # some here and there, and all of the other row
        masked[0] = torch.rand(length, generator=generator) < 0.7
        masked[0, length // 2] = False
    return masked


# -- the record ----------------------------------------------------------------------------------------------


def record_gradients(engine: PipelineEngine) -> list[dict[str, npt.NDArray[np.floating]]]:
    """Keep each gradient as the optimizer meets it: reduced and, where neither ZeRO nor bf16, clipped."""
    snapshots: list[dict[str, npt.NDArray[np.floating]]] = []
    optimizer_step = engine.optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        snapshots.append({name: to_numpy(_gradient(p)) for name, p in engine.module.named_parameters()})
        return optimizer_step(*args, **kwargs)

    engine.optimizer.step = step
    return snapshots


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    if hasattr(parameter, "_hp_mapping"):  # ZeRO and bf16 keep gradients of their own
        gradient = deepspeed.utils.safe_get_full_grad(parameter)
    else:
        gradient = parameter.grad
    assert gradient is not None, "a parameter without a gradient at the optimizer step"
    return gradient


def to_numpy(tensor: torch.Tensor) -> npt.NDArray[np.floating]:
    return tensor.detach().double().cpu().numpy().copy()
