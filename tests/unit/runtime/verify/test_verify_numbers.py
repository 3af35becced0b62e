"""Rounding that is measured is no fault, a fault beside it is one; what torch has no operator for is named."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terapipe_ds.attention import active_slice
from terapipe_ds.runtime.verify import compare, layer
from terapipe_ds.runtime.verify.constant_draws import ConstantDraws
from tests.small_models import faulty
from tests.small_models.faulty import WIDTH
from tests.small_models.parts import Calls
from tests.unit.runtime.verify.test_verify_layers import LENGTH, VOCAB, Findings, data, verify


class Scaled(nn.Module):
    """(x, a side input) -> x, each token for itself; the gradient of the side input is a sum that may cancel out."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.gain, self.fault = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(0.3)), fault

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        x, side = inputs
        active = active_slice()
        if self.fault == "lost gradient" and active is not None and active.start > 0:
            side = side.detach()
        y = torch.tanh(x * (1 + side)) * self.gain
        return self.inner(y + 0.3 * y.mean(1, keepdim=True) if self.fault == "mean over tokens" else y)


CANCELS = [(60, (1,)), (141, (1,)), (150, (1,)), (160, (1,)), (274, (1,)), (13, (2, 1, 1))]


def scaled(seed: int, shape: tuple[int, ...], fault: str = "", dtype: torch.dtype = torch.bfloat16) -> Findings:
    generator = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(each, generator=generator).to(dtype) for each in ((2, LENGTH, WIDTH), shape))
    return verify([Scaled(fault).to(dtype)], tuple(each.requires_grad_() for each in tensors))


@pytest.mark.parametrize(("seed", "shape"), CANCELS)
def test_a_gradient_that_cancels_is_rounding_and_a_fault_beside_it_is_none(seed: int, shape: tuple[int, ...]) -> None:
    assert scaled(seed, shape).findings == []
    with mock.patch.object(compare, "_ROUNDINGS", 0.0):  # as with a fixed tolerance
        assert "input gradient differs" in str(scaled(seed, shape).findings)
    for fault in ("lost gradient", "mean over tokens"):
        assert len(scaled(seed, shape, fault).findings) == 1, fault


def test_a_layer_that_knows_no_wider_dtype_keeps_its_difference() -> None:
    class OnlyHalf(Scaled):
        def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
            assert inputs[0].dtype == torch.bfloat16
            return super().forward(inputs)

    with mock.patch(f"{__name__}.Scaled", OnlyHalf):
        assert "input gradient differs" in str(scaled(*CANCELS[0]).findings)


class Routed(nn.Module):
    """Scale tokens by one of two experts. In bf16 later slices round the last bit in another way, as kernels do."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.experts, self.factor = nn.Parameter(torch.tensor([0.2, 3.0])), factor

    def forward(self, inputs: tuple[Tensor]) -> Tensor:
        x, active = inputs[0], active_slice()
        if active is not None and active.start > 0:
            x = x * self.factor
            x = x * (1 + torch.finfo(x.dtype).eps) if x.dtype == torch.bfloat16 else x
        return x * self.experts[(x[..., :1] >= 1.0).long()]


def test_a_router_that_decides_by_the_last_bit_is_healthy() -> None:
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    x[..., 0] = 1.0 - 2.0**-8  # the largest number of bf16 below the border

    def findings(factor: float = 1.0) -> list[Any]:
        return verify([Routed(factor).bfloat16()], (x.bfloat16().requires_grad_(),)).findings

    assert findings() == []
    with mock.patch.object(layer, "nudged", lambda inputs, seed: inputs):
        assert "output of tokens" in str(findings())
    assert len(findings(factor=1.2)) == 1


BESIDE = {
    "ids": torch.full((2, LENGTH, 1), 255.0, dtype=torch.bfloat16),  # with another last bit there is no such id
    "float8": torch.ones(2, LENGTH, 1).to(torch.float8_e4m3fn),
    "a mask": torch.full((2, LENGTH, 1), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", BESIDE)
def test_rounding_is_measured_with_the_numbers_beside_hidden_states_as_they_are(name: str) -> None:
    class WithBeside(Scaled):
        def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            x, side, beside = inputs
            if name == "ids":
                assert beside.long().amax() < 256
            assert beside.to(x.dtype).isfinite().all()
            return super().forward((x, side))

    generator = torch.Generator().manual_seed(CANCELS[0][0])
    hidden = (torch.randn(each, generator=generator).bfloat16() for each in ((2, LENGTH, WIDTH), CANCELS[0][1]))
    tensors = *(each.requires_grad_() for each in hidden), BESIDE[name]
    assert verify([WithBeside("").bfloat16()], tensors).findings == []


class InHalf(faulty.Base):
    """Attend in bf16 within a layer of another dtype, as kernels ask for it; a `share` of the mean is a fault."""

    share = 0.0

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().attend(*(each.bfloat16() for each in (q, k, v))).to(q.dtype)
        return out + self.share * out.mean(2, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_half_precision_within_a_layer_is_rounding_and_a_fault_beside_it_is_none(dtype: torch.dtype) -> None:
    assert verify([faulty.Base(0).to(dtype), InHalf(1).to(dtype)]).findings == []
    with mock.patch.object(InHalf, "share", 0.3):
        [finding] = verify([faulty.Base(0).to(dtype), InHalf(1).to(dtype)]).findings
    assert finding.layer == "layer 1 (InHalf)"


@pytest.mark.parametrize("cast", ["autocast", "explicit"])
def test_half_precision_that_hardly_counts_hides_no_faint_fault(cast: str) -> None:
    """A run in a wider dtype has explicit casts, too."""

    class Faint(faulty.Base):
        share = 0.0

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=cast == "autocast"):
                y = super().forward(x)
            y = y.bfloat16().to(x.dtype) if cast == "explicit" else y
            return x + 0.01 * y + self.share * x.mean(1, keepdim=True)

    assert verify([Faint(0)]).findings == []
    with mock.patch.object(Faint, "share", 0.02):
        assert len(verify([Faint(0)]).findings) == 1


# -- tensors that are not dense, real numbers --------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.words = kind(VOCAB, WIDTH, sparse=True).double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens.reshape(-1, 1)).reshape(*tokens.shape, WIDTH)


class Weight(nn.Module):
    def __init__(self, weight: Tensor, is_trained: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=is_trained)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.is_sparse:
            return x + torch.sparse.mm(self.weight, x.flatten(0, 1).T).T.view_as(x)
        return x + (x.to(torch.promote_types(x.dtype, self.weight.dtype)) @ self.weight).real


def nested(x: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor(list(x.unbind(0)), layout=torch.jagged)


EYE = torch.eye(WIDTH, dtype=torch.float64)
KINDS: dict[str, list[nn.Module]] = {
    "sparse embedding": [Words(nn.Embedding)],
    "sparse bag": [Words(nn.EmbeddingBag)],
    "sparse weight": [Weight(EYE.to_sparse())],
    "frozen sparse weight": [Weight(EYE.to_sparse(), False)],
    "complex weight": [Weight(torch.complex(EYE, 0.5 + EYE))],
    "complex activations": [Calls(lambda x: torch.complex(x, x.tanh())), Calls(lambda x: x.real * x.imag)],
    "float8": [Calls(lambda x: x.to(torch.float8_e4m3fn)), Calls(lambda x: x.double())],
    "nested": [Calls(nested), Calls(lambda x: torch.stack(x.unbind(0)).tanh())],
    "sparse activations": [Calls(lambda x: x.to_sparse(2)), Calls(lambda x: 1.5 * x.to_dense())],
    "no tensors": [
        Calls(lambda x: ({"hidden": x.tanh()}, None, 3)),
        Calls(lambda both: both),
        Calls(lambda both: both[0]["hidden"] * both[2]),
    ],
    "dict": [Calls(lambda x: {"a": (x, None), "b": [x.tanh()]}), Calls(lambda each: each["a"][0] * each["b"][0])],
    "list": [Calls(lambda x: [x, x.tanh()]), Calls(lambda both: torch.cat(both.copy(), -1))],
    "named tuple": [Calls(lambda x: x.sort(-1)), Calls(lambda both: both.values * both.indices)],
    "none of the tokens": [Calls(lambda x: (x.tanh(), x[:, :0])), Calls(lambda both: both[0] * 2 + both[1].sum())],
    "no features": [Calls(lambda x: (x, x[..., :0])), Calls(lambda both: torch.cat(both, -1).tanh())],
    "quantized": [
        Calls(lambda x: torch.quantize_per_tensor(x.detach().float(), 0.1, 0, torch.qint8)),
        Calls(lambda x: x.dequantize().double()),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_numbers(kind: str) -> None:
    layers, mixes = KINDS[kind], Calls(lambda x: x + x.mean(1, keepdim=True))
    tensors = (data()[0],) if "embedding" in kind or "bag" in kind else None
    found = verify(layers, tensors)
    assert (found.findings, found.notes, found.num_layers) == ([], [], len(layers))
    [finding] = verify([*layers, mixes], tensors).findings  # and what comes after it is compared
    assert finding.layer == f"layer {len(layers)} (Calls)"


OTHER_CONTAINERS: dict[str, Callable[[Tensor, bool], Any]] = {
    "None": lambda x, is_later: (x, x.mean(1) if is_later else None),
    "the other place": lambda x, is_later: (None, x) if is_later else (x, None),
    "another key": lambda x, is_later: {"later" if is_later else "first": x},
    "more": lambda x, is_later: (x, x.tanh()) if is_later else (x,),
}


@pytest.mark.parametrize("container", OTHER_CONTAINERS)
def test_slices_that_return_another_container_than_whole_sequences_are_a_fault(container: str) -> None:
    """The next layer would get tensors in places in which whole sequences have none."""

    def give(x: Tensor) -> Any:
        return OTHER_CONTAINERS[container](x, active_slice().start > 0)

    weight_of = {0: 1.0, 1: 2.0, "first": 3.0, "later": 4.0}

    def take(given: Any) -> Any:
        each = given.items() if isinstance(given, dict) else enumerate(given)
        return sum(weight_of[key] * part.sum(-1, keepdim=True) for key, part in each if part is not None)

    [finding] = verify([Calls(give), Calls(take)]).findings
    assert finding.layer == "layer 0 (Calls) with layer 1 (Calls)"


@pytest.mark.parametrize("what", ["int", "a dict, None or nested tuples"])
def test_a_part_may_not_end_with_anything_but_tensors(what: str) -> None:
    """The loss may take a dict as well, but no number, which slices may have otherwise."""
    layers = [Calls(lambda x: x.tanh()), Calls(lambda x: {"x": x, "other": 3 if what == "int" else None})]
    [finding] = verify(layers, is_last=what == "int").findings
    assert finding.layer == "layer 1 (Calls)"
    assert f"it returns {what}" in finding.problem and "and the part ends here" in finding.problem
    assert what == "int" or verify(layers).findings == []


def test_only_the_imaginary_part_is_wrong() -> None:
    [finding] = verify([Calls(lambda x: torch.complex(x, x.mean(1, keepdim=True).expand_as(x)))]).findings
    assert "output of tokens 0.. differs" in str(finding)


def test_an_operator_that_is_missing_is_named_with_its_layer_and_all_else_is_compared() -> None:
    numbers = compare._numbers

    def without(tensor: Tensor) -> Tensor:
        if tensor.shape == (WIDTH, WIDTH):
            raise NotImplementedError("Could not run 'aten::much'. This may be" + "\n  a backend" * 90)
        return numbers(tensor)

    wrong = Calls(lambda x: x + x.mean(1, keepdim=True))
    with mock.patch.object(compare, "_numbers", without):
        found = verify([Weight(EYE), wrong])
    assert [finding.layer for finding in found.findings] == ["layer 1 (Calls)"]
    assert found.notes and all(
        note.startswith("layer 0 (Weight): ") and note.endswith("was not compared: Could not run 'aten::much'")
        for note in found.notes
    )


def test_dropout_scales_alike_in_any_kernel() -> None:
    """On a GPU the whole runs a fused kernel where slices in fp32 run plain torch: models with attention dropout were
    refused. `native_dropout` is what a GPU runs for `F.dropout`.
    """
    q, k, v, grad = (torch.randn(2, 3, 7, 8, dtype=torch.float64).requires_grad_() for _ in range(4))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True) / 0.75
    wanted = [expected, *torch.autograd.grad(expected, (q, k, v), grad), q / 0.75, grad / 0.75]
    with ConstantDraws() as draws:
        out, *_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.25, True)
        found = [out, *torch.autograd.grad(out, (q, k, v), grad)]
        dropped, _ = torch.native_dropout(q, 0.25, True)
        found += [dropped, *torch.autograd.grad(dropped, q, grad)]
        for rate in (0.25, 1.0):  # torch's own dropout gives zeros, and no NaN, where it drops everything
            out, *_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, rate, True)
            assert all(each.isfinite().all() for each in (out, *torch.autograd.grad(out, (q, k, v), grad)))
    torch.testing.assert_close(found, wanted)
    assert not draws.unknown
