"""Layers that cannot be trained in slices, found where the model is built."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.models.gpt import gpt_loss
from terapipe_ds.runtime.layers.compiled import compile_layer
from terapipe_ds.runtime.layers.sliceable import ModelChanges, check_compile_call, kind_of_loss, problem_of_layers
from terapipe_ds.runtime.layout.sequence_axis import slice_length_multiple, with_multiple


def problem(module: nn.Module, slices: Any = 4, has_moe_layers: bool = False) -> str | None:
    config = TeraPipeConfig(enabled=True, slices=slices)
    return problem_of_layers(nn.Sequential(nn.Linear(4, 4), module), config, has_moe_layers)


MIX_TOKENS = [
    nn.GRU(4, 4), nn.LSTM(4, 4), nn.RNN(4, 4), nn.GRUCell(4, 4), nn.LSTMCell(4, 4), nn.RNNCell(4, 4),
    nn.Conv1d(4, 4, 3), nn.Conv2d(4, 4, (1, 3)), nn.Conv3d(4, 4, (1, 1, 2)), nn.ConvTranspose1d(4, 4, 2),
    nn.ConvTranspose2d(4, 4, (2, 1)), nn.LazyConv1d(4, 3), nn.LazyConvTranspose1d(4, 2), nn.Conv1d(4, 4, 1, stride=2),
    nn.BatchNorm1d(4), nn.LazyBatchNorm1d(), nn.SyncBatchNorm(4), nn.InstanceNorm1d(4), nn.LazyInstanceNorm2d(),
    nn.GroupNorm(2, 4), nn.MaxPool2d((2, 1)), nn.MaxUnpool1d(2), nn.AvgPool1d(2), nn.LPPool2d(2, 2),
    nn.AdaptiveMaxPool1d(2), nn.AdaptiveAvgPool2d((1, None)), nn.FractionalMaxPool2d(2, output_size=2),
    nn.Unfold((3, 1)), nn.Fold((4, 4), 2), nn.Upsample(scale_factor=2), nn.UpsamplingBilinear2d(scale_factor=2),
    nn.ZeroPad2d((0, 0, 1, -1)), nn.CircularPad2d((0, 0, 1, 0)), nn.ReflectionPad2d((0, 0, 1, 0)),
    nn.ReplicationPad2d((0, 0, 2, 0)), nn.ConstantPad3d((0, 0, 0, 0, 1, 0), 0.0),
]  # fmt: skip


@pytest.mark.parametrize("layer", MIX_TOKENS, ids=repr)
def test_layers_that_mix_tokens_are_named(layer: nn.Module) -> None:
    told = str(problem(nn.Sequential(layer)))
    assert f"1.0 ({type(layer).__name__})" in told and "slice_safe = True" in told


def test_whether_layers_may_mix_tokens_is_a_matter_of_the_slices() -> None:
    for slices in (4, [3, 1], "auto"):
        assert "set terapipe.slices to 1" in str(problem(nn.GRU(4, 4), slices))
    for slices in (1, [7]):
        assert problem(nn.GRU(4, 4), slices) is None, "a whole sequence in one slice"


TOKEN_LOCAL = [
    nn.Linear(4, 4), nn.LayerNorm(4), nn.RMSNorm(4), nn.Embedding(4, 4), nn.Dropout(), nn.Softmax(-1), nn.PReLU(),
    nn.Bilinear(4, 4, 4), nn.Conv1d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.ConvTranspose1d(4, 4, 1), nn.LazyConv1d(4, 1),
    nn.Conv1d(4, 4, 1, groups=4), nn.Unfold(1), nn.Unfold((1, 1)), nn.ZeroPad1d((1, 2)), nn.ConstantPad2d(0, 0.0),
    nn.Flatten(-2), nn.PixelShuffle(2), nn.ChannelShuffle(2), nn.LocalResponseNorm(2),
]  # fmt: skip


@pytest.mark.parametrize("layer", TOKEN_LOCAL, ids=repr)
def test_token_local_layers_are_no_problem(layer: nn.Module) -> None:
    assert problem(layer) is None


class CausalConvolution(nn.Module):
    """It would hand the last tokens of a slice on to the next one."""

    slice_safe = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv1d(4, 4, 3))


def test_a_class_may_say_that_it_is_slice_safe() -> None:
    assert problem(CausalConvolution()) is None, "also covers its submodules"
    assert problem(nn.Sequential(nn.Linear(4, 4), CausalConvolution())) is None
    beside = str(problem(nn.Sequential(CausalConvolution(), nn.GRU(4, 4))))
    assert "1.1 (GRU)" in beside and "Conv1d" not in beside

    class Unsafe(CausalConvolution):
        slice_safe = False

    assert "1.inner.0 (Conv1d)" in str(problem(Unsafe()))

    class SafeGroupNorm(nn.GroupNorm):
        slice_safe = True

    assert problem(SafeGroupNorm(2, 4)) is None and problem(nn.GroupNorm(2, 4)) is not None

    safe = CausalConvolution()
    assert "1.1.0 (Conv1d)" in str(problem(nn.Sequential(safe, safe.inner))), "in one of two that share it"


def test_only_a_few_are_named() -> None:
    told = str(problem(nn.Sequential(*[nn.GRU(4, 4) for _ in range(9)])))
    assert told.count("(GRU)") == 4 and " and 5 more" in told
    assert " more" not in str(problem(nn.Sequential(*[nn.GRU(4, 4) for _ in range(4)])))


def test_slice_safe_does_not_hide_experts_or_compiled_layers() -> None:
    layer = CausalConvolution()
    for slices in (1, 4):
        assert "deepspeed.moe" in str(problem(layer, slices, has_moe_layers=True))
    layer.compile()
    assert "torch.compile" in str(problem(layer))


def test_compiled_layers_are_refused_where_sequences_are_cut() -> None:
    """Nothing is compiled here: that happens at the first call."""
    in_place, forward = nn.Linear(4, 4), nn.Linear(4, 4)
    in_place.compile()
    forward.forward = torch.compile(forward.forward)  # type: ignore[method-assign]
    for compiled in (torch.compile(nn.Linear(4, 4)), in_place, forward):
        told = str(problem(nn.Sequential(compiled)))
        assert "(1.0) are compiled by torch.compile" in told and "set terapipe.slices to 1" in told
        assert problem(compiled, slices=1) is None


def test_layers_that_the_section_compiles_are_not_refused_later() -> None:
    """`engine.use_slice_plan` asks again."""
    layer = nn.Linear(4, 4)
    compile_layer(layer, "layer")
    assert problem(layer) is None


@pytest.mark.parametrize(
    ("wrapped", "refused"), [(torch.compile, True), (lambda it: it, False), (torch.compiler.disable, False)]
)
def test_compiled_functions_among_the_layers_are_refused(wrapped: Any, refused: bool) -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    module.forward_funcs = [module[0], wrapped(lambda x: 2 * x)]  # type: ignore[assignment]
    told = problem_of_layers(module, TeraPipeConfig(enabled=True, slices=4), has_moe_layers=False)
    assert ("torch.compile" in str(told)) == refused


def test_compile_of_the_engine_is_refused_where_sequences_are_cut() -> None:
    with pytest.raises(TeraPipeConfigError, match=r"engine.compile\(\) layers are compiled by torch.compile"):
        check_compile_call(may_cut=True)
    check_compile_call(may_cut=False)


class Ignoring:
    """A loss that ignores several labels, or whose call and whose object name the same setting."""

    def __init__(self, ignore_index: Any) -> None:
        self.ignore_index = ignore_index

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor, ignore_index: int = 0) -> torch.Tensor:
        return outputs.sum()


@pytest.mark.parametrize("keywords", [{}, {"ignore_index": 3}])
@pytest.mark.parametrize("ignored", [[0, -100], {0, -100}, None])
def test_settings_of_a_loss_may_be_of_any_kind(ignored: Any, keywords: dict[str, int]) -> None:
    module, loss = nn.Sequential(nn.Linear(4, 4)), Ignoring(ignored)
    module.loss_fn = functools.partial(loss, **keywords)  # type: ignore[assignment]
    changes = ModelChanges(module)
    seen = []
    for other in (ignored, ignored, [0]):
        loss.ignore_index = other
        seen.append(changes.since_the_last_batch())
        changes.batch_came()
    assert seen == [2, 0, 2]


class TestMultiples:
    @pytest.mark.parametrize("value", [0, 1.0, "2", None, True])
    def test_anything_but_a_positive_integer_is_refused(self, value: Any) -> None:
        with pytest.raises(TeraPipeConfigError, match=r"slice_length_multiple = .* of SimpleNamespace: give an int"):
            slice_length_multiple(SimpleNamespace(slice_length_multiple=value))
        assert slice_length_multiple(SimpleNamespace(slice_length_multiple=4)) == 4
        assert slice_length_multiple(nn.Linear(1, 1)) == 1

    @pytest.mark.parametrize(
        ("slices", "granularity_tokens", "multiple", "expected"),
        [(4, 64, 2, 64), (4, 64, 3, 192), ("auto", 6, 4, 12), (4, 1, 8, 8), (4, 64, 1, 64), ([9, 3], 2, 3, 3)],
    )
    def test_the_granularity_is_raised_to_what_both_divide(
        self, slices: Any, granularity_tokens: int, multiple: int, expected: int
    ) -> None:
        config = TeraPipeConfig(enabled=True, slices=slices, granularity_tokens=granularity_tokens)
        raised = with_multiple(config, multiple, rank=0)
        assert raised.granularity_for(12 if isinstance(slices, list) else 1024) == expected
        assert raised.model_dump() == config.model_dump()

    def test_rank_0_says_so(self, caplog: pytest.LogCaptureFixture) -> None:
        config = TeraPipeConfig(enabled=True, slices=4, granularity_tokens=64)
        with caplog.at_level("INFO", logger="terapipe_ds"):
            with_multiple(config, 2, rank=0)
            with_multiple(config, 3, rank=1)
            with_multiple(TeraPipeConfig(enabled=True, slices=1), 3, rank=0)  # nothing is cut
            assert not caplog.records
            with_multiple(config, 3, rank=0)
            with_multiple(TeraPipeConfig(enabled=True, slices=4), 3, rank=0)
        one, other = caplog.messages
        assert "granularity_tokens is raised from 64 to 192: slices must be multiples of 3" in one
        assert "is raised from 64 to 192, of fewer where sequences are short: slices must be multiples of 3" in other


def of_deepspeed(parameter: torch.Tensor) -> None:
    pass


of_deepspeed.__module__ = "deepspeed.runtime.zero.stage_1_and_2"


def test_hooks_that_step_are_refused_where_sequences_are_cut() -> None:
    layer, frozen, other = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
    other.weight.register_post_accumulate_grad_hook(of_deepspeed)
    assert problem(nn.Sequential(frozen, other)) is None, "not the user's"
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    told = str(problem(nn.Sequential(frozen, layer)))
    assert "1.1.weight (test_hooks_that_step" in told and "takes a step per slice" in told
    assert problem(layer, slices=1) is None
    _apply_optimizer_in_backward(torch.optim.SGD, other.parameters(), {"lr": 0.1})
    assert "1.1.weight (an optimizer)" in str(problem(nn.Sequential(frozen, other)))


@pytest.mark.parametrize("verify", ["off", None])
def test_hooks_that_nothing_compares_are_named(verify: Any, caplog: pytest.LogCaptureFixture) -> None:
    layer, config = nn.Linear(4, 4), TeraPipeConfig(enabled=True, slices=4, verify=verify)
    assert problem_of_layers(layer, config, has_moe_layers=False) is None and not caplog.messages
    layer.bias.register_hook(lambda gradient: gradient)
    assert problem_of_layers(layer, config, has_moe_layers=False) is None
    assert [("the gradients of bias" in told) for told in caplog.messages] == [True] * (verify == "off")


def test_a_loss_that_wraps_one_of_the_package_counts_as_another() -> None:
    """`functools.wraps` gives it the name of the package's module."""
    doubled = functools.wraps(gpt_loss)(lambda logits, labels: 2 * gpt_loss(logits, labels))
    assert kind_of_loss(doubled) != kind_of_loss(gpt_loss) == kind_of_loss(functools.partial(gpt_loss))


def test_a_loss_of_a_module_without_a_name() -> None:
    """Generated code has such globals."""
    generated: dict[str, Any] = {"__builtins__": {}}
    exec("def loss(outputs, labels): return outputs", generated)
    assert kind_of_loss(generated["loss"]) == [generated["loss"].__code__]
