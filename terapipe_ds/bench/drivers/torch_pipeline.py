"""Train with `torch.distributed.pipelining` on the very layers that DeepSpeed's `PipelineModule` gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist
from deepspeed.runtime.config import DtypeEnum
from torch import Tensor, nn
from torch.distributed import pipelining

from terapipe_ds.bench.cases import TWO_PARTS, Case, Job
from terapipe_ds.bench.drivers.base import Driver, MicroBatches, schedule_of
from terapipe_ds.bench.drivers.recorder import Recorder
from terapipe_ds.bench.metrics import Plans
from terapipe_ds.bench.ranks import USUAL_SETTINGS, gpt_config
from terapipe_ds.files.user_json import CommandError, DeepSpeedJson, says_nothing, value_at
from terapipe_ds.models.gpt import gpt_layers, gpt_loss
from terapipe_ds.runtime.profiling.one_device import partition
from terapipe_ds.schedule import Schedule, build
from terapipe_ds.schedule.placement import Placement, loop, v_shape

_CLASSES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved1f1b": "Interleaved1F1B", "zbv": "ZBVZeroBubble"}


def adam_options(ds_config: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `torch.optim.AdamW` that match a DeepSpeed config.

    Raises `CommandError` if the config requests features that a plain optimizer in the precision of the weights lacks.
    """
    optimizer = ds_config.get("optimizer") or {}
    params, is_bf16, sums = optimizer.get("params") or {}, _is_bf16(ds_config), sums_dtype(ds_config)
    if str(optimizer.get("type")).lower() not in ("adam", "adamw"):
        raise CommandError(f"torch runs here with AdamW, the config asks for {optimizer.get('type', 'no optimizer')}")
    taken = {key: params[key] for key in ("lr", "betas", "eps", "weight_decay") if key in params}
    others = ["pipeline.activation_checkpoint_interval", "fp16.enabled", "torch_autocast.enabled", "scheduler"]
    accepted = *taken, "torch_adam", "fused", "foreach", "set_grad_none"  # the last three change no result
    others += [f"optimizer.params.{key}" for key in params if key not in accepted]
    for key in others:
        if not says_nothing(key, value_at(ds_config, key)):
            raise CommandError(f"torch runs here without {key}, which the config asks for")
    if sums != torch.float32 and not (is_bf16 and sums == torch.bfloat16):
        raise CommandError(
            "torch sums gradients here in fp32 or as the weights are: change data_types.grad_accum_dtype"
        )
    # BF16_Optimizer under ZeRO 1 has its fp32 weights whole if there is one data-parallel rank, as here
    if (ds_config.get("zero_optimization") or {}).get("stage", 0) > int(is_bf16 and sums == torch.float32):
        raise CommandError("torch runs here without ZeRO, which the config asks for")
    if ds_config.get("gradient_clipping", 1.0) > 0:
        raise CommandError("torch runs here without gradient clipping: set gradient_clipping to 0.0 to compare with it")
    # DeepSpeed's Adam has another default than torch's
    return {"lr": 1e-3, "weight_decay": 0.01 if params.get("torch_adam") else 0.0, **taken, "fused": True}


def _is_bf16(ds_config: dict[str, Any]) -> bool:
    return DeepSpeedJson(ds_config).precision == "bf16"


def sums_dtype(ds_config: dict[str, Any]) -> torch.dtype:
    """Return the dtype in which DeepSpeed sums the gradients of micro-batches: usually the dtype of the weights."""
    given = (ds_config.get("data_types") or {}).get("grad_accum_dtype")
    dtype: torch.dtype = DtypeEnum(given or ("bf16" if _is_bf16(ds_config) else "fp32")).value
    return dtype


class Masters:
    """Hold the weights that a plain optimizer steps: the model's, or in bf16 (`is_apart`) fp32 copies beside them.

    DeepSpeed's BF16_Optimizer holds the same. AdamW on the bf16 weights themselves would hold half the bytes and lose
    changes below their last bit. `sums_in_fp32` says to take the gradients after each backward.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], is_apart: bool, sums: torch.dtype) -> None:
        self._parameters: list[Tensor] = list(parameters)
        self.is_apart, self.sums_in_fp32 = is_apart, is_apart and sums == torch.float32
        self.weights = [nn.Parameter(p.detach().float()) if is_apart else p for p in self._parameters]

    def take_gradients(self) -> None:
        """Add up in fp32 the gradients of the backwards since the last call, and drop torch's own gradients."""
        for parameter, weight in zip(self._parameters, self.weights, strict=True):
            if self.is_apart and parameter.grad is not None:
                new, parameter.grad = parameter.grad, None
                weight.grad = new.float() if weight.grad is None else weight.grad.add_(new)

    @torch.no_grad()
    def give_weights(self) -> None:
        """Round to the model's weights, after a step of the optimizer."""
        if self.is_apart:
            torch._foreach_copy_(self._parameters, self.weights)

    @torch.no_grad()
    def take_weights(self) -> None:
        """Copy the model's weights, exactly."""
        if self.is_apart:
            torch._foreach_copy_(self.weights, self._parameters)


class TorchDriver(Driver):
    """Drive a schedule of torch with AdamW and, in bf16, `Masters`; losses are divided before their backwards."""

    def __init__(self, case: Case, job: Job) -> None:
        self._kind = getattr(pipelining, f"Schedule{_CLASSES[case.schedule]}")
        self._case, self._work, self._rank = case, job.work, torch_dist.get_rank()
        self._device = torch.device(job.device_of(self._rank))
        self._config, stages = gpt_config(job.work, job.gpt), job.work.stages
        chunks = 2 if case.schedule in TWO_PARTS else 1
        self._placement = v_shape(stages) if case.schedule == "zbv" else loop(stages, chunks)
        self._num_parts = chunks * stages
        self.fewest = 1 if case.schedule == "gpipe" else stages
        layers = gpt_layers(self._config)
        bounds = partition(layers, self._num_parts)
        parts = [self._placement[self._rank, chunk_id] for chunk_id in range(chunks)]
        with self._device:
            self._modules = {
                part: nn.Sequential(*(spec.build() for spec in layers[bounds[part] : bounds[part + 1]]))
                for part in parts
            }
        self.recorder = Recorder()
        ds_config = job.ds_config or USUAL_SETTINGS
        self._masters = Masters(self.parameters(), _is_bf16(ds_config), sums_dtype(ds_config))
        self.optimizer = torch.optim.AdamW(self._masters.weights, **adam_options(ds_config))
        self._pipeline: Any = None

    def prepare(self, accumulation: int, plans: Plans, schedule: str | None = None) -> None:
        self._pipeline = None  # with its receive buffers, before new ones are made
        stages = [self._stage(chunk_id, part_id) for chunk_id, part_id in enumerate(self._modules)]
        given = stages if self._case.schedule in TWO_PARTS else stages[0]
        # dividing here rather than all gradients at the end of a step is torch's faster way
        loss_fn = partial(self._loss, accumulation)
        self._pipeline = self._kind(given, n_microbatches=accumulation, loss_fn=loss_fn, scale_grads=False)

    def _loss(self, accumulation: int, logits: Tensor, labels: Tensor) -> Tensor:
        with self.recorder.last_goes_on():
            return gpt_loss(logits, labels) / accumulation

    def _stage(self, chunk_id: int, part_id: int) -> Any:
        rows, length = self._work.micro_batch, self._work.sequence_length
        options = {"dtype": self._config.torch_dtype, "device": "meta", "requires_grad": True}
        hidden = torch.empty(rows, length, self._config.hidden_size, **options)
        inputs = torch.empty(rows, length, dtype=torch.int64, device="meta") if part_id == 0 else hidden
        is_last = part_id == self._num_parts - 1
        outputs = torch.empty(rows, length, self._config.vocab_size, **options) if is_last else hidden
        place = self._modules[part_id], part_id, self._num_parts, self._device
        stage = pipelining.PipelineStage(*place, input_args=inputs, output_args=outputs)
        for kind, name in (("F", "forward_one_chunk"), ("B", "backward_one_chunk"), ("W", "backward_weight_one_chunk")):
            setattr(stage, name, self._recorded(kind, chunk_id, getattr(stage, name)))
        return stage

    def _recorded(self, kind: str, chunk_id: int, run: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(micro_batch_id: int, *args: Any, **kwargs: Any) -> Any:
            with self.recorder.span(kind, micro_batch_id, 0, chunk_id):
                result = run(micro_batch_id, *args, **kwargs)
                if kind != "F" and self._masters.sums_in_fp32:
                    self._masters.take_gradients()
                return result

        return recorded

    def step(self, micro_batches: MicroBatches) -> float | None:
        losses: list[Tensor] = []
        inputs, labels = (torch.cat(tensors).to(self._device) for tensors in zip(*micro_batches, strict=True))
        has_last = self._num_parts - 1 in self._modules
        keywords: dict[str, Any] = {"target": labels, "losses": losses} if has_last else {}
        self._pipeline.step(*((inputs,) if 0 in self._modules else ()), return_outputs=False, **keywords)
        with self.recorder.span("ST"):
            self._masters.take_gradients()
            self.optimizer.step()
            self._masters.give_weights()
        # sums in fp32 stay, as DeepSpeed's do; otherwise the next backward makes new gradients
        self.optimizer.zero_grad(set_to_none=not self._masters.sums_in_fp32)
        return float(sum(loss.detach() for loss in losses)) if has_last else None

    def schedule(self, accumulation: int, plans: Plans) -> Schedule:
        if self._case.schedule not in TWO_PARTS:  # as ours; torch prints another order for its 1F1B than it runs
            return build(self._case.schedule, self._work.stages, accumulation, 1)
        return of_torch(self._case.schedule, self._pipeline.pipeline_order, self._placement)

    def restart(self) -> None:
        super().restart()
        self._masters.take_weights()

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self._modules.values() for parameter in module.parameters()]

    def copies(self) -> list[Tensor]:
        weights = self._masters.weights if self._masters.is_apart else []
        return [*weights, *(weight.grad for weight in weights if weight.grad is not None)]


def of_torch(name: str, pipeline_order: Mapping[int, Sequence[Any]], placement: Placement) -> Schedule:
    """Return a schedule of torch.distributed.pipelining from its `pipeline_order`: rank -> actions, None for idle."""
    codes = {"F": "F", "B": "B", "I": "B", "W": "W"}
    chunk_of = {(stage_id, part_id): chunk_id for (stage_id, chunk_id), part_id in placement.items()}
    orders = []
    for rank in sorted(pipeline_order):
        pairs = [(codes.get(a.computation_type.value), a) for a in pipeline_order[rank] if a is not None]
        orders.append([f"{code}{a.microbatch_index}.0c{chunk_of[rank, a.stage_index]}" for code, a in pairs if code])
    return schedule_of(name, orders, placement)
