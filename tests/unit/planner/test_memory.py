"""The memory model: against what torch saves for the backward, against the slice store, and worked by hand."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from terapipe_ds.attention import ActiveSlice, SliceStore, push_slice, sliced_attention
from terapipe_ds.costs.model_sizes import ModelSize, model_size
from terapipe_ds.models import gpt
from terapipe_ds.models.gpt import GPTConfig, gpt_loss
from terapipe_ds.plan import SlicePlan
from terapipe_ds.planner.errors import PlannerError
from terapipe_ds.planner.memory import MemoryModel, PartMemory
from terapipe_ds.runtime.layers.weight_gradients import accumulate_in_products
from terapipe_ds.runtime.profiling.all_parts import store_rates
from terapipe_ds.runtime.profiling.memory_peak import MemoryPeak
from terapipe_ds.schedule import build
from terapipe_ds.schedule.proofs import OUTSTANDING_SENDS
from terapipe_ds.schedule.schedule import RECEIVE_AHEAD
from terapipe_ds.simulator import Replay, ScheduleShape, replay_few
from terapipe_ds.simulator.peak_memory import bytes_of_stage

# --- against torch

ROWS, TOKENS, LENGTH = 2, 48, 144
BASE: dict[str, Any] = {"hidden_size": 128, "num_heads": 8, "ffn_size": 344, "vocab_size": 600, "num_layers": 1}
LLAMA: dict[str, Any] = {"num_kv_heads": 2}
GPT3: dict[str, Any] = {"bias": True, "gated_mlp": False, "positions": "learned"}
FAMILIES = pytest.mark.parametrize("family", [LLAMA, GPT3], ids=["llama", "gpt3"])
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])


def config_and_size(family: dict[str, Any], dtype: str, num_layers: int = 1) -> tuple[GPTConfig, ModelSize]:
    config = GPTConfig(**{**BASE, **family, "num_layers": num_layers}, max_sequence_length=LENGTH, dtype=dtype)
    size = ModelSize(
        "test", num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.ffn_size,
        config.vocab_size, LENGTH, config.gated_mlp, config.bias, config.tied_embedding, config.positions,
    )  # fmt: skip
    return config, size


def saved_bytes(run: Callable[[], Tensor], parameters: Iterable[nn.Parameter], received: Tensor | None = None) -> int:
    """Bytes that ``run`` saves for its backward, without parameters and tables, and of what the engine ``received``."""
    known = {p.untyped_storage().data_ptr() for p in parameters}
    given = [] if received is None else [received.untyped_storage()]
    storages = {storage.data_ptr(): storage.nbytes() for storage in given}
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and not tensor.is_complex():  # complex: the rotary table of all layers
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # or its address could come again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storages.values())


def middle_slice(store: SliceStore, layers: list[nn.Module], x: Tensor) -> ActiveSlice:
    """Run slice 0, so that the slice that is measured has a prefix."""
    with push_slice(ActiveSlice(0, TOKENS, LENGTH, store=store)), torch.no_grad():
        for layer in layers:
            layer(x)
    return ActiveSlice(TOKENS, 2 * TOKENS, LENGTH, slice_id=1, store=store)


def leaf(config: GPTConfig) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(ROWS, TOKENS, config.hidden_size, dtype=config.torch_dtype, requires_grad=True)


def middle_part(family: dict[str, Any], dtype: str, **options: Any) -> PartMemory:
    """The second of three parts with one layer each."""
    _, size = config_and_size(family, dtype, num_layers=3)
    model = MemoryModel.of_model(size, num_stages=3, dtype=dtype, micro_batch=ROWS, fused_norm=False, **options)
    return model.parts[1]


@FAMILIES
@DTYPES
@pytest.mark.parametrize("whole", [False, True], ids=["slice", "whole"])
def test_a_layer_saves_what_the_model_says(family: dict[str, Any], dtype: str, whole: bool) -> None:
    config, _ = config_and_size(family, dtype)
    layer, x, store = gpt.DecoderLayer(config, 0), leaf(config), SliceStore()
    with push_slice(ActiveSlice(0, TOKENS, TOKENS, store=store) if whole else middle_slice(store, [layer], x)):
        saved = saved_bytes(lambda: layer(x), layer.parameters(), received=x)
    part = middle_part(family, dtype)
    assert part.whole_bytes_per_token is not None
    rate = part.slice_bytes_per_token + (part.whole_bytes_per_token if whole else 0)
    # the engine keeps the output that it sent as well
    assert rate * TOKENS == pytest.approx(saved + x.nbytes, rel=0.02)


@FAMILIES
@DTYPES
def test_the_last_part_saves_what_the_model_says(family: dict[str, Any], dtype: str) -> None:
    config, size = config_and_size(family, dtype)
    layers = [gpt.DecoderLayer(config, 0), gpt.FinalNorm(config), gpt.LMHead(config)]
    x, store = leaf(config), SliceStore()
    labels = torch.randint(0, config.vocab_size, (ROWS, TOKENS))

    def run() -> Tensor:
        y = x
        for layer in layers:
            y = layer(y)
        return gpt_loss(y, labels)

    with push_slice(middle_slice(store, layers, x)):
        kept = saved_bytes(run, (p for layer in layers for p in layer.parameters()), received=x)
    options: dict[str, Any] = {"dtype": dtype, "micro_batch": ROWS, "fused_norm": False}
    model = MemoryModel.of_model(size, num_stages=2, layers_per_part=(0, 1), fused_loss=False, **options)
    assert model.slice_bytes(1, TOKENS, TOKENS) == pytest.approx(kept, rel=0.02)


@FAMILIES
def test_checkpointing_keeps_the_input_and_recomputes_one_layer(family: dict[str, Any]) -> None:
    config, _ = config_and_size(family, "float32")
    layer, x, store = gpt.DecoderLayer(config, 0), leaf(config), SliceStore()
    with push_slice(middle_slice(store, [layer], x)):
        whole = saved_bytes(lambda: layer(x), layer.parameters())
    store.reset()
    with push_slice(middle_slice(store, [layer], x)):
        inputs = saved_bytes(lambda: checkpoint(layer, x, use_reentrant=False), layer.parameters(), received=x)
    part = middle_part(family, "float32", activation_checkpointing=True)
    plain = middle_part(family, "float32")
    assert part.slice_bytes_per_token * TOKENS == pytest.approx(inputs + x.nbytes, rel=0.02)
    assert (part.whole_bytes_per_token, part.working_whole_bytes_per_token) == (0, plain.whole_bytes_per_token)
    assert (part.working_bytes_per_token - plain.working_bytes_per_token) * TOKENS == pytest.approx(whole, rel=0.05)


@FAMILIES
def test_the_layer_that_runs_again_has_factors_of_its_w(family: dict[str, Any]) -> None:
    """At the end of a split B the other layer has left its factors; the last one still holds its own in its tensors."""
    config, size = config_and_size(family, "float32", num_layers=6)
    layers = nn.Sequential(*[gpt.DecoderLayer(config, index) for index in range(2)])
    gradients, x = accumulate_in_products(layers, None), leaf(config)
    for weight in layers.parameters():
        weight.grad = torch.zeros_like(weight)
    key, active = (0, 0, 0), ActiveSlice(0, TOKENS, TOKENS, store=SliceStore())
    with push_slice(active):
        y = x
        gradients.open_batch([key])
        for layer in layers:
            y = checkpoint(layer, y, use_reentrant=True)
    with push_slice(active.replace(mode="recompute")), MemoryPeak() as peak, gradients.deferred(key):
        y.sum().backward()
    options: dict[str, Any] = {"num_stages": 3, "dtype": "float32", "micro_batch": ROWS, "fused_norm": False}
    memory = MemoryModel.of_model(size, **options, activation_checkpointing=True)
    messages = (1 + 2 * RECEIVE_AHEAD) * x.nbytes  # of links, which a layer alone does not have
    running = memory.working_bytes(1, TOKENS, 0, True) - memory.parts[1].working_bytes - messages
    predicted = memory.weight_bytes(1, TOKENS, 0) - memory.factor_bytes(1, TOKENS) + running - x.nbytes
    assert peak.grown_bytes <= predicted < 1.25 * peak.grown_bytes


@FAMILIES
def test_products_of_several_w_copy_the_factors_of_one_weight(family: dict[str, Any]) -> None:
    config, size = config_and_size(family, "float32")
    memory = MemoryModel.of_model(size, num_stages=1, dtype="float32", micro_batch=ROWS)
    layers = gpt.DecoderLayer(config, 0).modules()
    copied = 4 * ROWS * max(sum(layer.weight.shape) for layer in layers if isinstance(layer, nn.Linear))
    needed = memory.product_bytes(0, (1, 0), LENGTH, is_split=True) + memory.working_bytes(0, 1, 0, False)
    assert needed == memory.parts[0].working_bytes + copied * LENGTH
    assert memory.product_bytes(0, (1, 0), LENGTH) == 0, "in fp32 no other products join"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_slice_store_holds_what_the_model_says(dtype: str) -> None:
    config, size = config_and_size(LLAMA, dtype, num_layers=2)
    layers = [gpt.DecoderLayer(config, index) for index in range(2)]
    store, plan, outputs = SliceStore(), SlicePlan((48, 60, 36)), []
    for slice_id, (start, stop) in enumerate(plan.spans()):
        with push_slice(ActiveSlice(start, stop, LENGTH, slice_id=slice_id, store=store)):
            y = torch.ones(ROWS, stop - start, config.hidden_size, dtype=config.torch_dtype, requires_grad=True)
            for layer in layers:
                y = layer(y)
            outputs.append(y)
    model = MemoryModel.of_model(size, num_stages=1, dtype=dtype, micro_batch=ROWS)
    assert store.pool.live_bytes == model.store_bytes(0, LENGTH)
    for slice_id, (start, stop) in reversed(list(enumerate(plan.spans()))):
        with push_slice(ActiveSlice(start, stop, LENGTH, slice_id=slice_id, mode="recompute", store=store)):
            outputs[slice_id].sum().backward()
    assert store.pool.peak_bytes == model.store_bytes(0, LENGTH) + model.store_grad_bytes(0, LENGTH, 60)


@pytest.mark.parametrize("lengths", [(16,) * 9, (60, 48, 36), (30, 50, 64), (1, 100, 43)], ids=str)
@pytest.mark.parametrize("windows", [(None, 17), (17, 17), (10, None, 40)], ids=str)
def test_a_window_limits_what_the_store_keeps(windows: tuple[int | None, ...], lengths: tuple[int, ...]) -> None:
    """Predicted peaks are at least the measured ones, and near them."""
    measured, rates = {}, {}
    for mode in ("train", "eval"):
        store, outs, plan = SliceStore(), [], SlicePlan(lengths)
        slices = [ActiveSlice(*span, LENGTH, slice_id=i, mode=mode, store=store) for i, span in enumerate(plan.spans())]
        for active in slices:
            q, k, v = torch.ones(3, ROWS, 2, active.num_tokens, 4, requires_grad=mode == "train")
            with push_slice(active):
                layers = [sliced_attention(q, k, v, layer, window=window) for layer, window in enumerate(windows)]
            outs.append(torch.stack(layers))
        for active in reversed(slices) if mode == "train" else ():
            with push_slice(active.replace(mode="recompute")):
                outs.pop().sum().backward()
        rates[mode] = store_rates(store.layers_of(0, 0), LENGTH)
        store.release(0, 0)
        measured[mode] = store.pool.peak_bytes
    memory, largest = MemoryModel((PartMemory(0, 0, **rates["train"]),)), max(lengths)
    predicted = {
        "train": memory.store_bytes(0, LENGTH) + memory.store_grad_bytes(0, LENGTH, largest),
        "eval": memory.evaluation_bytes(0, LENGTH, largest),
    }
    for mode, peak in predicted.items():
        assert measured[mode] <= peak <= 1.15 * measured[mode]
    everything = memory.store_bytes(0, LENGTH)
    assert predicted["eval"] < everything and predicted["train"] < 2 * everything
    if None not in windows:
        assert measured["eval"] < 2 * (max(w or 0 for w in windows) + largest) * everything / LENGTH


@FAMILIES
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_layers(family: dict[str, Any], tied: bool) -> None:
    """fp32 without an optimizer's states: 4 + 4 bytes per parameter; a tied matrix stands on both ends."""
    config, size = config_and_size({**family, "tied_embedding": tied}, "float32", num_layers=2)
    ends = [[gpt.TokenEmbedding(config), gpt.DecoderLayer(config, 0)], [gpt.DecoderLayer(config, 1)]]
    if config.positions == "learned":
        ends[0].append(gpt.PositionEmbedding(config))
    ends[1] += [gpt.FinalNorm(config), gpt.TokenEmbedding(config) if tied else gpt.LMHead(config)]
    counts = [sum(p.numel() for layer in part for p in layer.parameters()) for part in ends]
    model = MemoryModel.of_model(size, num_stages=2, dtype="float32", micro_batch=1, optimizer="sgd")
    assert [model.static_bytes(part_id) for part_id in range(2)] == [4 * count for count in counts]
    assert [model.gradient_bytes(part_id) for part_id in range(2)] == [4 * count for count in counts]


# --- worked by hand


@pytest.mark.parametrize(("options", "bytes_per_parameter"), [
    ({"dtype": "float32"}, 4 + 4 + 8),
    ({"dtype": "float32", "zero_stage": 1, "data_parallel": 4}, 4 + 4 + 12 / 4),
    ({"dtype": "float64"}, 8 + 8 + 16),
    ({"dtype": "float16"}, 2 + 2 + 12),
    ({"dtype": "float16", "data_parallel": 4}, 2 + 2 + 12),
    ({"dtype": "float16", "zero_stage": 1, "data_parallel": 4}, 2 + 2 + 12 / 4),
    ({"dtype": "bfloat16"}, 2 + 2 + 12),  # DeepSpeed sums in bf16 without ZeRO, and knows no other dtype
    ({"dtype": "bfloat16", "zero_stage": 1}, 2 + 4 + 12),
    ({"dtype": "bfloat16", "zero_stage": 1, "gradient_dtype": "bfloat16"}, 2 + 2 + 12),
    ({"dtype": "bfloat16", "data_parallel": 4}, 2 + 2 + 12 / 4),
    # it adds each gradient to its sum, and drops it
    ({"dtype": "bfloat16", "zero_stage": 1, "offload_optimizer": True}, 2 + 4),
    ({"dtype": "float16", "zero_stage": 1, "offload_optimizer": True}, 2 + 2),
    ({"dtype": "float32", "optimizer": "sgd"}, 4 + 4),
])  # fmt: skip
def test_bytes_per_parameter(options: dict[str, Any], bytes_per_parameter: float) -> None:
    size = model_size("llama-2-7b")
    model = MemoryModel.of_model(size, num_stages=1, micro_batch=1, **options)
    both = model.static_bytes(0) + model.gradient_bytes(0)
    assert both == pytest.approx(size.num_parameters() * bytes_per_parameter, rel=1e-6)
    # DeepSpeed's engine drops the gradients of a plain optimizer with each step
    drops = options["dtype"] != "bfloat16" and "zero_stage" not in options
    item = {"float16": 2, "float32": 4, "float64": 8}.get(options["dtype"], 0)
    assert model.gradient_bytes(0) == (size.num_parameters() * item if drops else 0)


@pytest.mark.parametrize(("options", "bytes_per_parameter"), [
    ({"dtype": "float32"}, 4),  # a bucket of its reduction, also of one replica
    ({"dtype": "float32", "data_parallel": 4}, 4),
    ({"dtype": "float32", "zero_stage": 1, "data_parallel": 2}, 4 / 2),
    ({"dtype": "float16"}, 4 + 4),
    ({"dtype": "float16", "on_cpu": True}, 4),
    ({"dtype": "float16", "zero_stage": 1, "data_parallel": 2}, (2 + 4) / 2),
    ({"dtype": "float16", "zero_stage": 1, "offload_optimizer": True}, 0),
    ({"dtype": "bfloat16"}, 4),
    ({"dtype": "bfloat16", "data_parallel": 4}, 4 / 4),
    ({"dtype": "bfloat16", "zero_stage": 1, "data_parallel": 4}, 2),
    ({"dtype": "bfloat16", "zero_stage": 1, "gradient_dtype": "bfloat16", "data_parallel": 2}, (2 + 4) / 2),
])  # fmt: skip
def test_bytes_of_a_step(options: dict[str, Any], bytes_per_parameter: float) -> None:
    """As `tests/distributed/test_memory_peaks.py` measures them."""
    size = model_size("mini")
    model = MemoryModel.of_model(size, num_stages=1, micro_batch=1, **options)
    assert model.step_bytes(0) == pytest.approx(size.num_parameters() * bytes_per_parameter, rel=1e-6)


@pytest.mark.parametrize("options", [
    {"dtype": "float32", "data_parallel": 4}, {"dtype": "bfloat16", "zero_stage": 1, "data_parallel": 4},
])  # fmt: skip
def test_a_reduction_copies_one_bucket(options: dict[str, Any]) -> None:
    model = MemoryModel.of_model(model_size("llama-2-7b"), num_stages=1, micro_batch=1, **options)
    assert model.step_bytes(0) == {"float32": 4, "bfloat16": 2}[options["dtype"]] * 500_000_000


@pytest.mark.parametrize("tensor", [1, 4])
def test_an_offloaded_optimizer_keeps_buffers_on_the_device(tensor: int) -> None:
    """The largest gradient, its fp32 copy, a buffer of its size, and a bucket: of the embedding, or of gate and up."""
    size = model_size("llama-3-8b")
    options: dict[str, Any] = {"num_stages": 3, "dtype": "bfloat16", "micro_batch": 1, "tensor_parallel": tensor}
    options["zero_stage"] = 1
    away, there = (MemoryModel.of_model(size, **options, offload_optimizer=is_away).parts for is_away in (True, False))
    table = there[1].working_bytes
    for part, rows in zip(away, (size.vocab_size, 2 * size.ffn_size, size.vocab_size), strict=True):
        assert part.working_bytes == rows * size.hidden_size // tensor * (2 + 4 + 2) + 50_000_000 * 4 + table


def test_tensor_parallelism_divides_all_but_norms_and_residuals() -> None:
    size = model_size("llama-3-8b")
    options: dict[str, Any] = {"num_stages": 4, "dtype": "bfloat16", "micro_batch": 1}
    one, eight, sequence = (
        MemoryModel.of_model(size, **options, **more).parts[1]
        for more in ({}, {"tensor_parallel": 8}, {"tensor_parallel": 8, "sequence_parallel": True})
    )
    assert eight.store_bytes_per_token == one.store_bytes_per_token / 8 == 8 * 2 * 1024 * 2 / 8
    assert eight.static_bytes == pytest.approx(one.static_bytes / 8, rel=1e-3)
    assert one.slice_bytes_per_token / 8 < eight.slice_bytes_per_token < one.slice_bytes_per_token
    assert sequence.slice_bytes_per_token == pytest.approx(one.slice_bytes_per_token / 8, rel=0.01)


@pytest.mark.parametrize(("changes", "message"), [
    ({"dtype": "int8"}, "dtype = 'int8': give one of float64, float32"),
    ({"optimizer": "adamm"}, "optimizer = 'adamm'"),
    ({"zero_stage": 2}, "zero_stage = 2: give one of 0, 1"),
    ({"micro_batch": 0}, "micro_batch = 0: give an integer >= 1"),
    ({"num_stages": 9}, "num_stages = 9: mini has 8 layers"),
    ({"tensor_parallel": 3}, "tensor_parallel = 3: num_heads = 8 of mini does not divide"),
    ({"layers_per_part": (3, 4)}, r"layers_per_part = \[3, 4\]: give 2 integers that add up to the 8 layers"),
])  # fmt: skip
def test_impossible_setups(changes: dict[str, Any], message: str) -> None:
    options = {"num_stages": 2, "dtype": "float32", "micro_batch": 1} | changes
    with pytest.raises(PlannerError, match=message):
        MemoryModel.of_model(model_size("mini"), **options)
    with pytest.raises(PlannerError, match="a memory model without parts"):
        MemoryModel(())
    for wrong in (-1, float("nan"), "3", True):
        with pytest.raises(PlannerError, match="slice_bytes_per_token"):
            PartMemory(0, wrong)  # type: ignore[arg-type]


# --- the peak of a schedule


@pytest.mark.parametrize(("schedule", "stages", "m", "lengths", "part", "peaks"), [
    # Two stages: F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0 on stage 0. Most at B0.1: both micro-batches are live,
    # 2 * (50 + 500), gradients of the store 5000, working 2 + 1.5 (rounded up: 4). On stage 1 one is live.
    ("1f1b", 2, 2, (3, 2), PartMemory(7, 10, 100, 1000, 0, 1, 0.5), (7 + 1100 + 5004, 7 + 550 + 5004)),
    # Gradients of parameters come with the first backward. B0.1 begins with 50 and ends with 30 and the gradients:
    # with 15 bytes of them the begin has most, with 25 the end. B1.1 begins with 50 and the gradients of B0.1.
    ("1f1b", 1, 1, (3, 2), PartMemory(7, 10, gradient_bytes=15), (7 + 50,)),
    ("1f1b", 1, 1, (3, 2), PartMemory(7, 10, gradient_bytes=25), (7 + 55,)),
    ("1f1b", 1, 2, (3, 2), PartMemory(7, 10, gradient_bytes=25), (7 + 75,)),
    # The optimizer steps when no slice is live, beside the gradients and the store, which is lent again.
    ("1f1b", 1, 1, (3, 2), PartMemory(7, 10, gradient_bytes=25, step_bytes=20), (7 + 55,)),
    ("1f1b", 1, 1, (3, 2), PartMemory(7, 10, gradient_bytes=25, step_bytes=90), (7 + 25 + 90,)),
    ("terapipe", 1, 2, (3, 2), PartMemory(7, 10, 100, 1000, step_bytes=900), (7 + 2 * 500 + 5000 + 900,)),
    ("terapipe", 1, 2, (5,), PartMemory(7, 10, 100, whole_bytes_per_token=40, step_bytes=900), (7 + 900,)),
    # A sequence in one slice does not use the store.
    ("terapipe", 1, 2, (5,), PartMemory(7, 10, 100, 1000, whole_bytes_per_token=40), (7 + 2 * 5 * 50,)),
    ("terapipe", 1, 2, (3, 2), PartMemory(7, 10, 100, 1000, whole_bytes_per_token=40), (7 + 2 * 5 * 110 + 5000,)),
    # Most at the last W: the factors of all five tokens wait, and copies of one weight's take the place of what a B
    # works on.
    ("seq1f1b-zb", 1, 1, (3, 2), PartMemory(7, 6, weight_bytes_per_token=6, joined_tokens=9, working_bytes=1,
     working_factor_bytes_per_token=2, working_copied_bytes_per_token=4), (7 + 5 * 6 + 1 + 5 * 4,)),
])  # fmt: skip
def test_peaks_worked_by_hand(
    schedule: str, stages: int, m: int, lengths: tuple[int, ...], part: PartMemory, peaks: tuple[int, ...]
) -> None:
    replay = Replay(build(schedule, stages, m, len(lengths)))
    assert replay.peak_bytes(SlicePlan(lengths), MemoryModel((part,) * stages)) == peaks


@pytest.mark.parametrize("outstanding", [1, 2, 3])
def test_messages_count_up_to_their_budget(outstanding: int) -> None:
    """Stage 0 answers no message of a backward, so that only the budget tells stage 1 that some have arrived."""
    memory = MemoryModel((PartMemory(0, 0, working_sent_bytes_per_token=100),) * 2)
    spans = [[(i, i + 1) for i in range(5)]]
    assert max(bytes_of_stage(build("terapipe", 2, 1, 5), 1, spans, memory, outstanding)) == 100 * outstanding


def fill_drain_peak_bytes(
    plan: SlicePlan, memory: MemoryModel, num_stages: int, num_micro_batches: int
) -> tuple[int, ...]:
    """Return the peaks where all forwards come before all backwards, without a walk.

    All slices are live, but of the first micro-batch in backward only the slices up to the running one. No slice sends
    back more than it keeps, so that later micro-batches need less.
    """
    peaks = []
    spans = list(zip(plan.lengths, plan.starts, strict=True))
    for part_id in range(num_stages):
        slices = [memory.slice_bytes(part_id, *span) for span in spans]
        is_alone = num_micro_batches * plan.num_slices == 1  # nothing is held while the message of the last B goes
        sent = [0 if part_id == 0 or is_alone else memory.sent_bytes(part_id, tokens) for tokens in plan.lengths]
        # gradients stay with the sender until the other end has answered, some sends later
        unheard = [sum(sent[after : after + OUTSTANDING_SENDS]) for after in range(1, plan.num_slices + 1)]
        parameters = memory.gradient_bytes(part_id)
        live = [total + more + parameters for total, more in zip(itertools.accumulate(slices), unheard, strict=True)]
        live[-1] += sent[-1] - slices[-1]  # gradients come while the slice's kept tensors go
        # factors of weight gradients wait for the slices that join their products
        for *group, closing in memory.weight_groups(part_id, plan.lengths):
            waiting = 0
            for slice_id in group:
                own = memory.joined_bytes(part_id, plan.lengths[slice_id])
                is_first = slice_id == plan.num_slices - 1
                live[slice_id] += waiting + (own if is_first else max(0, own + sent[slice_id] - slices[slice_id]))
                waiting += own
            group_tokens = sum(plan.lengths[slice_id] for slice_id in [*group, closing])
            live[closing] += waiting + (memory.product_bytes(part_id, spans[closing], group_tokens) if group else 0)
        # one slice keeps its keys and values itself; several keep them in the store
        if plan.num_slices == 1:
            whole = memory.whole_bytes(part_id, plan.sequence_length)
            stores = num_micro_batches * whole
            live[-1] -= whole
        else:  # keys and values of all micro-batches, and their gradients for one micro-batch
            stores = num_micro_batches * memory.store_bytes(part_id, plan.sequence_length)
            stores += memory.store_grad_bytes(part_id, plan.sequence_length, max(plan.lengths))
        live[-1] = max(sum(slices), live[-1])
        working = (memory.working_bytes(part_id, *span, plan.num_slices == 1) for span in spans)
        running = max(total + more for total, more in zip(live, working, strict=True))
        lasting = memory.process_bytes + memory.static_bytes(part_id)
        # the pool keeps the memory of the store; a whole sequence uses none of it
        step = parameters + memory.step_bytes(part_id) + (0 if plan.num_slices == 1 else stores)
        peaks.append(lasting + max(step, stores + (num_micro_batches - 1) * sum(slices) + running))
    return tuple(peaks)


RATES = st.integers(0, 50)
PARTS = st.builds(PartMemory, *[RATES] * 7, st.integers(0, 300), st.none() | RATES).flatmap(
    lambda part: st.builds(
        dataclasses.replace,
        st.just(part),
        working_sent_bytes_per_token=st.integers(0, int(part.slice_bytes_per_token)),
        joined_bytes_per_token=RATES,
        joined_tokens=st.integers(0, 20),
    )
)


@given(
    st.sampled_from(["gpipe", "terapipe"]),
    st.lists(PARTS, min_size=1, max_size=4),
    st.integers(1, 6),
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
)
def test_the_closed_form_of_all_forwards_before_all_backwards(
    name: str, parts: list[PartMemory], num_micro_batches: int, lengths: list[int]
) -> None:
    model, plan = MemoryModel(tuple(parts), process_bytes=1000), SlicePlan(tuple(lengths))

    def replay_of(count: int) -> Replay:
        return Replay(build(name, len(parts), count, len(lengths)))

    # a walk over the whole batch, and one over the few micro-batches that a search takes
    walked = replay_of(num_micro_batches).peak_bytes(plan, model)
    assert fill_drain_peak_bytes(plan, model, len(parts), num_micro_batches) == walked
    shape = ScheduleShape(name, len(parts), len(lengths))
    assert replay_few(shape, num_micro_batches, replay_of, plan, memory=model).peak_bytes == walked


@pytest.mark.parametrize("schedule", ["seq1f1b", "zbv", "chimera"])
def test_each_stage_counts_its_process_once(schedule: str) -> None:
    order, plan = build(schedule, 2, 2, 2, chunks_per_stage=1 + (schedule != "seq1f1b")), SlicePlan((3, 2))
    memory = MemoryModel((PartMemory(7, 10, 100, 1000),) * 4)
    peaks = [Replay(order).peak_bytes(plan, dataclasses.replace(memory, process_bytes=more)) for more in (0, 500)]
    assert peaks[1] == tuple(peak + 500 for peak in peaks[0])
    assert dataclasses.replace(memory, process_bytes=500).only("context_and_nccl").process_bytes == 500


@pytest.mark.parametrize(("schedule", "parts", "stage_id", "layers", "has_first", "has_last"), [
    ("zbv", 4, 0, 12, True, True), ("zbv", 4, 1, 12, False, False), ("chimera", 2, 1, 24, True, True),
    ("interleaved", 4, 0, 12, True, False), ("interleaved", 4, 1, 12, False, True),
])  # fmt: skip
def test_a_stage_with_both_ends_has_a_tied_matrix_once(
    schedule: str, parts: int, stage_id: int, layers: int, has_first: bool, has_last: bool
) -> None:
    """Counted by hand: 16 bytes per parameter in bfloat16, and 4 more while the optimizer steps, which copies sums."""
    size, order = model_size("gpt3-1b"), build(schedule, 2, 4, 1, chunks_per_stage=2)
    memory = MemoryModel.of_model(size, num_stages=parts, dtype="bfloat16", micro_batch=1)
    count = layers * size.layer_parameters() + (has_first or has_last) * size.vocab_size * size.hidden_size
    count += has_first * size.max_sequence_length * size.hidden_size + has_last * size.norm_parameters()
    first, *_, step = bytes_of_stage(order, stage_id, [[(0, 64)]] * 4, memory, 8)
    assert (first, step) == (16 * count, (16 + 4) * count)


def test_a_slice_counts_the_states_that_it_has_read() -> None:
    """The first slice has none, nor has a sequence in one slice; a part may have a share of a state after a cut."""
    memory = MemoryModel((PartMemory(0, slice_bytes_per_token=2, carried_bytes_per_slice=10.5),))
    assert [memory.slice_bytes(0, 4, prefix) for prefix in (0, 1, 8)] == [8, 19, 19]
    replay = Replay.of(build("gpipe", 1, 2, 3))
    assert replay.peak_bytes(SlicePlan((4, 4, 4)), memory) == (2 * (8 + 19 + 19),)
