"""Every fault is found and named; healthy models pass; nothing is touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from torch import Tensor, nn

from terapipe_ds.models import gpt
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch import SliceableTensors
from terapipe_ds.runtime.checkpointing import checkpoint_with_gradients
from terapipe_ds.runtime.loss import slice_weights
from terapipe_ds.runtime.untouched import untouched
from terapipe_ds.runtime.verify.layout import Same, TokenDim
from terapipe_ds.runtime.verify.losses import LossCheck
from terapipe_ds.runtime.verify.runner import NamedLayer, Runner, Values
from terapipe_ds.runtime.verify.stage import Inputs, StageFindings, check_loss, check_stage
from tests.distributed import faulty_layers
from tests.distributed.faulty_layers import LAYERS, WIDTH

PLAN = SlicePlan((8, 5, 7))
LENGTH, VOCAB = PLAN.sequence_length, 19


def data(masked: bool = True) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(VOCAB, (2, LENGTH + 1), generator=generator)
    labels = text[:, 1:].clone()
    if masked:
        labels[0, :10] = -100
    return text[:, :-1].contiguous(), labels


def verify(
    layers: Sequence[Any], inputs: Values | None = None, plan: SlicePlan = PLAN, loss_fn: Any = None,
    labels: Tensor | None = None, reduction: str = "mean_valid", checkpoint: Callable[..., Any] | None = None,
) -> StageFindings:  # fmt: skip
    module = nn.ModuleList([layer for layer in layers if isinstance(layer, nn.Module)])
    if inputs is None:
        hidden = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        dtype = next(iter(module.parameters()), hidden).dtype
        inputs = Values((hidden.to(dtype).requires_grad_(),), False)
    tokens = SliceableTensors.of_labels(data()[1] if labels is None else labels, 1)
    weights = slice_weights(tokens, plan, loss_reduction=reduction, ignore_index=-100)
    layouts = [TokenDim(1) if t.dim() > 1 and t.size(1) == LENGTH else Same() for t in inputs.tensors]
    with untouched(module):
        named = [(NamedLayer(i, layer), checkpoint) for i, layer in enumerate(layers)]
        stage = check_stage(Runner(module, plan), named, Inputs(inputs, layouts), weights)
        if loss_fn is not None:
            check_loss(
                stage,
                lambda last: LossCheck(
                    loss_fn, tokens, plan, last.values, last.layouts, weights, reduction, -100
                ),
                len(layers),
            )
    return stage


def gpt_model(dtype: str = "float64", **changes: Any) -> list[nn.Module]:
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 24,
        "init_std": 0.3, "dtype": dtype, "max_sequence_length": 64, **changes,
    }  # fmt: skip
    return [spec.build() for spec in gpt.gpt_layers(gpt.GPTConfig(**fields))]


def verify_gpt(dtype: str = "float64", loss_fn: Any = gpt.gpt_loss, **changes: Any) -> StageFindings:
    options = {k: changes.pop(k) for k in ("labels", "reduction", "checkpoint", "plan") if k in changes}
    return verify(gpt_model(dtype, **changes), Values((data()[0],), False), loss_fn=loss_fn, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", LAYERS, ids=lambda f: f.__name__)
def test_a_fault_is_found_and_named(fault: type[nn.Module], dtype: torch.dtype) -> None:
    what, cause = LAYERS[fault]
    healthy = faulty_layers.Base(0)
    stage = verify([healthy.to(dtype), fault().to(dtype), faulty_layers.Base(1).to(dtype)])
    assert stage.findings, "nothing was found"
    text = str(stage.findings[0])
    assert text.startswith(f"layer 1 ({fault.__name__}): {what}"), text
    assert cause in text, text


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("init_std", [0.02, 0.3])
@pytest.mark.parametrize("changes", [{}, {"positions": "learned", "bias": True, "gated_mlp": False}], ids=["llama", "gpt3"])
def test_healthy_models_pass(dtype: str, init_std: float, changes: dict[str, Any]) -> None:
    stage = verify_gpt(dtype, init_std=init_std, **changes)
    assert stage.findings == [] and stage.notes == [], stage
    assert stage.num_layers == (6 if changes else 5)
    assert stage.in_fp32_too == (stage.num_layers if dtype in ("bfloat16", "float16") else 0)
