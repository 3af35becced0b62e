"""Test that cut sequences refuse experts and captured attention; and the log of the first batch."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import ReduceGrads
from torch import Tensor, nn

from terapipe_ds.attention import active_slice, sliced_attention
from terapipe_ds.models import gpt
from tests.distributed import engines
from tests.distributed.engines import ZERO1, batches, build, config, engine_of, gpt_layers, logged, raised_by, section
from tests.distributed.harness import rank_pool
from tests.small_models.parts import Embedding, Head, Mlp, cross_entropy


class MixtureLayer(torch.nn.Module):
    """Run a mixture of experts with capacity, as DeepSpeed has it."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(hidden_size=16, expert=torch.nn.Linear(16, 16), num_experts=2, k=1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.moe(hidden)[0]


def test_experts_with_capacity_are_refused() -> None:
    layers = gpt_layers("float32")
    layers.insert(2, LayerSpec(MixtureLayer))
    [(kind, message)] = rank_pool(1).run(raised_by, act=functools.partial(build, layers, section(), stages=1))
    assert kind == "TeraPipeConfigError" and "deepspeed.moe" in message and "terapipe.enabled" in message


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "a name": ({"loss_fn": "mean"}, "loss_fn=...) is 'mean'; it must be a function"),
    "a class": ({"loss_fn": torch.nn.CrossEntropyLoss}, "is the class CrossEntropyLoss: give an object"),
    "negative": ({"activation_checkpoint_interval": -1}, "activation_checkpoint_interval=-1): it must be a number"),
    "no number": ({"activation_checkpoint_interval": None}, "activation_checkpoint_interval=None): it must be"),
    "no function": ({"activation_checkpoint_func": "full"}, "activation_checkpoint_func='full'): give a function"),
    "no layer": ({"layers": [*gpt_layers("float32")[:3], None]}, "layer 3 is None: give a module"),
    "a class as layer": ({"layers": [*gpt_layers("float32")[:3], Mlp]}, "give a module, a LayerSpec"),
    "too few layers": ({"layers": [LayerSpec(Embedding)]}, "leaves parts [1] of 2 without a layer: give fewer stages"),
}


def job_arguments(arguments: dict[str, Any]) -> tuple[str, str]:
    layers = arguments.pop("layers", gpt_layers("float32"))
    return raised_by(lambda: build(layers, section(), module=arguments))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_fail_in_a_batch_are_refused_at_the_start(name: str) -> None:
    """The stock engine takes them, fails in the first batch on some ranks, and hangs on the others."""
    arguments, told = ARGUMENTS[name]
    for kind, text in rank_pool(2).run(job_arguments, arguments=arguments, timeout_s=60):
        assert kind == "TeraPipeConfigError" and told in text


class Named(gpt.TokenEmbedding):
    """Have attributes of a layer's own under names that DeepSpeed's specifications use."""

    forward_fn = "gelu"
    typename = "embedding"


def job_named() -> tuple[str, str]:
    first, *others = gpt_layers()
    with engine_of([Named(*first.module_args).double(), *others], section(verify="off"), stages=1) as engine:
        return engines.step_error(engine)


def test_attributes_of_a_layer_are_not_those_of_its_specification() -> None:
    assert rank_pool(1).run(job_named) == [("", "")]


def job_checkpointable(names: list[str]) -> list[str]:
    options = {"checkpointable_layers": names, "activation_checkpoint_interval": 1}
    with logged() as lines, engine_of(gpt_layers("float32"), section(), module=options):
        return [line for line in lines if "checkpointable_layers" in line]


def test_names_of_no_layer_that_may_recompute_are_a_warning() -> None:
    told, nothing = rank_pool(2).run(job_checkpointable, names=["DecoderLayr"])
    assert len(told) == 1 and "Give names of their classes: TokenEmbedding, DecoderLayer" in told[0] and not nothing
    assert rank_pool(2).run(job_checkpointable, names=["DecoderLayer", "Other"]) == [[], []]


class Captured(gpt.CausalSelfAttention):
    """Attend by a name that was bound long before any guard."""

    fused = staticmethod(F.scaled_dot_product_attention)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.qkv(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        out = type(self).fused(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2))


def _captured_attention(evaluate: bool, **changes: Any) -> tuple[str, str]:
    """Return the refusal of a first batch."""
    with mock.patch.object(gpt, "CausalSelfAttention", Captured):
        with engine_of(gpt_layers(), section(**changes), stages=1) as engine:
            data = iter(batches(1)[0])
            return raised_by(lambda: engine.eval_batch(data) if evaluate else engine.train_batch(data))


@pytest.mark.parametrize(
    ("evaluate", "verify", "refusal"),
    [(False, None, "VerifyError"), (False, "off", "PlainAttentionError"), (True, None, "PlainAttentionError")],
)
def test_plain_attention_by_a_captured_name_is_refused(evaluate: bool, verify: str | None, refusal: str) -> None:
    """The check of the first batch comes first; evaluations and jobs without it have the guard."""
    ((name, message),) = rank_pool(1).run(_captured_attention, evaluate=evaluate, verify=verify)
    assert name == refusal
    assert "plain attention was called on slice [0, 8)" in message and "sliced_attention" in message


def detach_keys(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
    is_first = (active := active_slice()) is not None and active.start == 0
    return sliced_attention(q, k.detach() if is_first else k, v.detach() if is_first else v, *args, **options)


def detach_output(*args: Any, **options: Any) -> Tensor:
    return sliced_attention(*args, **options).detach()


def job_detached(attend: Any) -> tuple[tuple[str, str], list[str]]:
    """Return the error of a step without the check of the first batch, and the warnings of its attention."""
    with logged() as lines, mock.patch.object(gpt, "sliced_attention", attend):
        with engine_of(gpt_layers(), section(verify="off"), stages=1) as engine:
            error = engines.step_error(engine)
            return error, [line for line in lines if "gets no gradient in any slice" in line]


def test_attention_that_slices_detach_is_told_without_a_check() -> None:
    """Its gradient in the whole sequence, from which it differs, is not known then."""
    [((kind, text), _)] = rank_pool(1).run(job_detached, attend=detach_keys)
    assert kind == "SliceStoreError" and "require gradients in some slices, and not in others" in text
    [(error, warnings)] = rank_pool(1).run(job_detached, attend=detach_output)
    assert error == ("", "") and len(warnings) == 4  # one for each layer, whatever the micro-batches
    assert rank_pool(1).run(job_detached, attend=sliced_attention) == [(("", ""), [])]


class Steps(Embedding):
    """An optimizer step in the backward, by a hook of the graph that no parameter shows."""

    def __init__(self) -> None:
        super().__init__()
        self.node = self.weight.view_as(self.weight).grad_fn.next_functions[0][0]
        self.node.register_hook(self.step)

    def step(self, *_: Any) -> None:
        torch.no_grad()(self.weight.sub_)(0.1 * self.weight.grad)


class Limits(Embedding):
    """Write to the weight in each forward, as `nn.Embedding` with `max_norm` does."""

    def forward(self, tokens: Tensor) -> Tensor:
        torch.no_grad()(self.weight.clamp_)(-2.0, 2.0)
        return super().forward(tokens)


def _first_batch_with(embedding: type[Embedding], schedule: str) -> tuple[str, str, int]:
    layers = [LayerSpec(each) for each in (embedding, Mlp, Mlp, Head)]
    with engine_of(layers, section(schedule=schedule), loss_fn=cross_entropy) as engine:
        kind, message = raised_by(lambda: engine.train_batch(iter(batches(1)[0])))
        return kind, message.partition(": an optimizer")[0].partition(", as nn.Embedding")[0], engine.global_steps


def test_parameters_that_change_in_the_backward() -> None:
    refused = ("TeraPipeConfigError", "on rank 0: 0.weight changed in a backward", 0)
    for embedding, seen in ((Steps, refused), (Limits, ("", "", 1))):
        assert rank_pool(2).run(_first_batch_with, embedding=embedding, schedule="seq1f1b") == [seen] * 2


def test_copies_of_a_parameter_that_change_in_the_forward() -> None:
    for told in rank_pool(2).run(_first_batch_with, embedding=Limits, schedule="chimera"):
        assert told == ("TeraPipeConfigError", told[1], 0)
        assert "0.weight changed in a forward" in told[1]


def job_instructions() -> tuple[tuple[str, str], int, tuple[str, str], int]:
    """Replace an instruction for the first batch of an engine."""
    with engine_of(gpt_layers(), section()) as engine:
        own = PipelineEngine._INSTRUCTION_MAP[ReduceGrads]
        wrapped = functools.wraps(own)(lambda engine: own(engine))  # it has the names of DeepSpeed's
        with mock.patch.dict(PipelineEngine._INSTRUCTION_MAP, {ReduceGrads: wrapped}):
            refused = raised_by(lambda: engine.train_batch(iter(batches(1)[0])))
            steps = engine.global_steps
        return refused, steps, raised_by(lambda: engine.train_batch(iter(batches(1)[0]))), engine.global_steps


def test_instructions_of_a_program_are_refused() -> None:
    """DeepSpeed's engine runs them; a schedule of slices has none."""
    for (kind, message), before, trained, after in rank_pool(2).run(job_instructions, timeout_s=60):
        assert kind == "TeraPipeConfigError" and (before, trained, after) == (0, ("", ""), 1)
        assert (
            "[ReduceGrads] is PipelineEngine._exec_reduce_grads of deepspeed, tests, which" in message
            and "set terapipe.enabled" in message
        )


class Turned(nn.Linear):
    def __init__(self, parameter: str, shape: tuple[int, ...]) -> None:
        super().__init__(16, 16)
        self.register_parameter(parameter, nn.Parameter(torch.zeros(shape).t()))


def job_turned(parameter: str, shape: tuple[int, ...]) -> tuple[str, str]:
    """The layer is on the second stage, where DeepSpeed fails; the first one would wait."""
    layers = [*gpt_layers("float32"), LayerSpec(Turned, parameter, shape)]
    return raised_by(lambda: engine_of(layers, section()).__enter__())


@pytest.mark.parametrize(
    ("parameter", "shape", "told"),
    [("weight", (16, 16), "weight has a turned memory"), ("scale", (), "scale has no dimension")],
)
def test_parameters_that_deepspeed_cannot_send(parameter: str, shape: tuple[int, ...], told: str) -> None:
    for kind, message in rank_pool(2).run(job_turned, parameter=parameter, shape=shape, timeout_s=60):
        assert kind == "TeraPipeConfigError" and told in message


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
    """Return the log on inputs and clipping of two training batches and an evaluation. `said`: the config names it."""
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
    ({"said": False}, "gradient_clipping is 1 (DeepSpeed's default)"),
    ({"gradient_clipping": 0.5}, "gradient_clipping is 0.5 (set in the config)"),
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
