"""Test programs that change their model between steps: it trains as in the stock engine, or every rank refuses it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrize import register_parametrization

from terapipe_ds.runtime.layout.layer_names import NOTHING_TRAINED
from terapipe_ds.runtime.verify import FirstBatchCheck
from tests.distributed import engines
from tests.distributed.harness import rank_pool
from tests.small_models.parts import Embedding, Head, Mlp, cross_entropy
from tests.zoo.attentions import Sliced

STEPS = 4
LAYERS = [LayerSpec(kind) for kind in (Embedding, Mlp, Mlp, Head)]
ATTENDING = [LayerSpec(Embedding), *(LayerSpec(Sliced, index) for index in range(2)), LayerSpec(Mlp), LayerSpec(Head)]


def layers_of(engine: Any, *kinds: type[nn.Module]) -> Iterator[nn.Module]:
    return (module for module in engine.module.modules() if isinstance(module, kinds))


def freeze_at(step_at: Callable[[int], bool], *kinds: type[nn.Module]) -> Callable[[Any, int], None]:
    """Return a change that freezes layers of these classes in the steps that `step_at` accepts, and trains others."""

    def change(engine: Any, step: int) -> None:
        for layer in layers_of(engine, *kinds):
            layer.requires_grad_(not step_at(step))

    return change


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad /= 2


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def double_at_1(engine: Any, step: int) -> None:
    for layer in layers_of(engine, nn.Linear) if step == 1 else ():
        layer.__class__ = Doubled


class Loss(nn.CrossEntropyLoss):
    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().forward(logits.flatten(0, 1), labels.flatten())


def keyword_loss(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


LOSSES = {  # at first, and from the second step on
    "but a 'sum'": (Loss(), Loss(reduction="sum")),
    "no 'mean_valid' but a 'sum'": (partial(keyword_loss), partial(keyword_loss, reduction="sum")),
}
HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "gradient of 2.up.weight differs": lambda layer: layer.up.weight.register_hook(lambda grad: grad / grad.norm()),
    "register_post_accumulate_grad_hook: 2.up.weight": lambda layer: layer.up.weight.register_post_accumulate_grad_hook(
        halve
    ),
    "input gradient": lambda layer: layer.register_full_backward_hook(
        lambda _, grads, of_outputs: (grads[0] / grads[0].norm(),)
    ),
    "early outputs change": lambda layer: layer.register_forward_hook(lambda _, inputs, x: x - x.mean(1, keepdim=True)),
    "(Mlp): output of tokens 0..": lambda layer: register_module_forward_hook(
        lambda module, _, x: x - x.mean(1, keepdim=True) if module is layer else None
    ),
}


def mask_at_1(engine: Any, step: int) -> None:
    if step == 1:
        for layer in layers_of(engine, Mlp):
            layer.up.weight.register_hook(lambda grad: grad * (torch.arange(grad.shape[1]) % 2))


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def parametrize_at_1(engine: Any, step: int) -> None:
    for layer in layers_of(engine, Mlp) if step == 1 else ():
        register_parametrization(layer.up, "weight", Halved())


class Shifted(nn.Linear):
    shift: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.shift


def shift_at_1(engine: Any, step: int) -> None:
    for layer in layers_of(engine, nn.Linear) if step == 1 else ():
        layer.__class__, layer.shift = Shifted, nn.Parameter(torch.zeros(layer.weight.shape[0], dtype=torch.float64))
        engine.optimizer.add_param_group({"params": [layer.shift]})


@dataclass(frozen=True)
class Changed:
    """Hold a change, in the model of these layers; `checks` is how often it is checked."""

    change: Callable[[Any, int], None]
    layers: list[LayerSpec]
    checks: int = 2
    schedule: str = "seq1f1b"
    clipping: float = 0.0


BELOW_THE_HEAD = Embedding, Sliced, Mlp
CASES = {
    "embedding, alternately": Changed(freeze_at(lambda step: step % 2 == 0, Embedding), LAYERS),
    "first stage is frozen later": Changed(freeze_at(lambda step: step > 1, Embedding, Mlp), LAYERS),
    "first stage is trained later": Changed(freeze_at(lambda step: step < 2, Embedding, Mlp), LAYERS),
    "first stage, alternately": Changed(freeze_at(lambda step: step % 2 == 0, *BELOW_THE_HEAD), ATTENDING),
    "parts": Changed(freeze_at(lambda step: step < 2, *BELOW_THE_HEAD), ATTENDING, schedule="zbv"),
    "a mask of gradients": Changed(mask_at_1, LAYERS),
    "a class": Changed(double_at_1, LAYERS),
    "a parametrization at two places": Changed(parametrize_at_1, LAYERS, schedule="chimera-seq"),
    "added parameters": Changed(shift_at_1, LAYERS, clipping=0.1),
    "added parameters at two places": Changed(shift_at_1, LAYERS, schedule="chimera-seq", clipping=0.1),
}


def trained(name: str) -> tuple[float, int]:
    """Return the largest difference of parameters and losses from one stock stage, and the number of checks."""
    case, renewed = CASES[name], []
    data = engines.batches(STEPS)
    given = {"loss_fn": cross_entropy, "before_step": case.change, "gradient_clipping": case.clipping}
    stock = engines.run_training(lambda: case.layers, None, data, stages=1, **given)
    check = FirstBatchCheck._check

    def counted(*args: Any) -> Any:
        renewed.append(args)
        return check(*args)

    def change_before_the_end(engine: Any, step: int) -> None:
        if step:
            engine.eval_batch(iter(data[0]))  # of a model that is checked already
        case.change(engine, step)
        assert (
            engines.step_error(engine, data[0][:1])[0] == "StopIteration"
        )  # what follows sees the change all the same

    given["before_step"] = change_before_the_end
    with mock.patch.object(FirstBatchCheck, "_check", counted):
        ours = engines.run_training(lambda: case.layers, engines.section(schedule=case.schedule), data, **given)
    errors = [(value - stock.parameters[key]).abs().max() for key, value in ours.parameters.items()]
    losses = [abs(a - b) for a, b in zip(ours.losses, stock.losses, strict=bool(ours.losses))]
    return max(map(float, [*errors, *losses])), len(renewed)


def refused(name: str, evaluates: bool) -> tuple[str, str, bool]:
    """Return the error of the step or evaluation after the change, and whether that has changed nothing."""
    data, (loss_fn, later) = engines.batches(2), LOSSES.get(name, (cross_entropy, cross_entropy))
    with engines.engine_of(LAYERS, engines.section(), loss_fn=loss_fn) as engine:
        engines.train(engine, data[:1])
        before = [p.detach().clone() for p in engine.module.parameters()]
        engine.module.loss_fn = later
        hooks = [HOOKS[name](layer) for layer in layers_of(engine, Mlp) if name in HOOKS and engine.is_last_stage()]
        assert engines.step_error(engine, [()])[0] == "BatchError"  # the change is as new to the next batch
        call = engine.eval_batch if evaluates else engine.train_batch
        error = engines.raised_by(lambda: call(iter(data[1])))
        for hook in hooks:
            hook.remove()
        return *error, all(map(torch.equal, before, engine.module.parameters()))


def refused_after_evaluations() -> tuple[str, str]:
    """Return the error of the first training step whose model evaluations have seen before, between other steps."""
    data, hooks = engines.batches(1)[0], list[Any]()
    with engines.engine_of(LAYERS, engines.section(), loss_fn=cross_entropy) as engine:
        for _ in range(2):
            engine.train_batch(iter(data))
            hooks = [HOOKS["input gradient"](layer) for layer in layers_of(engine, Mlp)]
            engine.eval_batch(iter(data))
            for hook in hooks:
                hook.remove()
        engine.train_batch(iter(data))
        hooks = [HOOKS["input gradient"](layer) for layer in layers_of(engine, Mlp)]
        return engines.step_error(engine, data)


def clamped(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten().clamp(min=0))


def errors_of_a_loss_made_anew() -> tuple[str, str]:
    """Return the error of ignored labels that come after a new object of the same loss, which trains on them."""
    with engines.engine_of(LAYERS, engines.section(), loss_fn=partial(clamped)) as engine:
        assert engines.step_error(engine, engines.batches(1, masked=False)[0])[0] == ""
        engine.module.loss_fn = partial(clamped)
        return engines.step_error(engine)


def errors_of_another_loss() -> list[tuple[str, str]]:
    """Return the errors of a step whose loss trains on every label, and of one with a new loss and ignored labels."""
    with engines.engine_of(LAYERS, engines.section(), loss_fn=clamped) as engine:
        first = engines.step_error(engine, engines.batches(1, masked=False)[0])
        engine.module.loss_fn = cross_entropy
        return [first, engines.step_error(engine)]


def listed_while_frozen() -> bool:
    """Return whether a stage learns whose parameters were frozen when the optimizer got a list of them."""
    module = engines.pipeline_module(LAYERS, loss_fn=cross_entropy)
    everything = list(module.parameters())
    for layer in (each for each in module.modules() if isinstance(each, (Embedding, Mlp))):
        layer.requires_grad_(False)
    with engines.started(module, engines.section(), initialize={"model_parameters": everything}) as engine:
        engines.train(engine, engines.batches(1))
        before = [p.detach().clone() for p in everything]
        for layer in layers_of(engine, Embedding, Mlp):
            layer.requires_grad_(True)
        engines.train(engine, engines.batches(1))
        changed = [name for name, _ in engine.module.named_parameters() if name != NOTHING_TRAINED]
        return len(changed) == len(everything) and not any(map(torch.equal, before, everything))


class TestTwoRanks:
    @pytest.mark.parametrize("name", CASES)
    def test_it_trains_on_as_in_the_stock_engine(self, name: str) -> None:
        """Each model is checked once, and not again when an earlier one returns."""
        for error, checks in rank_pool(2).run(trained, name=name):
            limit = engines.FP32_SCALAR if CASES[name].clipping else engines.EXACT  # DeepSpeed takes norms in fp32
            assert error < limit
            assert checks == CASES[name].checks

    @pytest.mark.parametrize(
        ("name", "evaluates"), [*((name, False) for name in [*HOOKS, *LOSSES]), *((name, True) for name in LOSSES)]
    )
    def test_what_is_wrong_on_slices_is_refused_before_the_step(self, name: str, evaluates: bool) -> None:
        kinds, texts, stays = zip(*rank_pool(2).run(refused, name=name, evaluates=evaluates), strict=True)
        assert set(kinds) == {"VerifyError"} and all(stays)
        assert name in texts[0] and "the error of rank 0 names the layers" in texts[1]

    def test_an_evaluation_does_not_stand_for_the_check_of_a_training_batch(self) -> None:
        kinds, texts = zip(*rank_pool(2).run(refused_after_evaluations), strict=True)
        assert set(kinds) == {"VerifyError"} and "input gradient" in texts[0]

    def test_labels_that_come_with_a_new_loss_are_not_tried_on_the_one_before(self) -> None:
        assert rank_pool(2).run(errors_of_another_loss) == [[("", "")] * 2] * 2

    def test_labels_that_come_with_a_new_object_of_a_loss_are_tried(self) -> None:
        kinds, texts = zip(*rank_pool(2).run(errors_of_a_loss_made_anew), strict=True)
        assert kinds[1] == "VerifyError" and all("ignored for the first" in text for text in texts)

    def test_an_optimizer_has_parameters_that_are_frozen_at_first(self) -> None:
        assert rank_pool(2).run(listed_while_frozen) == [True, True]
