"""Say whether layers may run slice by slice at all, as far as the built module shows it, and then its first batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from terapipe_ds.compat.replaced import packages_of
from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.messages import in_short, logger
from terapipe_ds.runtime.layers.kept_state import OF_DEEPSPEED, KeptState, changes, leaves, names_in, same
from terapipe_ds.runtime.layout.layer_names import layer_of_parameter
from terapipe_ds.runtime.layout.parted_module import functions_of


def problem_of_layers(
    module: nn.Module, config: TeraPipeConfig, has_moe_layers: bool, sees_parts: bool = False
) -> str | None:
    """Return which of this stage's layers cannot run slice by slice; None if all can. Stages may differ.

    With `sees_parts` no layer sees a whole sequence, whatever the config: sequence ranks divide it, or a plan by hand.
    """
    # layers that count the tokens of a forward pass
    if has_moe_layers:
        return (
            "the model has deepspeed.moe layers: their capacity and their auxiliary loss count the tokens of one "
            "forward pass, which slices change. Set terapipe.enabled to false, or route without capacity in a layer of "
            "your own."
        )
    if config.is_one_slice and not sees_parts:
        return None
    # layers that do not know slices
    compiled = _compiled(module)
    if compiled:
        return f"layers of this stage ({in_short(compiled)}) {_COMPILED}"
    hooked = problem_of_gradient_hooks(module)
    if hooked is not None:
        return hooked
    if config.verify == "off":
        _warn_of_unchecked_hooks(module)
    # torch's own layers that mix tokens
    names = [f"{name} ({type(layer).__name__})" for name, layer in _mixing_layers(module, "")]
    if not names:
        return None
    return (
        f"layers that mix the tokens of a sequence, and would see only the tokens of a slice: {in_short(names)}. Only "
        "sliced_attention may do so, or a layer that hands its state on by terapipe_ds.attention.carry "
        "(docs/carried_states.md); set terapipe.slices to 1 to train this model. A layer that is right on slices (it "
        "hands its state on, or mixes features and no tokens) declares this by the class attribute slice_safe = True, "
        "which also covers its submodules."
    )


_STEPS_IN_BACKWARD = "_in_backward_optimizers"  # torch.distributed.optim leaves it at a parameter
_OF_THE_ENGINE = ("deepspeed", "terapipe_ds", "torch", "megatron")  # their hooks know about slices


def problem_of_gradient_hooks(module: nn.Module) -> str | None:
    """Return which trained parameters call a function of the user when they get a gradient; None if none does.

    In slices such a hook is called once for each slice, with an incomplete gradient: an optimizer that steps there
    takes a step per slice.
    """
    hooked = [
        f"{name} ({getattr(hook, '__qualname__', type(hook).__name__)})"
        for name, parameter in module.named_parameters()
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
        if parameter.requires_grad and str(getattr(hook, "__module__", "")).split(".")[0] not in _OF_THE_ENGINE
    ]
    hooked += [f"{name} (an optimizer)" for name, p in module.named_parameters() if hasattr(p, _STEPS_IN_BACKWARD)]
    if not hooked:
        return None
    return (
        f"parameters with hooks by register_post_accumulate_grad_hook: {in_short(hooked)}. They are called once for "
        "each slice, with the gradient of the slices so far: an optimizer that steps there takes a step per slice. "
        "Remove them (DeepSpeed's optimizer steps once per batch), or set terapipe.slices to 1."
    )


_CHANGED_IN_BACKWARD = (
    "changed in a backward: an optimizer that steps there takes a step per slice. Remove it, or set terapipe.slices to "
    "1; then begin anew or load a checkpoint, because the parameters are not as they were"
)


class WrittenParameters:
    """Detect which trained parameters are written to in the backward, by any code. Call it after each action."""

    def __init__(self, module: nn.Module) -> None:
        self._trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
        self._versions = {(name, each._version) for name, each in self._trained.items()}
        self._written: dict[bool, set[str]] = {True: set(), False: set()}  # in forwards, in other actions

    def __call__(self, is_forward: bool) -> None:
        before, self._versions = self._versions, {(name, each._version) for name, each in self._trained.items()}
        self._written[is_forward] |= {name for name, _ in self._versions - before}

    def problem(self, has_copies: bool) -> str | None:
        """Return an error that names these parameters. Parameters that forwards limit may be recomputed."""
        if has_copies and self._written[True]:
            return (
                f"{in_short(sorted(self._written[True]))} changed in a forward, as nn.Embedding with max_norm does. "
                "Under chimera each of two stages would change its own copy, by its own micro-batches: take a schedule "
                "other than chimera and chimera-seq"
            )
        names = sorted(self._written[False] - self._written[True])
        return f"{in_short(names)} {_CHANGED_IN_BACKWARD}" if names else None


class OutsideLayers:
    """Remember, before the first training batch, the state that `module` holds outside its layers.

    The engine trains a loss module, sums it over its copies and saves it. It does so with nothing else outside layers.

    Args:
        has_copies: two stages compute the loss, each of half the micro-batches.
        is_whole: nothing is cut.
        trainer: objects that the engine changes, and the loss may reach.
    """

    def __init__(self, module: Any, has_copies: bool, is_whole: bool, trainer: Iterable[object]) -> None:
        self._module, self._has_copies, self._sees_parts = module, has_copies, has_copies or not is_whole
        self._buffers = {name: each.detach().clone() for name, each in _outside(module.named_buffers())}
        layers = [each for name, each in module.named_modules() if name and layer_of_parameter(name) is not None]
        shared = (part for each in layers for part in getattr(each, "shared_by_copies", ()))  # of the layers as well
        stock = (each for name, each in vars(module).items() if name in OF_DEEPSPEED)
        self._state = KeptState({"": module} if has_copies else {}, apart=(*trainer, *layers, *shared, *stock))
        self._before = self._values()

    def _values(self) -> dict[str, Any]:
        """Return the module's state, and the globals that a loss function names."""
        values, loss_fn = self._state.values(with_entries=True), self._module.loss_fn
        for key in names_in(loss_fn.__code__) if self._has_copies and isinstance(loss_fn, FunctionType) else ():
            values |= leaves(f"global variable {key}", loss_fn.__globals__.get(key), set(), with_entries=True)
        return values

    def problem(self, has_gradient: Callable[[Any], bool]) -> str | None:
        """Return an error about state that this rank alone trains or changes; None if there is none."""
        named = [(n, p) for n, p in _outside(self._module.named_parameters()) if not n.startswith("loss_fn.")]
        if trained := [name for name, each in named if each.requires_grad and has_gradient(each)]:
            return (
                f"{in_short(trained)}: a parameter of the PipelineModule that is in no layer has a gradient. Each "
                "stage would train its own copy, and no checkpoint would have it: move it into a layer, or into a "
                "loss_fn that is an nn.Module"
            )
        now = dict(self._module.named_buffers())
        changed = [n for n, each in self._buffers.items() if n not in now or not same(each, now[n])]
        if changed and self._sees_parts:
            return (
                f"{in_short(changed)}: a buffer outside the layers changes in the first batch. Each call of loss_fn "
                "sees one slice of a sequence, and under chimera runs on one of two stages: keep no statistics there, "
                'or set terapipe.slices to 1 and schedule to "1f1b"'
            )
        reads = getattr(self._module.get_additional_losses, "__code__", None)  # after each call, on both stages
        told = {"reported"} | (set() if reads is None else names_in(reads) - {"loss_fn"})
        changed = [name for name in changes(self._before, self._values()) if told.isdisjoint(name.split("."))]
        if kept := [name for name in changed if name.split(".")[0] not in OF_DEEPSPEED]:
            return (
                f"{in_short(kept)}: state outside the layers changes in the first batch. Under chimera two stages "
                "compute the loss, each of half the micro-batches, and neither sees the state of the other: keep it in "
                "the training loop, or take a schedule other than chimera and chimera-seq"
            )
        return None


def _outside(named: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [(name, each) for name, each in named if layer_of_parameter(name) is None]


HOOKS_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hooks_of_all_modules() -> list[Any]:
    """Return the hooks that torch calls for every module of the process."""
    return [hook for name in HOOKS_OF_MODULES for hook in getattr(nn.modules.module, f"_global{name}", {}).values()]


class ModelChanges:
    """Detect what a program changes in the layers of a stage between batches, because checks hold for what they saw.

    It sees the classes of modules, their forwards and hooks, torch's hooks of all modules, the hooks of parameters,
    which of them are trained, and the loss with its settings. It does not see what a function reads when it runs.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._now: tuple[Any, ...] = ()
        self._last: tuple[Any, ...] = ()
        self._trained_in: dict[tuple[Any, ...], bool] = {}  # False: seen by evaluations alone

    def since_the_last_batch(self) -> int:
        """Return 0 if nothing has changed since the last batch that came, 1 if all is as in an earlier one, else 2.

        An evaluation runs no backward: for training only a training batch counts as an earlier one.
        """
        self._now = tuple(self._all())
        if not (self._trained_in.get(self._now) if self._module.training else self._now in self._trained_in):
            return 2
        return int(self._now != self._last)

    def batch_came(self) -> None:
        """Compare with this batch from now on: its data came, and its checks agreed."""
        self._last = self._now
        self._trained_in[self._now] = self._module.training or self._trained_in.get(self._now, False)

    @property
    def num_trained(self) -> int:
        """Return how many parameters are trained in this batch."""
        return self._now.count(True)

    def _all(self) -> Iterator[Any]:
        yield from map(_code_of, hooks_of_all_modules())
        stack: list[nn.Module | None] = [self._module]  # `modules()` takes several times as long, in each step
        known = set[nn.Module]()
        while stack:
            module = stack.pop()
            if module is None or module in known:
                continue
            known.add(module)
            own = vars(module)
            stack += module._modules.values()
            yield type(module)
            yield getattr(type(module), "forward", None)  # the class of a TorchScript module has none
            yield own.get("scale_grad_by_freq")  # of an embedding, which counts words per slice then
            yield _code_of(own["forward"]) if "forward" in own else None
            for name in HOOKS_OF_MODULES:
                yield from map(_code_of, own[name].values() if own[name] else ())
            for parameter in own["_parameters"].values():
                if parameter is not None:
                    yield parameter.requires_grad
                    for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
                        yield from map(_code_of, hooks.values() if hooks else ())
        yield from map(_code_of, functions_of(self._module))
        yield from kind_of_loss(getattr(self._module, "loss_fn", None))


def kind_of_loss(loss_fn: Any) -> list[Any]:
    """Return values that are equal for loss functions that `ModelChanges` takes for one."""
    return [_code_of(loss_fn), *_settings_of(loss_fn)]


def _code_of(function: Any) -> Any:
    """Return an object that is equal for functions of one code; None for the engine's own.

    Programs add one hook again and again, each time as a new object.
    """
    while isinstance(function, partial):
        function = function.func
    if packages_of(function) <= {"deepspeed", "terapipe_ds"}:
        return None
    return getattr(getattr(function, "__func__", function), "__code__", type(function))


def _settings_of(loss_fn: Any) -> list[tuple[str, str]]:
    """Return, as texts, the settings by name that may tell how a loss reduces, and which labels it ignores.

    Numbers of an object may count its calls, and a program may lower a float with each step.
    """
    keywords: dict[str, Any] = {}
    while isinstance(loss_fn, partial):
        keywords, loss_fn = {**loss_fn.keywords, **keywords}, loss_fn.func
    own = getattr(loss_fn, "__dict__", {}).items()
    settings = [(key, repr(value)) for key, value in own if isinstance(value, str) or key == "ignore_index"]
    return sorted(settings + [(key, repr(value)) for key, value in keywords.items() if isinstance(value, (str, int))])


def _warn_of_unchecked_hooks(module: nn.Module) -> None:
    """Warn of hooks that change the gradient of a parameter, if nothing compares their results."""
    hooked = [name for name, each in module.named_parameters() if each.requires_grad and each._backward_hooks]
    if hooked:
        logger.warning(
            "the gradients of %s pass through hooks, once for each slice. terapipe.verify is off, so that nothing "
            "checks them: a hook that clips or normalises gives other gradients than on whole sequences",
            in_short(hooked),
        )


def check_compile_call(may_cut: bool) -> None:
    """Refuse `engine.compile()` for the same reason as layers that are compiled already."""
    if may_cut:
        raise TeraPipeConfigError(f"with engine.compile() layers {_COMPILED}")


_COMPILED = (
    "are compiled by torch.compile, which knows nothing of slices: it compiles them again for every place of a slice "
    "in the sequence, and gives up after eight. Remove torch.compile and set terapipe.compile to true, which compiles "
    "layers that can be compiled for all slices, or set terapipe.slices to 1"
)


def _compiled(module: nn.Module) -> list[str]:
    """Return the names of compiled modules and functions; importing torch's compiler would take a second."""
    functions = [each for each in functions_of(module) if not isinstance(each, nn.Module)]
    modules = [
        name or type(each).__name__
        for name, each in module.named_modules()
        # the calls of the section's own `compile` have no mark of torch
        if type(each).__name__ == "OptimizedModule"
        or any(map(_is_compiled_function, (each._compiled_call_impl, each.forward)))
    ]
    return modules + [getattr(each, "__name__", repr(each)) for each in functions if _is_compiled_function(each)]


def _is_compiled_function(function: Any) -> bool:
    """Return whether a function is compiled; `torch.compiler.disable` leaves the same mark, and one more."""
    is_disabled = getattr(function, "_torchdynamo_disable", False)
    return hasattr(function, "_torchdynamo_orig_callable") and not is_disabled


def _mixing_layers(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules whose type mixes tokens, with names; none of a class that says it is `slice_safe`."""
    if getattr(module, "slice_safe", False) is True:
        return
    if _mixes_tokens(module):
        yield name, module
    else:
        for child, part in module.named_children():
            yield from _mixing_layers(part, f"{name}.{child}" if name else child)


def _classes_of(module: ModuleType) -> tuple[type, ...]:
    return tuple(c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__)


_PADDING = _classes_of(nn.modules.padding)
_MIXING = (
    nn.RNNBase, nn.RNNCellBase, nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm,
    nn.Upsample, *_classes_of(nn.modules.pooling),
)  # fmt: skip


def _mixes_tokens(module: nn.Module) -> bool:
    """Return whether a layer of torch mixes tokens. A convolution of width 1 is a linear layer."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return any(each != 1 for each in (*module.kernel_size, *module.stride))
    if isinstance(module, (nn.Unfold, nn.Fold)):
        return module.kernel_size not in (1, (1, 1)) or module.stride not in (1, (1, 1))
    if isinstance(module, _PADDING):
        return any(vars(module)["padding"][2:])  # not of the last dimension: nn.ZeroPad2d((0, 0, 1, -1)) shifts tokens
    return isinstance(module, _MIXING)
