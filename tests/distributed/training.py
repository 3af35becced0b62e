"""Train cases: define their layers and data, the plainest reference, and the run of an engine that is compared with it.

`train_alone` has no pipeline, no slices, no DeepSpeed engine and no attention of ours: torch's modules one after the
other, a backward for each micro-batch of each replica, torch's own clipping and AdamW. `train_case` trains the same by
DeepSpeed's stock engine or by ours, and runs inside the ranks.
"""

import contextlib
import functools
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn

from terapipe_ds.models import gpt
from tests import dict_batches
from tests.distributed.cases import CLIP_NORM, MAX_LENGTH, Case, RankRecord
from tests.distributed.engines import engine_of, record_gradients, torch_attention, unchecked
from tests.small_models.experts import LossWithAdded, plain_experts, with_experts, with_shares
from tests.small_models.mixers import MixerLayer

VOCAB_SIZE = 29
IGNORE_INDEX = -100
# Adam moves a parameter by LEARNING_RATE / ADAM_EPS times a small change of its gradient. At a hundred times, rounding
# in fp32 grew from step to step above the contract (in fp64 the same runs agreed to 1e-13).
LEARNING_RATE = 1e-3
ADAM_EPS = 1e-3
WEIGHT_DECAY = 0.01
EVALUATION_STEP = 1000  # from here on steps seed data that no training step sees


# -- what both sides train -----------------------------------------------------------------------------------------


def layers(case: Case) -> list[Any]:
    """Return layer specs, for weights of `draw_weights`."""
    specs = gpt.gpt_layers(
        gpt.GPTConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            num_layers=case.decoder_layers,
            num_heads=4,
            num_kv_heads=case.kv_heads,
            ffn_size=48,
            max_sequence_length=MAX_LENGTH,
            tied_embedding=case.tied,
            positions=case.positions,
            gated_mlp=not case.gpt3,
            bias=case.gpt3,
            dtype="float64" if case.dtype == "fp64" else "float32",
        )
    )
    dtype = torch.float64 if case.dtype == "fp64" else torch.float32
    decoders = [index for index, spec in enumerate(specs) if spec.typename is gpt.DecoderLayer]
    if "experts" in case.mixers:
        return with_experts(specs, decoders[1::2], 32, dtype)
    for index, kind in zip(decoders, itertools.cycle(case.mixers), strict=False):
        if kind != "attention":
            specs[index] = LayerSpec(MixerLayer, kind, f"mixer {index}", 32, 4, dtype)
    return specs


def loss_function(reduction: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Compute cross entropy, reduced as `terapipe.loss_reduction` names it."""
    return functools.partial(_loss, reduction=reduction)


def loss_of(case: Case) -> Callable[..., Tensor]:
    return LossWithAdded() if "experts" in case.mixers else loss_function(case.loss_reduction)


def _loss(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    flat = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    if reduction == "mean_valid":
        return flat.sum() / (labels != IGNORE_INDEX).sum()
    return flat.mean() if reduction == "mean" else flat.sum() / 16


def draw_weights(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Draw weights by the parameter's name alone: large enough that tokens matter to later ones, and numbers that bf16
    can hold, so that runs in all precisions start from the very same model.
    """
    for name, parameter in named:
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        drawn = drawn / drawn.shape[-1] ** 0.5 if drawn.dim() > 1 else name.endswith("weight") + 0.1 * drawn
        with torch.no_grad():
            parameter.copy_(drawn.bfloat16())


def evaluation_data(case: Case, replica: int, step: int) -> list[tuple[Any, Any]]:
    """Return the data to evaluate after this step: between steps, where it may not disturb training, and at the
    end."""
    return micro_batches(case, replica, EVALUATION_STEP + step) if step in (1, case.steps) else []


def micro_batches(case: Case, replica: int, step: int) -> list[tuple[Any, Any]]:
    """Return token ids (with documents, also position ids) and labels of a step of one replica, [rows, length] each."""
    batch = [_micro_batch(case, replica, step, index) for index in range(case.micro_batches)]
    return [(x, with_shares(y)) for x, y in batch] if "experts" in case.mixers else batch


def _micro_batch(case: Case, replica: int, step: int, index: int) -> tuple[Any, Tensor]:
    seed = case.data_seed + 1_000_003 * replica + 1009 * step + index
    generator = torch.Generator().manual_seed(seed)
    shape = case.rows, case.length_of(step, index) + 1
    text = torch.randint(VOCAB_SIZE, shape, generator=generator)
    labels = text[:, 1:].clone()
    if case.masked:  # none before some token, and few after it: whole slices are without a label
        first = int(torch.randint(labels.shape[1], (), generator=generator))
        hidden = torch.rand(labels.shape, generator=generator) < 0.5
        hidden[:, :first] = True
        hidden[0, first] = False  # at least one label counts
        labels[hidden] = IGNORE_INDEX
    tokens = text[:, :-1].contiguous()
    is_packed = case.documents and case.batch != "plain"
    ids = _position_ids(tokens, generator) if is_packed else torch.arange(tokens.shape[1]).repeat(len(tokens), 1)
    if case.batch != "tuple":
        if (
            is_packed and index == 0 and ids.shape[1] > 8
        ):  # of one token at the start and at an edge of slices (7, 1, 4)
            ids[0] = torch.cat([torch.arange(count) for count in (1, 6, 1, ids.shape[1] - 8)])
        dict_batches.ignore_ends(case.batch, labels, ids)
    return ((tokens, ids) if case.documents else tokens), labels


def _position_ids(tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Restart counting at one to three places of each row, so that rows may have different documents."""
    ids = torch.arange(tokens.shape[1]).repeat(len(tokens), 1)
    for row in ids:
        places = 1 + torch.randperm(len(row) - 1, generator=generator)
        for start in places[: int(torch.randint(1, 4, (), generator=generator))].sort().values.tolist():
            row[start:] = torch.arange(len(row) - start)
    return ids


# -- the reference -------------------------------------------------------------------------------------------------


class Whole(nn.Module):
    """Hold all layers in one process. Parameters are named as `PipelineModule` names them."""

    def __init__(self, specs: list[Any]) -> None:
        super().__init__()
        self.calls: list[Callable[[Tensor], Tensor]] = []
        self.by_prefix: dict[str, nn.Module] = {}
        for index, spec in enumerate(specs):
            key = getattr(spec, "key", None)  # of tied layers
            prefix = f"{index}." if key is None else f"tied_modules.{key}."
            layer = self.by_prefix.get(prefix) or spec.build()
            self.by_prefix[prefix] = layer
            forward = getattr(spec, "forward_fn", None)
            self.calls.append(layer if forward is None else functools.partial(forward, layer))
        self.kept = nn.ModuleList(self.by_prefix.values())
        draw_weights(self.named())

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for prefix, layer in self.by_prefix.items():
            for name, parameter in layer.named_parameters():
                yield prefix + name, parameter

    def forward(self, inputs: Any) -> Tensor:
        """Run whole rows; with position ids each document alone."""
        if isinstance(inputs, tuple):
            return torch.cat([self._alone(*row) for row in zip(*inputs, strict=True)])
        for call in self.calls:
            inputs = call(inputs)
        return inputs  # type: ignore[no-any-return]

    def _alone(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        starts = (position_ids == 0).nonzero().flatten().tolist()
        documents = tokens.tensor_split(starts[1:])
        return torch.cat([self(document[None]) for document in documents], dim=1)


def train_alone(case: Case) -> list[RankRecord]:
    """Train in this process; return one record per replica: each has losses of its own, all else is common."""
    with torch_attention(), plain_experts():
        return _loop(case)


def _loop(c: Case) -> list[RankRecord]:
    model, loss_fn = Whole(layers(c)), loss_of(c)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=ADAM_EPS, weight_decay=WEIGHT_DECAY)
    records = [RankRecord(replica, 0, replica, "alone") for replica in range(c.data_parallel)]
    share = 1.0 / (c.micro_batches * c.data_parallel)
    for step in range(1, c.steps + 1):
        optimizer.zero_grad()
        for record in records:
            losses = []
            for inputs, labels in micro_batches(c, record.data_parallel_id, step):
                loss = loss_fn(model(inputs), labels)
                (loss * share).backward()
                losses.append(loss.item())
            record.losses.append(sum(losses) / c.micro_batches)
        _finish_gradients(c, model, records, step)
        optimizer.step()
        if evaluation_data(c, 0, step):
            evaluation = sum(_evaluated(c, model, record.data_parallel_id, step) for record in records)
            for record in records:
                record.evaluations.append(evaluation / c.data_parallel)
    returned = [sum(record.losses[step] for record in records) / c.data_parallel for step in range(c.steps)]
    for record in records:
        record.returned = returned
        record.parameters = to_numpy(dict(model.named()))
    return records


def _finish_gradients(c: Case, model: Whole, records: list[RankRecord], step: int) -> None:
    """Run the hook, record and clip. ZeRO keeps gradients unchanged and scales them in its step."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= 2 if c.hook else 1
    before = to_numpy({name: parameter.grad for name, parameter in model.named()})
    if c.clipping:
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        for record in records:
            record.norms.append(float(norm))
    after = before if c.zero_stage else to_numpy({name: parameter.grad for name, parameter in model.named()})
    for record in records:
        record.gradients[step] = after


def _evaluated(c: Case, model: Whole, replica: int, step: int) -> float:
    with torch.no_grad():
        batch = evaluation_data(c, replica, step)
        return sum(loss_of(c)(model(x), y).item() for x, y in batch) / c.micro_batches


def to_numpy(tensors: Mapping[str, Tensor]) -> dict[str, npt.NDArray[np.floating]]:
    return {name: tensor.detach().double().cpu().numpy().copy() for name, tensor in tensors.items()}


# -- the engines ------------------------------------------------------------------------------------------------------

System = Literal["stock", "terapipe"]


def train_case(case: Case, system: System = "terapipe", fault: str | None = None, **changes: Any) -> RankRecord:
    """Train the case and record the values of the equality contract. Called on every rank.

    A fault of `faults.py` holds for the whole run; `changes` go into the `terapipe` section.
    """
    terapipe = None if system == "stock" else {**terapipe_section(case), **changes}
    with contextlib.nullcontext() if fault is None else _broken_by(fault):
        with engine_of(layers(case), terapipe, **options(case)) as engine:
            return train_by(engine, case)


def _broken_by(fault: str) -> contextlib.AbstractContextManager[None]:
    from tests.distributed.faults import FAULTS

    return FAULTS[fault].broken()


def terapipe_section(case: Case) -> dict[str, Any]:
    slices = case.slices if isinstance(case.slices, int) else list(case.slices)
    chunks_per_stage = 2 if "interleaved" in case.schedule else 1
    of_schedule = {"schedule": case.schedule, "chunks_per_stage": chunks_per_stage}
    by_dict = "off" if case.batch == "plain" else "position_ids"
    documents = "off" if not case.documents else 1 if case.batch == "tuple" else by_dict
    return unchecked(**of_schedule, slices=slices, loss_reduction=case.loss_reduction, documents=documents)


def options(case: Case) -> dict[str, Any]:
    """Return options of `engines.build`: the module's and DeepSpeed's."""
    found: dict[str, Any] = {
        "stages": case.stages,
        "loss_fn": loss_of(case),
        "module_class": DoublingModule if case.hook else DrawnModule,
        "train_micro_batch_size_per_gpu": case.rows,
        "gradient_accumulation_steps": case.micro_batches,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "eps": ADAM_EPS, "weight_decay": WEIGHT_DECAY, "torch_adam": True},
        },
        "gradient_clipping": CLIP_NORM if case.clipping else 0.0,
        "zero_optimization": {"stage": case.zero_stage},
    }
    if case.dtype == "bf16":
        found["bf16"] = {"enabled": True}
    if case.checkpointing != "off":
        found["pipeline"] = {
            "activation_checkpoint_interval": 1,
            "use_reentrant": case.checkpointing != "non_reentrant",
        }
    if case.checkpointing == "reentrant":
        found["module"] = {"checkpointable_layers": ["DecoderLayer", "MixerLayer", "Beside", "ExpertsLayer"]}
    return found


class DrawnModule(PipelineModule):
    """Start from the weights that all precisions start from."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        draw_weights(self.named_parameters())


class DoublingModule(DrawnModule):
    """Double the gradients when the engine calls the hook, before any of them is summed over stages or replicas."""

    def before_reduce(self, engine: Any) -> None:
        for parameter in self.parameters():
            parameter.grad *= 2  # type: ignore[operator]


def _batches(case: Case, drawn: list[tuple[Any, Tensor]]) -> list[Any]:
    if case.batch == "tuple":
        return list(drawn)
    return [dict_batches.of(case.batch, *rows, labels) for rows, labels in drawn]


def _keep_norms(engine: PipelineEngine) -> None:
    """Let the stock engine tell the norm when it clips without ZeRO; a single stage has all gradients."""
    clip = engine.clip_fp32_gradients

    def keep_and_clip() -> None:
        gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
        engine._global_grad_norm = nn.utils.get_total_norm(gradients)
        clip()

    engine.clip_fp32_gradients = keep_and_clip


def train_by(engine: PipelineEngine, case: Case) -> RankRecord:
    """Train the steps of a case with an existing engine, and record them."""
    replica = engine.grid.get_data_parallel_id()
    record = RankRecord(engine.global_rank, engine.stage_id, replica, type(engine).__name__)
    snapshots: list[dict[str, Any]] = []
    record_gradients(engine, lambda gradients: snapshots.append(to_numpy(gradients)))
    if type(engine) is PipelineEngine and case.stages == 1:
        _keep_norms(engine)
    for step in range(1, case.steps + 1):
        returned = engine.train_batch(iter(_batches(case, micro_batches(case, replica, step))))
        # the last stage returns fp64, the others the received number
        record.returned.append(float(np.float32(float(returned))))
        assert len(snapshots) == step, f"{len(snapshots)} optimizer steps in {step} batches"
        if case.clipping and engine.get_global_grad_norm() is not None:
            record.norms.append(float(engine.get_global_grad_norm()))
        if engine.is_last_stage():
            record.losses.append(float(engine.total_loss) / case.micro_batches)
        if data := evaluation_data(case, replica, step):
            evaluation = engine.eval_batch(iter(_batches(case, data)), bcast_loss=False)
            record.evaluations += [float(evaluation)] if engine.is_last_stage() else []
    record.gradients = dict(enumerate(snapshots, 1))
    record.parameters = to_numpy(dict(engine.module.named_parameters()))
    assert all(gradients.keys() == record.parameters.keys() for gradients in snapshots), "some have no gradient"
    return record
