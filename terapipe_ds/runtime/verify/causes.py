"""What is likely wrong with a layer whose slices differ from the whole: found by trying it out.

Three kinds of evidence: how the layer answers when tokens change, which of its operations mix tokens, and whether it
agrees once a suspected fault is mended from outside.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from terapipe_ds.runtime.verify.check import Differs, Gradients, LayerCheck, compare_tokens
from terapipe_ds.runtime.verify.layout import Layout, TokenDim, alone, stand_together
from terapipe_ds.runtime.verify.operations import Operation, Recorder, ShiftedPositions, mixing_kinds, most_keys
from terapipe_ds.runtime.verify.runner import Ran, Values

_ROUTER = re.compile(r"rout|gate\b|gating|expert|moe|switch", re.IGNORECASE)
_AUXILIARY = re.compile(r"aux|balanc|z_loss", re.IGNORECASE)
_OWN_LENGTH = "positions are computed from the slice's own length: begin them at active_slice().start"
_SLICED = "call terapipe_ds.attention.sliced_attention(q, k, v, layer)"
_CANNOT = "such a layer cannot be sliced: set terapipe.slices to 1, or replace it"
_AHEAD = {
    "attention": f"attention without a causal mask (bidirectional, or a mask for padding only); {_CANNOT}",
    "normalisation": f"a normalisation or a mean over the sequence; {_CANNOT}",
    "convolution": f"a convolution or shift over tokens that is not causal; {_CANNOT}",
    "running": f"a sum that runs over the tokens backwards, or is divided by all; {_CANNOT}",
    "product": f"a product over all tokens without a causal mask (attention, or a mixing matrix); {_CANNOT}",
}
_BLIND = {
    "attention": f"attention of its own (a softmax over the slice's own tokens), not sliced attention: {_SLICED}",
    "convolution": f"a convolution or shift over tokens, which needs the last tokens of the slice before; {_CANNOT}",
    "running": f"a running sum over tokens, which begins at zero in every slice; {_CANNOT}",
    "product": f"a product over the slice's own tokens (attention without softmax, or a mixing matrix); {_CANNOT}",
    "normalisation": f"a normalisation or a mean over the tokens of the slice; {_CANNOT}",
}
_ORDER = ("attention", "convolution", "running", "normalisation", "product")


def cause_of_output(check: LayerCheck, differs: Differs, whole: Ran) -> str:
    """Why an output differs. ``whole``: the whole run."""
    found, failed = _looked_into(check, lambda: _cause_of_output(check, differs, whole))
    if failed is not None:
        return f"it treats a slice otherwise than a whole sequence ({failed} while that was looked into)"
    return found


def _looked_into(check: LayerCheck, look: Callable[[], str]) -> tuple[str, str | None]:
    """What ``look`` finds; or the class of what it raises, here or on a tensor-parallel peer: a probe feeds inputs that
    the layer may refuse, and the difference stands all the same."""
    found, caught = "", None
    try:
        found = look()
    except Exception as error:
        caught = error
    failed = check.peers.trials.failure(caught, f"looking for the cause of a difference in {check.layer}")
    caught = None
    return found, None if failed is None else failed.kind


def _cause_of_output(check: LayerCheck, differs: Differs, whole: Ran) -> str:
    if _changes(check, whole, lambda tokens, border: tokens):
        return (
            "what it gives changes from call to call: it keeps a state of its own (a counter, a running statistic, a "
            f"power iteration), and slices are more calls than whole sequences; {_CANNOT}"
        )
    if differs.first_token is None:
        return _cause_of_values(check)
    routed = router_of(check.layer.module)
    if differs.first_token < check.runner.plan.lengths[0]:
        return _cause_in_first_slice(check, whole, routed)
    if _agrees_with_shifted_positions(check, whole):
        return _OWN_LENGTH
    keys, stop = _keys_of_slice(check, 1), check.runner.plan.span(1)[1]
    if keys > stop:
        return (
            f"it mixes tokens: it attends to {keys} keys where only {stop} tokens have come: keys and values of a "
            f"slice are kept more than once; {_SLICED}"
        )
    kinds = _kinds(check)
    if routed is not None and "routing" in kinds:
        return _capacity(routed)
    if not _whole_mixes(check, whole, differs.first_token):
        return "it treats each token alone, but not as in the whole sequence"
    sliced = _uses_sliced_attention(check)
    if sliced:
        kinds -= {"attention", "product"}  # what the whole run does in its place
    for kind in _ORDER:
        if kind in kinds:
            return f"it mixes tokens: {_BLIND[kind]}"
    if sliced:
        return (
            "it uses sliced_attention and no other operation that is known to mix tokens: "
            f"either {_OWN_LENGTH}; or a shift or a recurrence over tokens is written by hand; {_CANNOT}"
        )
    if routed is not None:
        return _capacity(routed)
    return f"it mixes tokens otherwise than by sliced_attention; {_CANNOT}"


def _cause_of_values(check: LayerCheck) -> str:
    """An output without tokens that does not add up over slices."""
    routed = router_of(check.layer.module)
    if routed is not None or _AUXILIARY.search(_words(check.layer.module)):
        return (
            "a router loss or another auxiliary loss over the tokens of one forward pass does not add up over slices "
            "with the weights of their losses; compute it per token and average it in loss_fn, or set its weight to 0"
        )
    return (
        "it mixes tokens: it gives one value for all tokens of a forward pass (a pooled state, an auxiliary or router "
        "loss), which does not add up over slices with the weights of their losses"
    )


def _cause_in_first_slice(check: LayerCheck, whole: Ran, routed: str | None) -> str:
    """The first slice has no prefix: alone it must give what it gives in the whole sequence."""
    kinds = _kinds(check)
    if routed is not None and "routing" in kinds:
        return _capacity(routed)
    if not _changes(check, whole, _flip_later, before=check.runner.plan.lengths[0]):
        return (
            "what it gives for a token depends on how many tokens come with it: positions or scales from the length of "
            "its input; take active_slice().start and .sequence_length"
        )
    for kind in _ORDER:
        if kind in kinds:
            return f"it mixes tokens: early outputs change with later tokens: {_AHEAD[kind]}"
    return (
        "it mixes tokens: early outputs change with later tokens: attention without a causal mask, a normalisation "
        f"over the sequence, or a convolution that is not causal; {_CANNOT}"
    )


def _capacity(routed: str) -> str:
    return (
        f"a router ({routed}) whose capacity or choice depends on the other tokens of a forward pass; route without "
        "capacity, each token for itself"
    )


def cause_of_gradient(check: LayerCheck, differs: Differs, whole: Gradients) -> str:
    """Why a gradient differs although outputs agree."""
    found, failed = _looked_into(check, lambda: _cause_of_gradient(check, differs, whole))
    return found if failed is None else f"outputs agree: look at its backward ({failed} in a probe)"


def _cause_of_gradient(check: LayerCheck, differs: Differs, whole: Gradients) -> str:
    if check.runner.checkpoint is not None and _agrees_without_checkpointing(check):
        return (
            "it agrees without activation checkpointing: its second forward changes what it keeps between slices (keys "
            "and values appended twice); use sliced_attention, or look at active_slice().mode"
        )
    routed = router_of(check.layer.module)
    if routed is not None or _AUXILIARY.search(_words(check.layer.module) + differs.what):
        return (
            f"outputs agree: a router loss or another auxiliary loss ({routed or 'its own'}) reaches the gradients, "
            "over the tokens of one forward pass instead of the whole sequence; set its weight to 0, or compute it per "
            "token"
        )
    share = _share_of_later_slices(check)
    if share is not None and abs(share - 1.0) > 0.1:
        named = "lost" if abs(share) < 0.1 else "counted twice" if abs(share - 2.0) < 0.1 else None
        got = named or f"{share:.2g} of the right one"
        return (
            f"outputs agree, but the gradient that later slices give to earlier tokens is {got}: a detached prefix, or "
            "a backward of its own (autograd.Function) that drops or doubles dK and dV of the prefix; use "
            "sliced_attention"
        )
    if differs.what.startswith("gradient of"):
        return (
            "outputs and input gradients agree: gradients of this parameter are not added up over slices: a hook, or a "
            "backward of its own that overwrites .grad or scales by the number of tokens"
        )
    return "outputs agree: a backward of its own (autograd.Function, a hook) depends on the tokens of one forward pass"


# -- probes ----------------------------------------------------------------------------------------------------------


def router_of(module: nn.Module | None) -> str | None:
    """The submodule or attribute of a layer that looks like a router of experts."""
    if module is None:
        return None
    for name, _ in module.named_modules():
        if name and _ROUTER.search(name.rsplit(".", 1)[-1]) and not _is_mlp_gate(name, module):
            return name
    for part in module.modules():
        if _ROUTER.search(type(part).__name__):
            return type(part).__name__
    for name, _ in module.named_parameters():
        if re.search("rout|expert", name, re.IGNORECASE):
            return name
    return "get_additional_losses" if hasattr(module, "get_additional_losses") else None


def _is_mlp_gate(name: str, module: nn.Module) -> bool:
    """SwiGLU has a linear layer that is called gate as well; it is as wide as the one beside it."""
    *_, last = name.split(".")
    part = module.get_submodule(name)
    wide = getattr(part, "out_features", 0) >= getattr(part, "in_features", 1)
    return last.startswith("gate") and wide


def _words(module: nn.Module | None) -> str:
    if module is None:
        return ""
    return " ".join([type(module).__name__, *(n for n, _ in module.named_modules()), *vars(module)])


def _kinds(check: LayerCheck) -> set[str]:
    """How the layer mixes tokens, by its operations on the whole sequence and on the first slice as a sequence."""
    plan = check.runner.plan
    first = plan.lengths[0]
    long = _record(lambda: check.run_whole())
    alone_ = check.runner.whole_sequence(first)
    short = _record(lambda: check.runner.forward(check.layer, check.slice_inputs(0), alone_))
    return mixing_kinds(long, short, (plan.sequence_length, first))


def _record(run: Callable[[], Any]) -> list[Operation]:
    with Recorder() as recorder:
        run()
    return recorder.operations


def _run_slices(
    check: LayerCheck, only_until: int | None = None,
    around: Callable[[int], AbstractContextManager[Any]] = lambda slice_id: nullcontext(),
) -> list[Ran]:  # fmt: skip
    """The slices once more, in a store of their own; ``around``: a context for each slice."""
    ran = []
    with check.runner.fresh_store():
        for i in range(check.runner.plan.num_slices if only_until is None else only_until):
            with around(i):
                ran.append(check.runner.forward(check.layer, check.slice_inputs(i), check.runner.slice(i)))
    return ran


def _agrees_with_shifted_positions(check: LayerCheck, whole: Ran) -> bool:
    plan, modes = check.runner.plan, []

    def around(slice_id: int) -> ShiftedPositions:
        start, stop = plan.span(slice_id)
        modes.append(ShiftedPositions(start, stop - start, plan.sequence_length))
        return modes[-1]

    parts = _run_slices(check, around=around)
    agrees = any(mode.shifted for mode in modes) and _same_outputs(check, whole, parts)
    return not check.peers.any(not agrees)


def _same_outputs(check: LayerCheck, whole: Ran, parts: list[Ran]) -> bool:
    same = True
    for j, layout in enumerate(check.output_layouts):
        if isinstance(layout, TokenDim) and whole.outputs[j].is_floating_point():
            together = stand_together(layout, [part.outputs[j].detach() for part in parts], check.weights, check.peers)
            expected = alone(layout, whole.outputs[j].detach(), check.peers)
            same = same and compare_tokens("output", together, expected, check.tolerance()) is None
    return same


def _keys_of_slice(check: LayerCheck, slice_id: int) -> int:
    recorder = Recorder()
    _run_slices(
        check, only_until=slice_id + 1, around=lambda i: recorder if i == slice_id else nullcontext()
    )
    return most_keys(recorder.operations)


def _changes(
    check: LayerCheck, whole: Ran, change: Callable[[Tensor, int], Tensor], before: int = 0, after: int = 0
) -> bool:
    """Whether outputs of the whole run before (or from) a token change when the inputs after (or before) it do."""
    border = before or after
    ran = check.runner.forward(check.layer, _changed(check, change, border), check.runner.whole_sequence())
    part = slice(0, before) if before else slice(after, None)
    found = False
    for j, layout in enumerate(check.output_layouts):
        if isinstance(layout, TokenDim):
            a, b = (alone(layout, out.detach(), check.peers) for out in (ran.outputs[j], whole.outputs[j]))
            found = found or compare_tokens("output", a[part], b[part], check.tolerance()) is not None
    return check.peers.any(found)


def _changed(check: LayerCheck, change: Callable[[Tensor, int], Tensor], border: int) -> Values:
    def changed(layout: Layout, tensor: Tensor) -> Tensor:
        if not isinstance(layout, TokenDim) or layout.shared_by > 1:
            return tensor
        tokens = change(layout.tokens_first(tensor.detach()), border)
        return layout.back(tokens).requires_grad_(tensor.requires_grad)

    pairs = zip(check.layouts, check.inputs.tensors, strict=True)
    return check.inputs.with_tensors([changed(layout, t) for layout, t in pairs])


def _other(tokens: Tensor) -> Tensor:
    """Other values of the same kind: those of other tokens, of another sign and size; or one for all, where they are
    numbers of words: a layer that counts words does not see that they change places."""
    return tokens.flip(0) * -1.5 if tokens.is_floating_point() else tokens[:1].expand_as(tokens)


def _flip_later(tokens: Tensor, border: int) -> Tensor:
    return torch.cat([tokens[:border], _other(tokens[border:])])


def _flip_earlier(tokens: Tensor, border: int) -> Tensor:
    return torch.cat([_other(tokens[:border]), tokens[border:]])


def _whole_mixes(check: LayerCheck, whole: Ran, token: int) -> bool:
    """Whether tokens of the whole run depend on those before the slice that ``token`` is in."""
    plan = check.runner.plan
    starts = [plan.span(i)[0] for i in range(plan.num_slices)]
    return _changes(check, whole, _flip_earlier, after=max(start for start in starts if start <= token))


def _uses_sliced_attention(check: LayerCheck) -> bool:
    """Whether slices leave keys and values in the slice store."""
    with check.runner.fresh_store():
        check.runner.forward(check.layer, check.slice_inputs(0), check.runner.slice(0))
        return check.runner.store.live_bytes() > 0


def _agrees_without_checkpointing(check: LayerCheck) -> bool:
    checkpoint, check.runner.checkpoint = check.runner.checkpoint, None
    try:
        whole = check.run_whole()
        gradients = check.gradients_of_outputs(whole)
        parts = _run_slices(check)
        expected = check.backward_whole(whole, gradients)
        differs = check.compare_gradients(expected, check.backward_slices(parts, gradients))
        return check.peers.first(differs) is None
    finally:
        check.runner.checkpoint = checkpoint


def _share_of_later_slices(check: LayerCheck) -> float | None:
    """How much of the gradient that the last slice owes to the tokens before it arrives; None where it owes none.

    With an output gradient on the last slice alone, that of earlier inputs comes through keys and values only.
    """
    whole = check.run_whole()
    start = check.runner.plan.span(check.runner.plan.num_slices - 1)[0]
    gradients = {}
    for j, gradient in check.gradients_of_outputs(whole).items():
        layout = check.output_layouts[j]
        if isinstance(layout, TokenDim) and layout.shared_by == 1:
            tokens = layout.tokens_first(gradient).clone()
            tokens[:start] = 0
            gradients[j] = layout.back(tokens)
    parts = _run_slices(check)
    expected, sliced = check.backward_whole(whole, gradients), check.backward_slices(parts, gradients)
    for layout, a, b in zip(check.layouts, sliced.inputs, expected.inputs, strict=True):
        if a is None or b is None or not isinstance(layout, TokenDim):
            continue
        early_a, early_b = a[:start].double().flatten(), alone(layout, b, check.peers)[:start].double().flatten()
        if float(early_b.norm()) > 0:
            return float(early_a @ early_b / (early_b @ early_b))
    return None
