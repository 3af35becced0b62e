"""Transformer Engine's linear layers, by stand-ins with its names and signatures: W, and products in fp8."""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

pytest.importorskip("megatron.core")

from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from megatron.core.transformer import ModuleSpec, TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from terapipe_ds.attention import ActiveSlice, push_slice
from terapipe_ds.models.megatron import layers, linears, refusals
from terapipe_ds.models.megatron.layers import MegatronLayer
from terapipe_ds.models.megatron.linears import split_backwards
from terapipe_ds.models.megatron.module import MegatronGPT
from terapipe_ds.models.megatron.refusals import MegatronConfigError, check_config
from terapipe_ds.runtime.engine.refused_calls import problem_of_split
from terapipe_ds.runtime.layers.weight_gradients import accumulate_in_products
from terapipe_ds.runtime.layout.sequence_axis import problem_of_lengths
from tests.transformer_engine_stand_in import BlockScaling, Float8BlockScaling, fp8_autocast, transformer_engine
from tests.unit.runtime.layers.split_cases import Run, unit

UNITS = ((0, 0, 1), (0, 0, 0))
TOKENS, ROWS, IN, OUT = 5, 2, 6, 4


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install the stand-in, and give this process a group of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with transformer_engine() as module:
        monkeypatch.setattr(linears, "transformer_engine", module)
        yield module
    dist.destroy_process_group()


def config(**changes: Any) -> TransformerConfig:
    options = {"num_layers": 2, "hidden_size": IN, "num_attention_heads": 1, "params_dtype": torch.float64}
    return TransformerConfig(**{**options, "use_cpu_initialization": True, **changes})


class Layers(nn.Module):
    """Norm and column-parallel, column-parallel, row-parallel, as in Megatron's blocks."""

    def __init__(self, engine: Any, bias: bool = True, skip: bool = False, **changes: Any) -> None:
        super().__init__()
        init = {"config": config(**changes), "init_method": nn.init.normal_, "tp_group": dist.group.WORLD}
        init |= {"bias": bias, "is_expert": False}
        self.first = engine.TELayerNormColumnParallelLinear(IN, OUT, gather_output=False, skip_bias_add=False, **init)
        self.up = engine.TEColumnParallelLinear(OUT, OUT, gather_output=False, skip_bias_add=False, **init)
        self.down = engine.TERowParallelLinear(OUT, IN, input_is_parallel=True, skip_bias_add=skip, **init)

    def defer_weight_gradients(self, gradients: Any) -> None:
        split_backwards(self, gradients)

    def forward(self, hidden: Tensor) -> Tensor:
        out, bias = self.down(torch.tanh(self.up(torch.tanh(self.first(hidden)[0]))[0]))
        return out if bias is None else out + bias


def by_torch(plain: Layers, hidden: Tensor) -> Tensor:
    first = plain.first
    gamma = first.layer_norm_weight + (1 if first.zero_centered_gamma else 0)
    centred = hidden if first.layer_norm_bias is None else hidden - hidden.mean(-1, keepdim=True)
    x = centred / (centred.square().mean(-1, keepdim=True) + first.eps).sqrt() * gamma
    x = x if first.layer_norm_bias is None else x + first.layer_norm_bias
    for layer in (first, plain.up, plain.down):
        x = F.linear(x, layer.weight, layer.bias if layer.use_bias else None)
        x = x if layer is plain.down else torch.tanh(x)
    return x


@pytest.mark.parametrize("optimizer", [None, DeepSpeedOptimizer()], ids=["plain", "watched"])
@pytest.mark.parametrize("changes", [
    {}, {"bias": False, "normalization": "RMSNorm"}, {"skip": True, "layernorm_zero_centered_gamma": True},
    {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": True},
], ids=str)  # fmt: skip
def test_b_has_all_but_the_weights_and_w_these(changes: dict[str, Any], optimizer: Any, engine: Any) -> None:
    torch.manual_seed(0)
    run = Run(Layers(engine, **changes), (TOKENS, ROWS, IN), UNITS, optimizer, by_torch, shared=dist.group.WORLD)
    run.backward(whole=optimizer is None)
    assert run.deferred() == {"first.weight", "up.weight", "down.weight"}
    assert run.weights() == [3, 3]
    run.assert_same()
    assert not run.layers.up.calls  # of Transformer Engine's own forward


@pytest.mark.parametrize("is_whole", [False, True])
def test_slices_join_their_weight_gradients_without_a_split(is_whole: bool, engine: Any) -> None:
    torch.manual_seed(0)
    run = Run(Layers(engine), (TOKENS, ROWS, IN), UNITS, None, by_torch, shared=dist.group.WORLD)
    run.gradients.open_batch((), [UNITS])
    left = []
    for which in UNITS:
        mine, theirs = (run.inputs[which].clone().requires_grad_() for _ in range(2))
        active = ActiveSlice(0, TOKENS, (1 if is_whole else 2) * TOKENS, slice_id=which[2])
        with push_slice(active):
            loss = run.layers(mine).square().sum()
            with run.gradients.deferred(which):
                loss.backward()
        left.append(run.gradients.compute(which, contextlib.nullcontext))
        by_torch(run.plain, theirs).square().sum().backward()
    run.assert_same()
    # a whole sequence has one gradient anyway: by Transformer Engine's kernels
    assert left == ([0, 0] if is_whole else [3, 3]) and len(run.layers.up.calls) == (2 if is_whole else 0)


def test_other_backwards_are_transformer_engine_s(engine: Any) -> None:
    torch.manual_seed(0)
    run = Run(Layers(engine), (TOKENS, ROWS, IN), UNITS, None, by_torch, shared=dist.group.WORLD)
    run.gradients.open_batch(())
    hidden = run.inputs[UNITS[0]].clone().requires_grad_()
    with unit(*UNITS[0]):
        run.layers(hidden).square().sum().backward()
    by_torch(run.plain, hidden.detach().requires_grad_()).square().sum().backward()
    run.assert_same()
    assert len(run.layers.up.calls) == 1
    # fp8 has products of its own, which W does not know
    run.gradients.open_batch(UNITS)
    recipe = types.SimpleNamespace(product=F.linear)
    with unit(*UNITS[0]), run.gradients.deferred(UNITS[0]), fp8_autocast(fp8_recipe=recipe):
        run.layers(hidden).sum().backward()
    assert run.gradients.compute(UNITS[0], contextlib.nullcontext) == 0 and len(run.layers.up.calls) == 2


def test_layers_are_taken_by_the_last_engine_unless_their_products_are_their_own(engine: Any) -> None:
    layers, others = Layers(engine), Layers(engine)
    others.first.forward = own = lambda inputs: (inputs, None)
    others.up.te_quant_params = object()  # a precision of its own
    others.down.__class__ = type("Other", (type(others.down),), {"forward": own})
    for _ in range(2):
        last = [accumulate_in_products(each, None) for each in (layers, others)]
    assert layers.up.forward.args == (layers.up, last[0])
    assert others.first.forward is own and not {"forward"} & {*vars(others.up), *vars(others.down)}


@pytest.mark.parametrize("splits", [False, True])
def test_both_runs_of_a_checkpointed_layer_have_the_same_kernels(splits: bool, engine: Any) -> None:
    torch.manual_seed(0)
    run, which = Run(Layers(engine), (TOKENS, ROWS, IN), UNITS, None, by_torch, shared=dist.group.WORLD), UNITS[0]
    run.gradients.open_batch([which] if splits else ())
    mine, theirs = (run.inputs[which].clone().requires_grad_() for _ in range(2))
    with unit(*which):
        outputs = checkpoint(run.layers, mine, use_reentrant=True)
        with run.gradients.deferred(which):
            outputs.square().sum().backward()
    left = run.gradients.compute(which, contextlib.nullcontext)
    by_torch(run.plain, theirs).square().sum().backward()
    run.assert_same()
    assert (left, len(run.layers.up.calls)) == ((3, 0) if splits else (0, 2))
    with unit(*which) as active, push_slice(active.replace(mode="eval")), torch.no_grad():
        run.layers(mine)
    assert len(run.layers.up.calls) == (1 if splits else 3), "nothing runs again: the faster kernels"


# -- fp8 -------------------------------------------------------------------------------------------------------------

LENGTH, WIDTH = 384, 256


@pytest.mark.parametrize("recipe", [BlockScaling(), Float8BlockScaling()], ids=["mxfp8", "blockwise"])
@pytest.mark.parametrize(("lengths", "is_same"), [((128, 256), True), ((100, 284), False)])
def test_slices_of_whole_blocks_are_equal(
    recipe: BlockScaling, lengths: tuple[int, ...], is_same: bool, engine: Any
) -> None:
    """Of outputs and gradients of inputs always; of weight gradients up to the order of additions."""
    options = {"hidden_size": WIDTH, "params_dtype": torch.float64}
    layer = engine.TEColumnParallelLinear(
        WIDTH, WIDTH, config=config(**options), init_method=nn.init.normal_, gather_output=False, bias=False,
        skip_bias_add=False, is_expert=False, tp_group=dist.group.WORLD,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    # numbers of many sizes, so that blocks have many factors
    x, grad = (
        torch.randn(LENGTH, 1, WIDTH, dtype=torch.float64, generator=generator)
        * torch.exp(3 * torch.randn(LENGTH, 1, 1, dtype=torch.float64, generator=generator))
        for _ in range(2)
    )

    def run(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        layer.weight.grad, outs, inputs = None, [], []
        for part, d_out in zip(x.split(lengths), grad.split(lengths), strict=True):
            inputs.append(part.clone().requires_grad_())
            with fp8_autocast(fp8_recipe=recipe):
                outs.append(layer(inputs[-1])[0])
            outs[-1].backward(d_out)
        return torch.cat(outs), torch.cat([leaf.grad for leaf in inputs if leaf.grad is not None]), layer.weight.grad

    whole, sliced = (run(each) for each in ((LENGTH,), lengths))
    if is_same:
        assert torch.equal(whole[0], sliced[0]) and torch.equal(whole[1], sliced[1])
    distance = float((sliced[2] - whole[2]).norm() / whole[2].norm())
    assert distance <= 1e-14 if is_same else distance > 1e-3


class _Block(nn.Module):
    def __init__(self, config: TransformerConfig, layer_number: int, pg_collection: Any) -> None:
        super().__init__()
        self.layer_number, self.disable_parameter_transpose_cache, self.fp8 = layer_number, False, list[bool]()

    def forward(self, hidden_states: Tensor, **others: Any) -> tuple[Tensor, None]:
        self.fp8.append(linears.transformer_engine.FP8GlobalStateManager.is_fp8_enabled())
        return hidden_states * 2, None


@pytest.mark.parametrize("recompute", [False, True])
def test_layers_in_fp8_keep_no_weights_in_it(recompute: bool, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def context(config: Any, layer_no: int) -> Any:
        asked.append(layer_no)
        return fp8_autocast(enabled=layer_no == 1, fp8_recipe=BlockScaling())

    monkeypatch.setattr(layers, "get_fp8_context", context)
    monkeypatch.setattr(layers.tensor_parallel, "checkpoint", lambda run, _, hidden: run(run(hidden)))
    shape = types.SimpleNamespace(fp8="e4m3", recompute_granularity="full" if recompute else None,
                                  recompute_method="uniform", sequence_parallel=False)  # fmt: skip
    blueprint: Any = types.SimpleNamespace(
        config=shape, groups=types.SimpleNamespace(tp=None), rotary=None, drawn=lambda index: contextlib.nullcontext(),
        random_numbers=contextlib.nullcontext,
    )  # fmt: skip
    for index, in_fp8 in ((0, False), (1, True)):
        asked.clear()
        layer = MegatronLayer(blueprint, index, ModuleSpec(module=_Block))
        assert layer.layer.disable_parameter_transpose_cache is True
        layer(torch.ones(2))
        runs = 2 if recompute else 1
        assert layer.layer.fp8 == [in_fp8] * runs and asked == [index] * runs
    shape.fp8 = None
    layer = MegatronLayer(blueprint, 1, ModuleSpec(module=_Block))
    layer(torch.ones(2))
    assert layer.layer.disable_parameter_transpose_cache is False and not any(layer.layer.fp8)


@pytest.mark.parametrize(("changes", "problem"), [
    ({"fp8_recipe": "mxfp8"}, None), ({"fp8_recipe": "blockwise", "fp8": "hybrid"}, None),
    ({"fp8_recipe": "delayed"}, "fp8_recipe='delayed': scaling factors follow .* 'mxfp8' or 'blockwise'"),
    ({"fp8_recipe": "tensorwise"}, "fp8_recipe='tensorwise'"),
    ({"fp8_recipe": "mxfp8", "fp8_param": True}, "fp8_param=True: DeepSpeed's optimizers"),
    ({"fp8_recipe": "mxfp8", "fp8_dot_product_attention": True}, "attention in slices runs in the precision"),
    ({"fp8_recipe": "mxfp8", "num_moe_experts": 2, "moe_router_load_balancing_type": "none",
      "add_bias_linear": False}, "with num_moe_experts: blocks are made of the tokens"),
], ids=str)  # fmt: skip
def test_scaling_of_blocks_is_taken_and_other_scaling_refused(
    changes: dict[str, Any], problem: str | None, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = config(**{"fp8": "e4m3", **changes})
    with pytest.raises(MegatronConfigError, match="fp8=.* needs Transformer Engine's layers on a GPU"):
        check_config(shape)
    monkeypatch.setattr(refusals, "uses_transformer_engine", lambda config: True)
    if problem is None:
        check_config(shape)
    else:
        with pytest.raises(MegatronConfigError, match=problem):
            check_config(shape)


def test_slices_are_whole_blocks_and_no_schedule_splits() -> None:
    model: Any = MegatronGPT.__new__(MegatronGPT)
    nn.Module.__init__(model)
    groups = types.SimpleNamespace(tp=types.SimpleNamespace(size=lambda: 2))
    for fp8, shares, multiple in ((None, False, 1), (None, True, 2), ("e4m3", False, 128), ("e4m3", True, 256)):
        shape = types.SimpleNamespace(fp8=fp8, sequence_parallel=shares)
        model.blueprint = types.SimpleNamespace(config=shape, groups=groups)
        assert model.slice_length_multiple == multiple
        for schedule, splits in (("seq1f1b", False), ("zb-h1", True), ("auto", False), ("zbv", True)):
            problem = problem_of_split(model, schedule)
            assert (problem is not None) is (splits and fp8 is not None)
            assert problem is None or f"schedule = '{schedule}': in fp8 Transformer Engine" in problem
    refusal = problem_of_lengths("terapipe.slices", (128, 100), 128, 1)
    assert refusal is not None and "slices of 100 tokens are no multiples of 128" in refusal and "fp8" in refusal
    assert problem_of_split(nn.Linear(1, 1), "zb-h1") is None
