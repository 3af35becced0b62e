"""Apply activation checkpointing under slices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from terapipe_ds.attention.kept import KeptAttention, KeptCalls
from terapipe_ds.compat.replaced import replaced
from terapipe_ds.config import TeraPipeConfig, TeraPipeConfigError
from terapipe_ds.config.combinations import INTERVAL, problem_of_reentry
from terapipe_ds.files.user_json import value_at
from terapipe_ds.messages import logger
from terapipe_ds.runtime.layout.parted_module import PartedModule


class RandomStates(Protocol):
    """Declare the named random states of a model, as Megatron's tracker holds them."""

    def get_states(self) -> dict[str, Any]:
        """Return a dict of its own with the states."""

    def set_states(self, states: dict[str, Any]) -> None:
        """Take the dict."""


_OWN_INTERVAL = "_terapipe_own_interval"  # attribute of a module: its interval before `recompute` changed it
_KEPT_CALLS = "_terapipe_kept_calls"


def set_recompute(
    module: PipelineModule, config: TeraPipeConfig, raw: Mapping[str, Any], *, stands_for_all: bool = False
) -> None:
    """Let the layers of this stage be checkpointed one by one, or not at all, if `config` says so.

    Call it before DeepSpeed's engine is built, which then checkpoints as if the module had been built in this way.

    Args:
        raw: DeepSpeed's config, whose `pipeline.activation_checkpoint_interval` counts before that of the module.
        stands_for_all: the one stage has the layers of all stages, and recomputes if some stage may.

    Raises:
        TeraPipeConfigError: the module does not have a named stage, or a different interval is set as well.
    """
    # a second engine may get the same module: the interval that the first one set is not the module's own
    own = getattr(module, _OWN_INTERVAL, module.activation_checkpoint_interval)
    module.activation_checkpoint_interval = own
    setattr(module, _KEPT_CALLS, KeptCalls() if config.keep_attention else None)
    if config.keep_attention:
        _require_reentrant(module)
    recomputing = config.recomputing_stages(module.num_stages, raw, own, stands_for_all=stands_for_all)
    if recomputing is None:
        if config.keep_attention and not (own or value_at(raw, INTERVAL)):
            raise TeraPipeConfigError(
                'terapipe.keep_attention = true: no layer is recomputed by DeepSpeed; set terapipe.recompute to "full" '
                "or to the stages that recompute, or leave keep_attention out"
            )
        return
    if config.recompute == "auto" and module.checkpointable_layers is not None:
        raise TeraPipeConfigError(
            f"terapipe.recompute = 'auto': the module has checkpointable_layers = {module.checkpointable_layers}, but "
            "the planner chooses the layers; leave one of the two out"
        )
    setattr(module, _OWN_INTERVAL, own)
    module.activation_checkpoint_interval = int(module.stage_id in recomputing)


def forget_recompute(module: PipelineModule) -> None:
    """Let the layers of `module` be checkpointed as before `set_recompute` and `recompute_layers`."""
    vars(module).pop(_KEPT_CALLS, None)
    own = vars(module).pop(_OWN_INTERVAL, None)
    if own is not None:
        module.is_checkpointable_results, module.is_checkpointable_results_interval = [], None
        module.set_checkpoint_interval(own)


def _require_reentrant(module: PipelineModule) -> None:
    """Raise TeraPipeConfigError for non-reentrant checkpoints: their first run has a graph already."""
    function = module.activation_checkpoint_func
    options = getattr(function, "keywords", {})
    if function is ds_checkpointing.non_reentrant_checkpoint or options.get("use_reentrant") is False:
        raise TeraPipeConfigError(problem_of_reentry("the module's activation_checkpoint_func"))


def kept_calls(module: Any) -> KeptCalls | None:
    """Return the count of kept calls on this stage; None if layers that recompute keep nothing, on any stage."""
    return getattr(module, _KEPT_CALLS, None)


def keeps_attention(module: Any) -> bool:
    """Return whether layers of this stage recompute and keep their attention: its active slices say so."""
    return kept_calls(module) is not None and module.activation_checkpoint_interval > 0


def warn_if_none_is_kept(module: Any, stage_id: int) -> None:
    """Warn once, after a training batch, if layers of this stage should keep their attention and none did."""
    calls = kept_calls(module)
    if calls is None or calls.num or calls.has_warned or not keeps_attention(module):
        return
    calls.has_warned = True
    logger.warning(
        f"stage {stage_id}: terapipe.keep_attention = true, but no layer here keeps attention: only calls of "
        "sliced_attention() are kept, and only in checkpointed ranges with an input that requires a gradient. All of "
        "the forward runs again; gradients are right."
    )


def recompute_layers(module: PipelineModule, layers: Collection[int]) -> None:
    """Let DeepSpeed checkpoint exactly these layers of the model from the next forward on, each by itself.

    Layers of other stages do not matter. DeepSpeed keeps a flag per interval of layers, here of one layer each.
    """
    # DeepSpeed asks these flags when it runs a range, and not the interval
    flags = [layer_id in layers for layer_id in range(module._local_start, module._local_stop)]
    module.activation_checkpoint_interval = int(any(flags))
    module.is_checkpointable_results = flags if any(flags) else []
    module.is_checkpointable_results_interval = module.activation_checkpoint_interval or None
    if isinstance(module, PartedModule):  # it may activate the part again
        module.held_parts[module.active_chunk].checkpointable = module.is_checkpointable_results


def checkpointing_with_gradients(module: Any, offloads: bool = False) -> AbstractContextManager[None]:
    """Return a context for a forward, in which a `PipelineModule` checkpoints by `checkpoint_with_gradients`."""
    # only during a forward: DeepSpeed recognises reentrant checkpointing by the identity of the module's function
    checkpoint = getattr(module, "activation_checkpoint_func", None)
    if checkpoint is None:  # a measured module of another kind
        return nullcontext()
    ours = checkpoint_with_gradients(checkpoint, offloads, kept_calls(module), getattr(module, "rng_trackers", ()))
    return replaced(module, "activation_checkpoint_func", ours)


def checkpoint_with_gradients(
    checkpoint: Callable[..., Any],
    offloads: bool = False,
    kept: KeptCalls | None = None,
    rng_trackers: Sequence[RandomStates] = (),
) -> Callable[..., Any]:
    """Return `checkpoint`, but non-reentrant for ranges none of whose inputs requires a gradient.

    A reentrant checkpoint cuts such a range out of the graph, so that its parameters (an embedding fed by token ids)
    never get a gradient. The recomputation runs under the autocast of the forward, which DeepSpeed forgets.

    With `offloads`, torch's reentrant checkpoint stands in for DeepSpeed's, which holds the inputs of a range itself:
    autograd has to save them, so that they go to the host. With `kept`, which counts calls, the
    second run takes the results of attention from the first one. A non-reentrant range runs all of its attention again.
    Checkpoints put back torch's random state and DeepSpeed's; `rng_trackers` are the other ones of the model.
    """
    is_reentrant = checkpoint is ds_checkpointing.checkpoint
    if offloads and is_reentrant and not ds_checkpointing.get_cuda_rng_tracker().get_states():
        checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)

    def checkpoint_range(function: Callable[..., Any], *inputs: Any) -> Any:
        function = _with_the_same_draws(_under_the_same_autocast(function), rng_trackers)
        if torch.is_grad_enabled() and not any(torch.is_tensor(t) and t.requires_grad for t in inputs):
            return ds_checkpointing.non_reentrant_checkpoint(function, *inputs)
        function = _with_plain_outputs(function) if is_reentrant else function
        return checkpoint(function if kept is None else KeptAttention(kept).around(function), *inputs)

    return checkpoint_range


def _with_plain_outputs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` for a reentrant checkpoint, which cuts tensors within other outputs out of the graph.

    A parameter among the outputs becomes a view: torch would make the parameter itself a result of the checkpoint.
    """

    def run(*inputs: Any) -> Any:
        outputs = function(*inputs)
        outputs = tuple(outputs) if isinstance(outputs, list) else outputs
        others = [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if not torch.is_tensor(o)]
        if any(torch.is_tensor(leaf) and leaf.requires_grad for leaf in tree_leaves(others)):  # in the second run
            raise TeraPipeConfigError(
                "a layer that recomputes returns a dict, or tensors inside of a tuple's elements, which would get no "
                'gradient: return a tensor or a flat tuple, or set "pipeline": {"use_reentrant": false}'
            )
        return tree_map_only(nn.Parameter, lambda parameter: parameter.view_as(parameter), outputs)

    return run


def _with_the_same_draws(function: Callable[..., Any], trackers: Sequence[RandomStates]) -> Callable[..., Any]:
    """Return `function`, whose later runs draw from `trackers` the numbers of its first run, and put them back."""
    first: list[dict[str, Any]] = []

    def run(*inputs: Any) -> Any:
        if not first:
            first.extend(tracker.get_states() for tracker in trackers)
            return function(*inputs)
        with tracker_states_kept(trackers):
            for tracker, states in zip(trackers, first, strict=True):
                tracker.set_states(dict(states))  # drawing changes the dict
            return function(*inputs)

    return run


@contextmanager
def tracker_states_kept(trackers: Sequence[RandomStates]) -> Iterator[None]:
    """Restore the random states of `trackers`, from which layers draw for dropout, at the end."""
    before = [tracker.get_states() for tracker in trackers]
    try:
        yield
    finally:
        for tracker, states in zip(trackers, before, strict=True):
            tracker.set_states(states)


def _under_the_same_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    device = get_accelerator().device_name()
    if not torch.is_autocast_enabled(device):
        return function
    return torch.autocast(device, dtype=torch.get_autocast_dtype(device))(function)
