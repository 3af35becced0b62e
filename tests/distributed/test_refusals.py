"""What is refused where sequences are cut, what is let through because it says so, and what the first batch tells."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from terapipe_ds.attention import allow_attention_within_slice
from tests.distributed import engines
from tests.distributed.engines import (
    CHECKPOINTING,
    ZERO1,
    batches,
    config,
    differences,
    engine_of,
    gpt_layers,
    logged,
    raised_by,
    run_training,
    section,
    violations,
)
from tests.distributed.harness import rank_pool


def weights(module: nn.Module) -> None:
    """The same in every engine."""
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


class FeatureAttention(nn.Module):
    """Attention of the four quarters of a token's features to each other: right in slices, and no affair of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16, dtype=torch.float64)
        weights(self)

    def forward(self, hidden: Tensor) -> Tensor:
        with allow_attention_within_slice():
            return self.attend(hidden)

    def attend(self, hidden: Tensor) -> Tensor:
        quarters = self.mix(hidden).unflatten(-1, (4, 4))
        return hidden + F.scaled_dot_product_attention(quarters, quarters, quarters).flatten(-2)


class FeatureAttentionUnsaid(FeatureAttention):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.attend(hidden)


class FeatureConvolution(nn.Module):
    """A convolution over features, which says so."""

    slice_safe = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv1d(1, 1, 3, padding=1, dtype=torch.float64))
        weights(self)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.inner(hidden.flatten(0, 1).unsqueeze(1)).view_as(hidden)


class FeatureConvolutionUnsaid(FeatureConvolution):
    slice_safe = False


class TokenConvolution(nn.Module):
    """A causal convolution over tokens that claims to be right in slices, and begins anew in each of them."""

    slice_safe = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(16, 16, 3, dtype=torch.float64)
        weights(self)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.inner(F.pad(hidden.transpose(1, 2), (2, 0))).transpose(1, 2)


def layers_with(kind: type[nn.Module]) -> list[Any]:
    """On the second of two stages."""
    layers = gpt_layers()
    return [*layers[:-2], LayerSpec(kind), *layers[-2:]]


def job_trained() -> dict[str, dict[str, float]]:
    """Compare layers that say that they are right in slices with the stock engine."""
    found = {}
    for kind, names in ((FeatureAttention, tuple(CHECKPOINTING)), (FeatureConvolution, ("off",))):
        layers = functools.partial(layers_with, kind)
        # whose reentrant checkpointing fails where the embedding is in the range
        stock = run_training(layers, None, batches(2))
        for name in names:
            run = run_training(layers, section(), batches(2), **CHECKPOINTING[name])
            found[f"{kind.__name__}, {name}"] = differences(run, stock)
    return found


def test_what_is_said_to_be_right_in_slices_trains_as_in_the_stock_engine() -> None:
    results = rank_pool(2).run(job_trained)
    for name in results[0]:
        assert violations([rank[name] for rank in results]) == {}, name


def job_refused(kind: type[nn.Module], **changes: Any) -> tuple[str, str]:
    """Return what a step is refused with, or the engine."""

    def step() -> None:
        stages = torch.distributed.get_world_size()
        with engine_of(layers_with(kind), section(**changes), stages=stages) as engine:
            engine.train_batch(iter(batches(1)[0]))

    return raised_by(step)


def test_attention_that_is_not_allowed_is_refused_though_no_slice_has_four_tokens() -> None:
    """By the check of the first batch, which says what the guard said."""
    ((kind, message),) = rank_pool(1).run(job_refused, kind=FeatureAttentionUnsaid)
    assert kind == "VerifyError" and message.startswith("verify: 3 slices (8 + 8 + 7)")
    assert "slice [0, 8) of a sequence of 23 tokens" in message and "queries of shape [2, 8, 4, 4]" in message
    assert "allow_attention_within_slice" in message


def test_a_layer_that_does_not_say_it_is_slice_safe_is_refused_on_every_rank() -> None:
    for kind, message in rank_pool(2).run(job_refused, kind=FeatureConvolutionUnsaid):
        assert kind == "TeraPipeConfigError"
        assert "on rank 1: layers that mix the tokens" in message and ".inner.0 (Conv1d)" in message
        assert "slice_safe = True" in message


def test_the_check_of_results_knows_nothing_of_slice_safe() -> None:
    for kind, message in rank_pool(2).run(job_refused, kind=TokenConvolution, verify="first_batch"):
        assert kind == "VerifyError" and "(TokenConvolution): output of tokens 8.. differs" in message


# -- what the first batch tells ------------------------------------------------------------------------------


def _with_passenger() -> Iterator[Any]:
    """Inputs (tokens, a number); layers take the tokens alone."""
    return (((tokens, torch.ones(2, 1)), labels) for tokens, labels in batches(1)[0])


class TokensOnly(nn.Module):
    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return inputs[0]


TURNED = """placement,1/2,0/3
F0.0c0,F0.0c1,F0.1c0,F0.1c1,F1.0c0,F1.0c1,B0.1c1,B0.1c0,W0.1c1,B0.0c1,B0.0c0,F1.1c0,F1.1c1,B1.1c1,W0.0c1,B1.1c0,B1.0c1,B1.0c0,W1.1c1,W1.0c1
F0.0c0,F0.1c0,F0.0c1,F0.1c1,B0.1c1,F1.0c0,B0.0c1,F1.1c0,F1.0c1,B0.1c0,B0.0c0,F1.1c1,B1.1c1,B1.0c1,B1.1c0,B1.0c0
"""  # the first part and the last one are on the second stage


def job_log(terapipe: dict[str, Any] | None = None, said: bool = True, **options: Any) -> list[str]:
    """The lines of two training batches and an evaluation about inputs and clipping. `said`: the config tells of it."""
    stages = options.pop("stages", 2)
    layers = [LayerSpec(TokensOnly), *gpt_layers("float32")]

    def without_clipping(**changes: Any) -> dict[str, Any]:
        found = config(**changes)
        del found["gradient_clipping"]
        return found

    with logged() as lines, mock.patch.object(engines, "config", config if said else without_clipping):
        with engine_of(layers, {**section(), **(terapipe or {})}, stages=stages, **options) as engine:
            for _ in range(2):
                engine.train_batch(_with_passenger())
            engine.eval_batch(_with_passenger())
    return [line for line in lines if line.startswith(("cut in", "gradient_clipping"))]


def test_rank_0_says_once_which_inputs_are_cut() -> None:
    first, second = rank_pool(2).run(job_log)
    assert first == [
        "cut in slices, in dimension 1: input 0 (int64 [2, 23]); whole with each slice: input 1 (float32 [2, 1])"
    ]
    assert second == []


def test_so_does_another_rank_that_has_the_first_part(tmp_path: Path) -> None:
    path = tmp_path / "turned.csv"
    path.write_text(TURNED)
    first, second = rank_pool(2).run(job_log, terapipe={"schedule": str(path), "slices": 2})
    assert first == [] and len(second) == 1 and second[0].startswith("cut in slices, in dimension 1: input 0 ")


CLIPS: list[tuple[dict[str, Any], str]] = [
    ({"said": False}, "gradient_clipping is 1 (DeepSpeed's default, for the config does not say)"),
    ({"gradient_clipping": 0.5}, "gradient_clipping is 0.5 (as the config says)"),
    # Both engines clip alike, or not at all.
    ({"gradient_clipping": 0.0}, ""),
    ({"gradient_clipping": 0.5, "stages": 1}, ""),
    ({"gradient_clipping": 0.5, **ZERO1}, ""),
    ({"gradient_clipping": 0.5, "bf16": {"enabled": True}}, ""),
]


@pytest.mark.parametrize(("options", "told"), CLIPS, ids=str)
def test_rank_0_says_where_the_stock_engine_clips_by_another_norm(options: dict[str, Any], told: str) -> None:
    whole = {"slices": 1, "schedule": "1f1b"}
    first, *others = rank_pool(options.get("stages", 2)).run(job_log, terapipe=whole, **options)
    assert [line.startswith(told) for line in first] == [True] * bool(told)
    assert all('set "gradient_clipping": 0 in both configs' in line and "\n" not in line for line in first)
    assert not any(others)
