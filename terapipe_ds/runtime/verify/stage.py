"""All layers of one stage, each whole against sliced, with the inputs that the whole run gives it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from terapipe_ds.attention import PlainAttentionError, guard_plain_attention
from terapipe_ds.attention.guard import GuardCapturedNames
from terapipe_ds.runtime.trials import Failure
from terapipe_ds.runtime.verify.causes import cause_of_gradient, cause_of_output
from terapipe_ds.runtime.verify.check import Differs, LayerCheck, in_fp32, without_random_numbers
from terapipe_ds.runtime.verify.layout import ALONE, Layout, PerSlice, TensorPeersOf
from terapipe_ds.runtime.verify.losses import LossCheck
from terapipe_ds.runtime.verify.runner import NamedLayer, Runner, Values

_NO_MEMORY = "there is not enough memory beside what training needs"
_CAUSES_TRIED = 4  # layers of a stage whose fault is looked into; after one, the others are often the same


@dataclass(frozen=True)
class Finding:
    """One layer, or the loss, that differs. ``layer_id`` orders findings; ``cause`` is empty where none was looked for.

    ``raised``: the layer did not run at all, but raised an error of class ``kind``.
    """

    layer_id: int
    layer: str
    problem: str
    cause: str = ""
    raised: bool = False
    kind: str = ""

    @property
    def is_of_the_cut(self) -> bool:
        """Whether it may be that the layer cannot run on so few tokens, and is right where it can."""
        return self.raised and self.kind != PlainAttentionError.__name__

    def __str__(self) -> str:
        return f"{self.layer}: {self.problem}" + (f": {self.cause}" if self.cause else "")


@dataclass
class Inputs:
    """What a stage begins with: the values of the whole sequence, and how slices are cut from them."""

    values: Values
    layouts: list[Layout]

    def to(self, device: torch.device) -> Inputs:
        """Copies on ``device``, which share memory with nothing."""
        moved = [t.detach().to(device, copy=True).requires_grad_(t.requires_grad) for t in self.values.tensors]
        layouts = [
            PerSlice(tuple(v.detach().to(device) for v in each.values)) if isinstance(each, PerSlice) else each
            for each in self.layouts
        ]
        return Inputs(self.values.with_tensors(moved), layouts)


@dataclass
class StageFindings:
    """What one stage found; ``outputs`` is what it hands on, None where a layer could not run."""

    num_layers: int = 0  # that were compared
    num_losses: int = 0
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    in_fp32_too: int = 0  # layers in half precision that were checked in fp32 as well
    without_dropout: int = 0  # layers that draw random numbers, checked in evaluation mode
    outputs: Inputs | None = None
    loss_waits: bool = False  # nothing could be compared on this batch, but may be on another
    loss_layouts: list[Layout] | None = None  # of the outputs, with which the loss of slices is that of the whole
    error: BaseException | None = None

    def add(self, part: StageFindings) -> None:
        """Of one more part of the stage; what it hands on is not the stage's."""
        self.num_layers += part.num_layers
        self.num_losses += part.num_losses
        self.findings += part.findings
        self.notes += part.notes
        self.in_fp32_too += part.in_fp32_too
        self.without_dropout += part.without_dropout
        self.loss_waits = self.loss_waits or part.loss_waits
        self.error = self.error or part.error


def check_stage(
    runner: Runner,
    layers: Sequence[tuple[NamedLayer, Callable[..., Any] | None]],
    inputs: Inputs,
    weights: Sequence[float],
    peers: TensorPeersOf = ALONE,
    watched: Callable[[str], None] = lambda text: None,
) -> StageFindings:
    """Check the layers one after the other. Use it inside ``untouched(runner.module)``.

    Args:
        layers: each with the activation checkpointing that training runs it under, or None.
        weights: of the slices' losses.
        watched: told which layer it is.
    """
    stage = StageFindings()
    for layer, checkpoint in layers:
        watched(f"verifying {layer}")
        runner.checkpoint = checkpoint
        check = LayerCheck(runner, layer, inputs.values, inputs.layouts, weights, peers)
        found = caught = None
        try:
            with guard_plain_attention(), GuardCapturedNames():
                found = _check_layer(check, look_for_cause=len(stage.findings) < _CAUSES_TRIED, stage=stage)
        except Exception as error:
            stage.error = caught = error
        finally:
            runner.store.reset()
        failed = peers.trials.failure(caught, f"verifying {layer}")
        if failed is not None and failed.kind == torch.OutOfMemoryError.__name__:
            caught = stage.error = None  # and with it what the layer kept
            stage.notes.append(f"{layer}: not checked: {_NO_MEMORY}")
            if not _forward_only(check, f"running {layer} once more"):
                return stage
            inputs = Inputs(check.outputs, check.output_layouts)
            continue
        if failed is not None:
            finding = Finding(layer.layer_id, str(layer), _raised(failed), _cause_of(caught), True, failed.kind)
            stage.findings.append(finding)
            return stage
        if found is None:
            found = _not_a_number(layer, check.outputs.tensors)
        if found is not None:
            stage.findings.append(found)
        if check.skipped:
            stage.notes.append(f"{layer}: {check.skipped}")
        stage.without_dropout += check.without_dropout
        stage.num_layers += not check.skipped
        inputs = Inputs(check.outputs, check.output_layouts)
    stage.outputs = inputs
    return stage


def _forward_only(check: LayerCheck, what: str) -> bool:
    """Find out what the layer gives, without graphs; False where it cannot run even so."""
    caught = None
    try:
        with torch.no_grad():
            check.compare_outputs(check.run_whole(), check.run_slices())
    except Exception as error:
        caught = error
    finally:
        check.runner.store.reset()
    return check.peers.trials.failure(caught, what) is None


def _not_a_number(layer: NamedLayer, outputs: Sequence[Tensor]) -> Finding | None:
    """NaN on the whole sequence equals nothing, so that no comparison means anything. (Infinities may be masks.)"""
    if not any(t.isnan().any() for t in outputs if t.is_floating_point()):
        return None
    cause = "nothing can be compared; look for the cause in the layer, its weights or the batch (check_finite helps)"
    return Finding(layer.layer_id, str(layer), "output of the whole sequence holds NaN", cause)


def run_stage(
    runner: Runner,
    layers: Sequence[tuple[NamedLayer, Callable[..., Any] | None]],
    inputs: Inputs,
    peers: TensorPeersOf = ALONE,
) -> StageFindings:
    """Run the layers on the whole sequence, forward only, for what the loss is compared on.

    A layer that cannot do so is a note and not a finding: nobody asked for a check of the layers.
    """
    stage = StageFindings()
    for layer, _ in layers:
        caught, runner.checkpoint = None, None
        try:
            with torch.no_grad():
                inputs = Inputs(runner.forward(layer, inputs.values, runner.whole_sequence()).values(), [])
        except Exception as error:
            caught = error
        finally:
            runner.store.reset()
        failed = peers.trials.failure(caught, f"running {layer} for a look at the loss")
        if failed is not None:
            stage.notes.append(f"the loss was not compared: {layer} {_raised(failed)}")
            return stage
    stage.outputs = inputs
    return stage


def check_loss(
    stage: StageFindings, check: Callable[[Inputs], LossCheck], layer_id: int, peers: TensorPeersOf = ALONE
) -> None:
    """The loss of the last stage on what its layers gave, for which :func:`check_stage` has found out how slices are
    cut from it."""
    assert stage.outputs is not None
    _try_loss(stage, [check(stage.outputs)], layer_id, peers, raising_is_a_finding=True)


def look_at_loss(
    stage: StageFindings, check: Callable[[Inputs], LossCheck], layer_id: int, layouts: Sequence[list[Layout]],
    peers: TensorPeersOf = ALONE,
) -> None:  # fmt: skip
    """The loss on what :func:`run_stage` gave; ``layouts``: all ways in which its tokens may lie. One that agrees is
    the right one."""
    assert stage.outputs is not None
    checks = [check(Inputs(stage.outputs.values, each)) for each in layouts]
    if checks:
        _try_loss(stage, checks, layer_id, peers, raising_is_a_finding=False)
    else:
        stage.notes.append("the loss was not compared: no output of the last layer has the tokens of the sequence")


def _try_loss(
    stage: StageFindings, checks: Sequence[LossCheck], layer_id: int, peers: TensorPeersOf, raising_is_a_finding: bool
) -> None:
    """Until one agrees; else the first one counts that could be compared.

    ``raising_is_a_finding`` False: layouts are guessed, and nobody asked for more than a look.
    """
    found: list[Finding] = []
    notes: list[str] = []
    for check in checks:
        differs, failed = _ran(stage, check, peers)
        if failed is None and differs is None and not check.skipped:
            differs = _differs_in_fp32(check, peers)
        if failed is None and differs is None:
            stage.notes += [check.skipped] if check.skipped else []
            stage.num_losses += not check.skipped
            stage.loss_waits = bool(check.skipped)
            stage.loss_layouts = None if check.skipped else list(check.layouts)
            return
        if differs is not None:
            found.append(Finding(layer_id, "loss_fn", str(differs[0]), differs[1]))
        elif failed is not None and failed.kind == torch.OutOfMemoryError.__name__:
            stage.error = None
            notes.append(f"the loss was not compared: {_NO_MEMORY}")
        elif failed is not None and raising_is_a_finding:
            found.append(Finding(layer_id, "loss_fn", _raised(failed), raised=True, kind=failed.kind))
        elif failed is not None:
            notes.append(f"the loss was not compared: loss_fn {_raised(failed)}")
    whole = checks[0].without_tokens()
    if found and whole and not raising_is_a_finding:
        found, notes = [], [f"the loss was not compared: output {whole[0]} of the last layer has no tokens"]
    stage.findings += found[:1]
    stage.notes += notes[:1] if not found else []


def _ran(
    stage: StageFindings, check: LossCheck, peers: TensorPeersOf
) -> tuple[tuple[Differs, str] | None, Failure | None]:
    differs = caught = None
    try:
        differs = check.run()
    except Exception as error:
        stage.error = caught = error
    return differs, peers.trials.failure(caught, "verifying the loss")


def _differs_in_fp32(check: LossCheck, peers: TensorPeersOf) -> tuple[Differs, str] | None:
    """What half precision hides, where ``loss_fn`` takes fp32 and computes in it."""
    wide, differs, caught = check.in_fp32(), None, None
    if wide is None:
        return None
    try:
        differs = None if peers.any(wide.runs_in_half()) else wide.run()
    except Exception as error:
        caught = error
    failed = peers.trials.failure(caught, "verifying the loss in fp32")
    if failed is not None or differs is None:
        return None
    what, cause = differs
    return replace(what, what=f"{what.what}, on outputs in fp32,"), cause


def _check_layer(check: LayerCheck, look_for_cause: bool, stage: StageFindings) -> Finding | None:
    found = _compare(check, look_for_cause)
    if found is None and not check.skipped:
        with in_fp32(check) as wide:
            if not check.peers.any(wide is None):
                assert wide is not None
                stage.in_fp32_too += 1
                wide.runner.store.reset()
                found = _compare(wide, look_for_cause, hint=" (seen in fp32, below the rounding of half precision)")
    return found


def _compare(check: LayerCheck, look_for_cause: bool, hint: str = "") -> Finding | None:
    """The first difference: of the outputs, else of the gradients."""
    whole = without_random_numbers(check)
    parts = check.run_slices()
    differs: Differs | None = check.compare_outputs(whole, parts)
    if check.skipped:
        return None
    differs = check.peers.first(differs)
    if differs is not None:
        cause = cause_of_output(check, differs, whole) if look_for_cause else ""
        return Finding(check.layer.layer_id, str(check.layer), str(differs) + hint, cause)
    gradients = check.gradients_of_outputs(whole)
    if not gradients:
        return None
    expected = check.backward_whole(whole, gradients)
    differs = check.peers.first(check.compare_gradients(expected, check.backward_slices(parts, gradients)))
    if differs is None:
        return None
    cause = cause_of_gradient(check, differs, expected) if look_for_cause else ""
    return Finding(check.layer.layer_id, str(check.layer), str(differs) + hint, cause)


def _raised(failed: Failure) -> str:
    return f"raised {failed}" if failed.rank is None else f"raised on {failed}"


def _cause_of(error: BaseException | None) -> str:
    """For errors whose text does not tell: where they come from."""
    if error is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    if "backward through the graph a second time" in str(error):
        return "it keeps tensors with their graph from one slice to the next: use sliced_attention for keys and values"
    return f"in {last.name}, {last.filename}:{last.lineno}" if last is not None else ""
