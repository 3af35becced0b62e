"""Build small engines of both kinds and their data, and record a short training with them. Runs inside the ranks.

Every model starts from the same weights whatever the number of stages. A stock engine with one stage on several
ranks is data parallel; because all of them get the same data, it trains as if it were alone.
"""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch.utils.data import DataLoader

import terapipe_ds
from terapipe_ds.models import gpt
from terapipe_ds.runtime.profiling import rounds
from tests.distributed.cases import relative_error, worst_error
from tests.small_models import mixers, parts
from tests.small_models.parts import IGNORE_INDEX, VOCAB_SIZE

LENGTH = 23
LEARNING_RATE = 1e-2
EXACT = 1e-10  # fp64
FP32_SCALAR = 1e-6  # DeepSpeed rounds numbers for other ranks to fp32

MicroBatch = tuple[Any, Any]
Batch = list[MicroBatch]

CHECKPOINTING: dict[str, dict[str, Any]] = {
    "off": {},
    "reentrant": {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": True}},
    "non_reentrant": {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}},
}
SMALL_STEPS = {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 5}}
ZERO1: dict[str, Any] = {"zero_optimization": {"stage": 1}}


# -- data ----------------------------------------------------------------------------------------------------


def micro_batch(seed: int, length: int = LENGTH, rows: int = 2, masked: bool = True) -> MicroBatch:
    """Return token ids and labels, [rows, length] each. Rows differ in how many of their labels count."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(VOCAB_SIZE, (rows, length + 1), generator=generator)
    labels = text[:, 1:].clone()
    if masked:
        labels[0, : length // 2] = IGNORE_INDEX
    return text[:, :-1].contiguous(), labels


def batches(num_batches: int, num_micro_batches: int = 2, first_seed: int = 0, **shape: Any) -> list[Batch]:
    return [
        [micro_batch(first_seed + 100 * step + index, **shape) for index in range(num_micro_batches)]
        for step in range(num_batches)
    ]


def few_rounds() -> contextlib.AbstractContextManager[Any]:
    """Measure slices as little as possible, in tests that do not compare the measured values."""
    return mock.patch.multiple(rounds, MIN_ROUNDS=1, MAX_ROUNDS=1, _SMALL_TOKENS=1)


def with_few_rounds(job: Callable[..., Any], **options: Any) -> Any:
    with few_rounds():
        return job(**options)


def loader_in_process(*args: Any, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(*args, **{**kwargs, "num_workers": 0})  # a rank may not have child processes


# -- the log ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the package's log on this rank during the block, from information upwards."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("terapipe_ds")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)  # the package leaves the level alone where there is a handler
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


# -- engines -------------------------------------------------------------------------------------------------


def gpt_layers(dtype: str = "float64", **changes: Any) -> list[Any]:
    """Return a decoder whose tokens matter to each other (large weights), four layers of hidden size 16."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 16, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2,
        "ffn_size": 24, "max_sequence_length": 64, "init_std": 0.3, "dtype": dtype,
    }  # fmt: skip
    return gpt.gpt_layers(gpt.GPTConfig(**{**fields, **changes}))


fp32_layers = functools.partial(gpt_layers, "float32")


def section(**changes: Any) -> dict[str, Any]:
    """Return a `terapipe` section: seq1f1b with three slices that may be cut anywhere."""
    return {"enabled": True, "schedule": "seq1f1b", "slices": 3, "granularity_tokens": 1, **changes}


unchecked = functools.partial(section, verify="off")
"""The same without the check of the first batch, for tests of other things. `start` leaves out the loss check too."""
loss_is_checked = False  # true: `start` leaves it in


def config(**changes: Any) -> dict[str, Any]:
    """Return a DeepSpeed config: two micro-batches of two rows, Adam."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": LEARNING_RATE, "torch_adam": True}},
        "gradient_clipping": 0.0,  # on by default, and wrong in the stock engine with several stages
        "steps_per_print": 10**9,
        **changes,
    }


def pipeline_module(
    layers: Sequence[Any], stages: int | None = 2, module_class: type[PipelineModule] = PipelineModule, **options: Any
) -> PipelineModule:
    """Return a module of the layers, cut by their number by default."""
    return module_class(
        **{"layers": layers, "num_stages": stages, "loss_fn": gpt.gpt_loss, "partition_method": "uniform", **options}
    )


def build(
    layers: Sequence[Any],
    terapipe: dict[str, Any] | None,
    *,
    stages: int = 2,
    loss_fn: Any = gpt.gpt_loss,
    module_class: type[PipelineModule] = PipelineModule,
    module: dict[str, Any] | None = None,
    initialize: dict[str, Any] | None = None,
    **changes: Any,
) -> PipelineEngine:
    """Return an engine for layers; the other options go to `start`."""
    model = pipeline_module(layers, stages, module_class, **{"loss_fn": loss_fn, **(module or {})})
    return start(model, terapipe, initialize, **changes)


def start(
    module: PipelineModule, terapipe: dict[str, Any] | None, initialize: dict[str, Any] | None = None, **changes: Any
) -> PipelineEngine:
    """Start DeepSpeed's own engine if `terapipe` is None, else ours; all tests that compare engines do so.

    Args:
        initialize: further arguments of `initialize`.
        changes: go into DeepSpeed's config.
    """
    ds_config = config(**changes) | ({} if terapipe is None else {"terapipe": terapipe})
    make = deepspeed.initialize if terapipe is None else terapipe_ds.initialize
    trained = [p for p in module.parameters() if p.requires_grad]
    engine = make(model=module, config=ds_config, **{"model_parameters": trained, **(initialize or {})})[0]
    assert (type(engine) is PipelineEngine) == (terapipe is None)
    if any(parameter.dtype == torch.float64 for parameter in module.parameters()):
        reduce_in_fp64(engine)
    if terapipe and terapipe.get("verify") == "off" and terapipe["enabled"] and not loss_is_checked:
        leave_out_first_check(engine)
    return engine


def leave_out_first_check(engine: Any) -> None:
    """Let an engine check nothing in its first batch, as it checks the loss with `"verify": "off"` too."""
    engine._incoming._first_batch.run = lambda *arguments: None


def reduce_in_fp64(engine: PipelineEngine) -> None:
    """Let DeepSpeed reduce in fp64: it refuses to reduce gradients in a dtype that the accelerator does not list."""
    accelerator = get_accelerator()
    listed = accelerator.supported_dtypes()
    if torch.float64 not in listed:
        accelerator.supported_dtypes = lambda: [*listed, torch.float64]
    engine.communication_data_type = torch.float64


@contextlib.contextmanager
def engine_of(layers: Sequence[Any], terapipe: dict[str, Any] | None, **options: Any) -> Iterator[PipelineEngine]:
    """Yield an engine for the block, built as by `build`. A stock engine runs torch's own attention."""
    with _held(lambda: build(layers, terapipe, **options), terapipe is None) as engine:
        yield engine


@contextlib.contextmanager
def started(module: PipelineModule, terapipe: dict[str, Any] | None, **options: Any) -> Iterator[PipelineEngine]:
    """Do the same for an existing module, by `start`."""
    with _held(lambda: start(module, terapipe, **options), terapipe is None) as engine:
        yield engine


@contextlib.contextmanager
def _held(make: Callable[[], PipelineEngine], is_stock: bool) -> Iterator[PipelineEngine]:
    with torch_attention() if is_stock else contextlib.nullcontext():
        engine = make()
        try:
            yield engine
        finally:
            engine.destroy()


def both(
    job: Callable[[PipelineEngine], Any],
    layers: Callable[[], Sequence[Any]] | None = None,
    terapipe: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Run `job(engine)` with the stock engine, then with ours."""
    results = []
    for each in (None, terapipe or section()):
        with engine_of((layers or gpt_layers)(), each, **options) as engine:
            results.append(job(engine))
    return results[0], results[1]


@contextlib.contextmanager
def torch_attention() -> Iterator[None]:
    """Let models run torch's own attention for the block: a stock run contains no code of ours."""

    def attention(q: Tensor, k: Tensor, v: Tensor, layer: Any, scale: float | None = None, **options: Any) -> Tensor:
        if options.keys() - {"dropout_p"}:
            return mixers.attention_by_hand(q, k, v, **options)
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped, **options)

    with (
        mock.patch.object(gpt, "sliced_attention", attention),
        mock.patch.object(mixers, "sliced_attention", attention),
        mock.patch.object(parts, "_attention", attention),
    ):
        yield


# -- training ------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """Hold the result of a training on this rank."""

    losses: list[float] = field(default_factory=list)  # on the last stage
    returned: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # of each step, by parameter
    parameters: dict[str, Tensor] = field(default_factory=dict)


def train(engine: PipelineEngine, data: Sequence[Batch], before_step: Callable[[int], None] | None = None) -> Run:
    """Make one optimizer step for each batch."""
    run = Run()
    forget = record_gradients(engine, run.gradients.append)
    for step, batch in enumerate(data):
        if before_step is not None:
            before_step(step)
        run.returned.append(float(engine.train_batch(iter(batch))))
        if engine.is_last_stage():
            run.losses.append(float(engine.total_loss) / len(batch))
    forget()
    run.parameters = {name: p.detach().clone() for name, p in trained_here(engine)}
    return run


def trained_here(engine: PipelineEngine) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters of this stage, without a loss module's if another stage computes the loss."""
    layout, named = getattr(engine, "_layout", None), list(engine.module.named_parameters())
    has_loss = engine.is_last_stage() if layout is None else engine.stage_id in layout.stages_with_end(first=False)
    return [(name, p) for name, p in named if has_loss or not name.startswith("loss_fn.")]


def run_training(
    layers: Callable[[], Sequence[Any]],
    terapipe: dict[str, Any] | None,
    data: Sequence[Batch],
    *,
    before_step: Callable[[PipelineEngine, int], None] | None = None,
    **options: Any,
) -> Run:
    """Build an engine, train with it, and take it down."""
    with engine_of(layers(), terapipe, **options) as engine:
        return train(engine, data, None if before_step is None else lambda step: before_step(engine, step))


@functools.cache
def stock_run(num_batches: int = 2, num_micro_batches: int = 2, stages: int = 1, **model: Any) -> Run:
    """Train `gpt_layers(**model)` on `batches(...)` with the stock engine. A rank does it once for all tests."""
    return run_training(
        functools.partial(gpt_layers, **model),
        None,
        batches(num_batches, num_micro_batches),
        stages=stages,
        gradient_accumulation_steps=num_micro_batches,
    )


def raised_by(act: Callable[[], Any]) -> tuple[str, str]:
    """Return the class and the text of the error that `act` raises, two empty strings if it raises nothing."""
    try:
        act()
    except (Exception, SystemExit) as error:
        return type(error).__name__, str(error)
    return "", ""


def in_thread(act: Callable[[], Any]) -> tuple[str, str]:
    """Return the class and the text of the error that `act` raises in a thread of its own."""
    raised: list[tuple[str, str]] = []
    thread = threading.Thread(target=lambda: raised.append(raised_by(act)), name="saver")
    thread.start()
    thread.join(20)
    return raised[0] if raised else ("", "it hangs")


def step_error(engine: PipelineEngine, batch: Batch | None = None) -> tuple[str, str]:
    """Return the class and the text of the error that a training step raises."""
    return raised_by(lambda: engine.train_batch(iter(batch or batches(1)[0])))


def first_step_error(layers: Sequence[Any], terapipe: dict[str, Any], **options: Any) -> tuple[str, str]:
    """Return the class and the text of the error that a new engine's first training step raises."""
    with engine_of(layers, terapipe, **options) as engine:
        return step_error(engine)


def of_rank_0(told: list[Any]) -> Any:
    """Return what rank 0 says of a check that failed; each other rank says in one line that rank 0 has the text."""
    first, *others = told
    for other in others:
        assert other[0] == first[0] == "VerifyError", told
        assert other[1].endswith("; the error of rank 0 names the layers") and "\n" not in other[1], told
    return first


def count_products(engine: Any) -> list[int]:
    """Count the weight gradients of each W that `engine` runs from now on."""
    counted: list[int] = []
    compute = engine.weight_gradients.compute

    def counting(*args: Any) -> int:
        counted.append(compute(*args))
        return counted[-1]

    engine.weight_gradients.compute = counting
    return counted


def record_gradients(engine: PipelineEngine, keep: Callable[[dict[str, Tensor]], None]) -> Callable[[], None]:
    """Hand each step's gradients to `keep` as the optimizer meets them, without the loss scale: reduced and, where
    neither ZeRO nor bf16, clipped. Returns what ends this."""
    optimizer_step = engine.optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        scale = engine._get_optimizer_loss_scale() if engine.fp16_enabled() else 1.0
        gradients = {name: _gradient(p) for name, p in trained_here(engine)}
        keep({name: g.float() / scale if scale != 1.0 else g.clone() for name, g in gradients.items() if g is not None})
        return optimizer_step(*args, **kwargs)

    engine.optimizer.step = step

    def forget() -> None:
        engine.optimizer.step = optimizer_step

    return forget


def _gradient(parameter: torch.nn.Parameter) -> Tensor | None:
    if hasattr(parameter, "_hp_mapping"):  # ZeRO and bf16 keep gradients of their own
        return deepspeed.utils.safe_get_full_grad(parameter)
    if parameter.grad is None or parameter.grad.layout is torch.strided:
        return None if parameter.grad is None else parameter.grad.detach()
    return parameter.grad.detach().to_dense()


# -- comparison ----------------------------------------------------------------------------------------------


def error_of(ours: Any, stock: Any) -> float:
    """Return the relative error of results of any form; infinite if the form differs."""
    if torch.is_tensor(ours) and torch.is_tensor(stock):
        return relative_error(ours, stock) if ours.dtype == stock.dtype else float("inf")
    if isinstance(ours, (list, tuple)) and isinstance(stock, (list, tuple)) and len(ours) == len(stock):
        return max((error_of(a, b) for a, b in zip(ours, stock, strict=True)), default=0.0)
    if isinstance(ours, dict) and isinstance(stock, dict) and ours.keys() == stock.keys():
        return max((error_of(ours[key], stock[key]) for key in ours), default=0.0)
    if isinstance(ours, float) and isinstance(stock, float):
        return relative_error(ours, stock)
    return 0.0 if ours == stock else float("inf")


def differences(ours: Run, stock: Run) -> dict[str, float]:
    """Return the largest relative error of each kind on this rank. A value that ours lacks has an infinite error.

    Only the parameters of this rank count: the stock engine may have more of them, with fewer stages.
    """
    pairs = list(zip(ours.gradients, stock.gradients, strict=True))
    return {
        "loss": _worst_number(ours.losses, stock.losses) if ours.losses else 0.0,
        "returned": _worst_number(ours.returned, stock.returned),
        "gradient": max((_worst_tensor(a, b, set(ours.parameters)) for a, b in pairs), default=float("inf")),
        "parameter": _worst_tensor(ours.parameters, stock.parameters, set(ours.parameters)),
    }


def _worst_number(ours: list[float], stock: list[float]) -> float:
    assert len(ours) == len(stock)
    return max(relative_error(a, b) for a, b in zip(ours, stock, strict=True))


def _worst_tensor(ours: dict[str, Tensor], stock: dict[str, Tensor], names: set[str]) -> float:
    return worst_error(ours, stock).error if ours and ours.keys() == stock.keys() & names else float("inf")


def violations(errors: Sequence[dict[str, float]], limit: float = EXACT, **limits: float) -> dict[str, float]:
    """Return the errors above their limit on some rank, by kind; empty if two trainings are the same."""
    found = {kind: max(rank[kind] for rank in errors) for kind in errors[0]}
    limits = {"returned": max(limit, FP32_SCALAR), **limits}
    return {kind: error for kind, error in found.items() if not error <= limits.get(kind, limit)}
