"""Test that with one slice and 1F1B the engine keeps every behaviour of DeepSpeed's pipeline engine, bit for bit.

Each job runs with DeepSpeed's own engine and then with ours in the same ranks; results must be equal, not close.
The tests cover the same areas as DeepSpeed's tests of its pipeline engine.
"""

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, ProcessTopology
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

import terapipe_ds
from terapipe_ds.models import gpt
from terapipe_ds.runtime.layers.gradient_sums import GradientSums
from tests.distributed import engines
from tests.distributed.harness import rank_pool

WHOLE = {"enabled": True, "slices": 1, "schedule": "1f1b"}  # the granularity is left alone, as a user would


def loss_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """`gpt_loss` of hidden states has the stock engine's numbers but for the last bits."""
    return gpt.gpt_loss(logits, labels)


# -- images: nothing in them is a sequence -----------------------------------------------------------------------------

NUM_CLASSES = 7


class Block(nn.Module):
    """Apply a convolution, a norm over the batch and dropout."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels_in, channels, 3, padding=1, stride=2)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, images: Tensor) -> Tensor:
        return F.dropout(F.relu(self.norm(self.convolution(images))), 0.1, self.training)


def image_layers() -> list[Any]:
    """Modules, layer specs and plain functions, as a `PipelineModule` takes them."""
    torch.manual_seed(5)
    return [
        LayerSpec(Block, 3, 8),
        LayerSpec(Block, 8, 12),
        LayerSpec(Block, 12, 12),
        lambda images: images.flatten(1),
        nn.Linear(12, 16),
        F.relu,
        nn.Linear(16, NUM_CLASSES),
    ]


def images(seed: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, 8, 8, generator=generator), torch.randint(NUM_CLASSES, (rows,), generator=generator)


def image_batches(count: int) -> list[engines.Batch]:
    return [[images(10 * step + index) for index in range(2)] for step in range(count)]


def on_images(**options: Any) -> dict[str, Any]:
    given = {"layers": image_layers, "loss_fn": nn.CrossEntropyLoss(), "train_micro_batch_size_per_gpu": 4, **options}
    return {**given, "module": {"partition_method": "parameters", **options.get("module", {})}}


# -- jobs --------------------------------------------------------------------------------------------------------------

EVALUATIONS: list[dict[str, Any]] = [
    {}, {"bcast_loss": False}, {"bcast_loss": False, "reduce_output": None}, {"num_micro_batches": 3},
    {"return_logits": True}, {"compute_loss": False}, {"compute_loss": False, "reduce_output": None},
]  # fmt: skip


def train_and_evaluate(engine: PipelineEngine, data: list[engines.Batch]) -> dict[str, Any]:
    """Make two steps, evaluations of all kinds, one more step; also return the buffers, such as a batch norm's."""
    torch.manual_seed(11)
    first = engines.train(engine, data[:2])
    evaluated = []
    for options in EVALUATIONS:
        engine.total_loss = None  # the stock engine adds logits to the last training loss, and fails
        evaluated.append(engine.eval_batch(iter(data[2] * 2), **options))
    last = engines.train(engine, data[2:])
    return {
        "first": vars(first),
        "evaluated": evaluated,
        "last": vars(last),
        "buffers": dict(engine.module.named_buffers()),
        "counters": [engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps],
        # the stock engine keeps none where it clips plain optimizers
        "norm": engine.get_global_grad_norm() if isinstance(engine.optimizer, DeepSpeedOptimizer) else None,
    }


def change_sizes(engine: PipelineEngine) -> list[Any]:
    """Change the number of micro-batches, and the rows and the length of each."""
    found: list[Any] = []
    for length, rows, count in ((23, 2, 2), (11, 3, 1), (30, 1, 3)):
        engine.set_train_batch_size(2 * count)
        engine.reset_activation_shape()
        [data] = engines.batches(1, count, length=length, rows=rows)
        run = engines.train(engine, [data])
        found += [vars(run), engine.micro_batches, engine.train_batch_size(), engine.gradient_accumulation_steps()]
    return found


def data_sources(engine: PipelineEngine) -> list[Any]:
    """Use a loader that begins again, the iterator that stays, a function for batches, and one after the other."""
    [first], [second] = engines.batches(1), engines.batches(1, first_seed=50)
    loader = RepeatingLoader(first)
    losses = [engine.train_batch(iter(loader)), engine.train_batch(), engine.train_batch()]
    engine.set_dataloader(second)
    losses.append(engine.train_batch())
    engine.set_batch_fn(lambda batch: (batch["ids"], batch["labels"]))
    losses.append(engine.train_batch(iter([{"ids": ids, "labels": labels} for ids, labels in first])))
    return losses


def what_users_ask(engine: PipelineEngine) -> dict[str, Any]:
    """Ask small questions, and collect the errors for calls that a pipeline does not take."""
    errors = {}
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: engine.forward(torch.zeros(1)),
        "backward": lambda: engine.backward(torch.zeros(1)),
        "step": engine.step,
        "train without gradients": torch.no_grad()(lambda: engine.train_batch(iter(engines.batches(1)[0]))),
        "batch size": lambda: engine.set_train_batch_size(3),
    }
    for name, call in calls.items():
        with pytest.raises(Exception) as caught:
            call()
        errors[name] = (caught.type.__name__, str(caught.value))
    engine.set_has_attention_mask(False)
    return {
        "errors": errors,
        "place": [engine.is_first_stage(), engine.is_last_stage(), engine.get_pipeline_parallel_rank()],
        "counts": [engine.num_stages, engine.micro_batches, engine.is_pipe_parallel, engine.is_data_parallel],
        "boundary": engine.is_gradient_accumulation_boundary(),
        "mpu": [engine.mpu.get_data_parallel_world_size(), engine.mpu.get_pipe_parallel_rank()],
        "losses": engine.get_additional_losses(),
        "rates": engine.get_lr(),
        "after": float(engine.train_batch(iter(engines.batches(1)[0]))),
    }


def tied_layers() -> list[Any]:
    torch.manual_seed(3)
    tied = functools.partial(TiedLayerSpec, "embedding", nn.Embedding, 31, 16)
    return [
        tied(),
        *engines.gpt_layers("float32")[1:5],
        tied(forward_fn=lambda table, hidden: F.linear(hidden, table.weight)),
    ]


class TableWithBias(nn.Embedding):
    """Hold a bias that a head may add to its logits, and that the lookup does not use."""

    def __init__(self) -> None:
        super().__init__(31, 16)
        self.bias = nn.Parameter(torch.zeros(31))


def bias_of_the_head_only(options: dict[str, Any]) -> tuple[str, str]:
    """Return the error of a step whose last stage alone uses a parameter that both stages tie."""
    tied = functools.partial(TiedLayerSpec, "table", TableWithBias, tied_weight_attr=["weight", "bias"])
    head = tied(forward_fn=lambda table, hidden: F.linear(hidden, table.weight, table.bias))
    layers = [tied(), *engines.gpt_layers("float32")[1:5], head]
    return engines.first_step_error(layers, engines.section(), **options)


@pytest.mark.parametrize("options", [{}, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}], ids=str)
def test_a_tied_parameter_that_one_stage_uses_is_named_where_stages_would_wait(options: dict[str, Any]) -> None:
    for kind, text in rank_pool(2).run(bias_of_the_head_only, options=options):
        assert kind == "TeraPipeConfigError"
        assert "tied layer 'table': 'bias' is in tied_weight_attr, and only some of its stages use it" in text


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def parametrized_later() -> tuple[str, str]:
    """Return the error of a step after the tied table has got a parametrization."""
    with engines.engine_of(tied_layers(), engines.section()) as engine:
        engine.train_batch(iter(engines.batches(1)[0]))
        register_parametrization(engine.module.tied_modules["embedding"], "weight", Doubled())
        return engines.step_error(engine)


def test_a_tied_weight_that_is_no_parameter_any_more_is_named() -> None:
    for kind, text in rank_pool(2).run(parametrized_later):
        assert kind == "TeraPipeConfigError"
        assert "tied layer 'embedding': 'weight' is computed from other parameters" in text


# -- labels, shapes and checkpoints of any kind ------------------------------------------------------------------------


def as_dicts(data: list[engines.Batch]) -> list[engines.Batch]:
    return [[(pixels, {"classes": classes, "factor": 0.5}) for pixels, classes in batch] for batch in data]


def loss_of_dict(outputs: Tensor, labels: dict[str, Any]) -> Tensor:
    assert type(labels) is dict
    return F.cross_entropy(outputs, labels["classes"]) * labels["factor"]


def loss_of_number(outputs: Tensor, label: Any) -> Tensor:
    """Of an integer, a tensor without dimensions, or nothing."""
    return outputs.square().mean() * (2.0 if label is None else label + 1)


def labelled(*labels: Any) -> list[engines.Batch]:
    """Batches of images, each with a label of its own."""
    return [[(pixels, label) for pixels, _ in batch] for batch, label in zip(image_batches(3), labels, strict=True)]


def own_loss_layers() -> list[Any]:
    """The model gives its loss itself."""
    return [*image_layers(), lambda outputs: outputs.square().mean()]


class Mean(nn.Module):
    """Take the mean over the pixels, for any number of them."""

    def forward(self, pixels: Tensor) -> Tensor:
        return pixels.mean((2, 3))


def sizeless_layers() -> list[Any]:
    """The first stage, of three layers, hands on what is as large as its images."""
    torch.manual_seed(5)
    head = [Mean(), nn.Linear(12, 16), nn.Linear(16, NUM_CLASSES)]
    return [LayerSpec(Block, 3, 8), LayerSpec(Block, 8, 12), F.relu, *head]


def images_of_sizes(count: int) -> list[engines.Batch]:
    """Micro-batches of a batch differ in the size of their images, and have labels of one shape."""
    sizes = [(8, 8), (16, 8), (12, 20), (8, 12), (24, 16), (16, 8)]
    resized = [
        (F.interpolate(pixels, sizes[i % len(sizes)]), classes)
        for i, (pixels, classes) in enumerate(one for batch in image_batches(count) for one in batch)
    ]
    return [resized[2 * i : 2 * i + 2] for i in range(count)]


@contextlib.contextmanager
def in_parts() -> Iterator[None]:
    """Partition DeepSpeed's checkpoints over the ranks, each part in one piece of memory, for the block."""
    set_here = {"PARTITION_ACTIVATIONS": True, "CONTIGUOUS_CHECKPOINTING": True, "num_layers": 16}
    with mock.patch.multiple(ds_checkpointing, **set_here):
        ds_checkpointing.reset()
        yield


def partitioned(engine: PipelineEngine) -> dict[str, Any]:
    """Trained with DeepSpeed's checkpoints in parts, as a program sets them after the engine is built."""
    with in_parts():
        return TEXT(engine)


def checkpoint_functions(engine: PipelineEngine) -> list[Any]:
    """Return what DeepSpeed reads about the checkpoint function, before training and between its steps."""
    found: list[Any] = []
    for interval in (0, 2, 1):
        engine.module.set_checkpoint_interval(interval)
        found.append(engine.module.activation_checkpoint_func.__name__)
        found.append(engine._reentrant_activation_checkpointing())
        found.append(vars(engines.train(engine, image_batches(1))))
    return found


TEXT = functools.partial(train_and_evaluate, data=engines.batches(3))
IMAGES = functools.partial(train_and_evaluate, data=image_batches(3))
CHECKPOINTED = {"activation_checkpoint_interval": 1, "use_reentrant": False}
FP16 = {"enabled": True, "initial_scale_power": 12}
CASES: dict[str, tuple[Callable[[PipelineEngine], Any], dict[str, Any]]] = {
    "images": (IMAGES, on_images()),
    "images, checkpointed": (IMAGES, on_images(pipeline=CHECKPOINTED)),
    # by parameters, DeepSpeed 0.19.8's own module fails to seed: it adds a NumPy integer to the seed
    "seeded layers": (
        IMAGES, on_images(module={"seed_layers": True, "base_seed": 7, "partition_method": "uniform"}),
    ),
    "a topology with the data axis first": (
        IMAGES, on_images(stages=None, module={"topology": ProcessTopology(["data", "pipe"], [1, 2])}),
    ),
    "decoders by type": (TEXT, {"module": {"partition_method": "type:DecoderLayer"}, "scheduler": engines.WARMUP}),
    "tied layers": (TEXT, {"layers": tied_layers}),
    "data parallel": (
        IMAGES, on_images(stages=None, gradient_clipping=0.1, module={"topology": PipeDataParallelTopology(1, 2)}),
    ),
    "bf16, clipped": (TEXT, {"bf16": {"enabled": True}, "gradient_clipping": 0.1}),
    "fp16 and ZeRO 1": (TEXT, {"fp16": FP16, **engines.ZERO1, "pipeline": CHECKPOINTED}),
    "labels in a dict": (
        functools.partial(train_and_evaluate, data=as_dicts(image_batches(3))), on_images(loss_fn=loss_of_dict),
    ),
    "an integer, a tensor without dimensions, no label": (
        functools.partial(train_and_evaluate, data=labelled(3, torch.tensor(0.25), None)),
        on_images(loss_fn=loss_of_number),
    ),
    "no labels and no loss function": (
        lambda engine: vars(engines.train(engine, labelled(None, None, None))),
        on_images(layers=own_loss_layers, loss_fn=None),
    ),
    "images of different sizes": (
        functools.partial(train_and_evaluate, data=images_of_sizes(3)),
        on_images(layers=sizeless_layers, module={"dynamic_shape": True, "partition_method": "uniform"}),
    ),
    "checkpoints in parts": (partitioned, {"pipeline": CHECKPOINTED}),
    "checkpoint functions": (checkpoint_functions, on_images()),
    "sizes": (change_sizes, {}),
    "data sources": (data_sources, {}),
    "questions and errors": (what_users_ask, {}),
}  # fmt: skip


def job_case(name: str) -> tuple[float, Any]:
    job, options = CASES[name]
    options = {"layers": engines.fp32_layers, "loss_fn": loss_of_logits, **options}
    with mock.patch.object(GradientSums, "add", _add_as_autograd):
        stock, ours = engines.both(job, terapipe=WHOLE, **options)
    return engines.error_of(ours, stock), stock


def _add_as_autograd(self: GradientSums, weight: Tensor, rows: Tensor, inputs: Tensor) -> None:
    """Add the product in autograd's order of factors: in bf16 a CPU rounds the other order to other bits."""
    if inputs.is_floating_point():
        self._total(weight).add_((inputs.t() @ rows).t())
    else:
        self._total(weight).add_(torch.ops.aten.embedding_dense_backward(rows, inputs, len(weight), -1, False))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_one_slice_is_bit_for_bit_the_stock_engine(name: str) -> None:
    for error, stock in rank_pool(2).run(job_case, name=name):
        assert error == 0.0
        assert stock is not None


def job_set_before(loss_fn: Any) -> float:
    with in_parts():
        options = {"loss_fn": loss_fn, "pipeline": CHECKPOINTED}
        stock, ours = engines.both(
            lambda engine: vars(engines.train(engine, engines.batches(1))), engines.fp32_layers, WHOLE, **options
        )
    return engines.error_of(ours, stock)


@pytest.mark.parametrize(("loss_fn", "limit"), [(loss_of_logits, 0.0), (gpt.gpt_loss, 1e-5)])  # bits, or fp32 rounding
def test_checkpoints_in_parts_may_be_set_before_the_engine_is_built(loss_fn: Any, limit: float) -> None:
    assert max(rank_pool(2).run(job_set_before, loss_fn=loss_fn)) <= limit


def job_dynamic_shapes_in_slices() -> dict[str, float]:
    """Lengths differ from batch to batch, and from micro-batch to micro-batch."""
    [longer], [shorter] = engines.batches(1), engines.batches(1, length=11, first_seed=7)
    data = [longer, shorter, [longer[0], shorter[1]]]
    stock, ours = engines.both(lambda engine: engines.train(engine, data), module={"dynamic_shape": True})
    return engines.differences(ours, stock)


def test_dynamic_shapes_with_slices() -> None:
    assert not engines.violations(rank_pool(2).run(job_dynamic_shapes_in_slices))


def job_refused_arguments(**arguments: Any) -> tuple[tuple[str, str], float]:
    with engines.engine_of(engines.fp32_layers(), WHOLE) as engine:
        refusal = engines.raised_by(lambda: engine.eval_batch(iter(engines.batches(1)[0]), **arguments))
        return refusal, float(engine.train_batch(iter(engines.batches(1)[0])))


SHORT: list[tuple[str, Any, list[int]]] = [
    *((schedule, 1, [engines.LENGTH]) for schedule in ("gpipe", "terapipe", "seq1f1b", "zb-h1")),
    ("seq1f1b", "auto", [engines.LENGTH]),
    ("seq1f1b", 5, [8, 4, 4, 4, 3]),
]


def job_short() -> list[tuple[dict[str, float], list[int]]]:
    found = []
    for schedule, slices, _ in SHORT:
        terapipe = {"enabled": True, "slices": slices, "schedule": schedule}
        with engines.engine_of(engines.gpt_layers(), terapipe, loss_fn=loss_of_logits) as engine:
            run = engines.train(engine, engines.batches(2))
            found.append(
                (engines.differences(run, engines.stock_run(stages=2)), list(engine.slice_plan(engines.LENGTH).lengths))
            )
    return found


def test_a_default_granularity_refuses_no_short_sequence_and_one_slice_has_the_bits_of_the_stock_engine() -> None:
    for (schedule, _, lengths), *ranks in zip(
        SHORT, *rank_pool(2).run(engines.with_few_rounds, job=job_short), strict=True
    ):
        assert [plan for _, plan in ranks] == [lengths] * 2
        assert not engines.violations([errors for errors, _ in ranks])
        if len(lengths) == 1 and schedule != "zb-h1":  # which sums weight gradients in another order
            assert [max(errors.values()) for errors, _ in ranks] == [0.0, 0.0], schedule


def job_slices_by_hand(has_images: bool, parted: bool) -> tuple[str, str]:
    options: dict[str, Any] = on_images() if has_images else {"layers": engines.fp32_layers}
    data = as_dicts(image_batches(1) if has_images else engines.batches(1))
    layers, unchecked = options.pop("layers")(), {**WHOLE, "verify": "off"}
    with engines.engine_of(layers, unchecked, **options | {"loss_fn": loss_of_dict}) as engine:
        engine.use_slice_plan(terapipe_ds.SlicePlan((1, 2) if has_images else (11, 12)))  # of the images' channels
        with mock.patch.object(ds_checkpointing, "PARTITION_ACTIVATIONS", parted):
            return engines.step_error(engine, data[0])[1], engines.raised_by(engine.compile)[1]


@pytest.mark.parametrize(("has_images", "parted", "message"), [
    (False, False, "labels of type dict cannot be cut"),
    (False, True, "partition_act"),
    (True, False, "layers that mix the tokens of a sequence"),
])  # fmt: skip
def test_slices_set_by_hand_are_not_deepspeeds_own_order(has_images: bool, parted: bool, message: str) -> None:
    for of_step, of_compile in rank_pool(2).run(job_slices_by_hand, has_images=has_images, parted=parted):
        assert message in of_step and "with engine.compile() layers are compiled" in of_compile


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({"reduce_output": "sum"}, "reduction type sum not"), ({"num_micro_batches": 0}, "num_micro_batches=0): give at")],
)
def test_impossible_evaluations_are_refused_on_every_stage(arguments: dict[str, Any], says: str) -> None:
    """By DeepSpeed's own engine on the last stage alone, and the others wait for it."""
    for (_, text), _ in rank_pool(2).run(job_refused_arguments, **arguments):
        assert says in text


# -- the plugin is registered, and the config has no section -----------------------------------------------------------


def names_of_deepspeed() -> dict[tuple[str, str], int]:
    """Return the object behind every name in every module and class of DeepSpeed."""
    found = {}
    for module_name, module in sorted(sys.modules.items()):
        if module_name.partition(".")[0] != "deepspeed" or module is None:
            continue
        owners = {module_name: module}
        for name, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == module_name:
                owners[f"{module_name}.{name}"] = value
        found.update({(owner, name): id(value) for owner, each in owners.items() for name, value in vars(each).items()})
    return found


def test_registration_rebinds_four_names_and_five_methods_and_nothing_else() -> None:
    """So that an engine without a section, which is DeepSpeed's own class, runs DeepSpeed's code alone. One method
    writes down by which partition method a module was cut; another takes the batch sizes of a strategy."""
    terapipe_ds.register()  # loads what it needs
    terapipe_ds.unregister()
    gc.disable()  # an id may not be given to another object
    try:
        before = names_of_deepspeed()
        terapipe_ds.register()
        during = names_of_deepspeed()
        terapipe_ds.unregister()
        after = names_of_deepspeed()
    finally:
        gc.enable()
    changed = {key for key in before.keys() | during.keys() if before.get(key) != during.get(key)}
    assert changed == {
        ("deepspeed", "PipelineEngine"),
        ("deepspeed", "DualPipeVEngine"),
        ("deepspeed.runtime.config.DeepSpeedConfig", "_configure_train_batch_size"),
        ("deepspeed.runtime.config.DeepSpeedConfig", "_initialize_params"),
        ("deepspeed.runtime.engine.DeepSpeedEngine", "__init__"),
        ("deepspeed.comm.torch", "build_shm_op"),
        ("deepspeed.runtime.pipe.module", "PipelineParallelGrid"),
        ("deepspeed.runtime.pipe.module.PipelineModule", "_partition_layers"),
        ("deepspeed.runtime.pipe.module.PipelineModule", "_index_tied_modules"),
    }
    assert after == before
    assert len(before) > 5000
