"""Check the layers of one stage and the loss, and describe the findings of all ranks in words.

Each layer gets its inputs from the run on the whole sequence.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from terapipe_ds.attention import ActiveSlice, PlainAttentionError, guard_plain_attention
from terapipe_ds.attention.plain_attention_guard import GuardCapturedNames
from terapipe_ds.plan import SlicePlan
from terapipe_ds.runtime.batch.cut_tensors import SliceableTensors
from terapipe_ds.runtime.batch.loss_weights import LossKindError, weighted_loss
from terapipe_ds.runtime.failures.trials import TrialFailure
from terapipe_ds.runtime.layers.weight_gradients import WeightGradients
from terapipe_ds.runtime.verify.compare import Difference, first_sentence
from terapipe_ds.runtime.verify.cut import Cut
from terapipe_ds.runtime.verify.labels import LabelProbe, compare_everywhere
from terapipe_ds.runtime.verify.layer import LayerCheck, OtherOutput, UncutOutput
from terapipe_ds.runtime.verify.loss import LossAfterLayers, LossCheck, LossOfHiddenCheck, joined
from terapipe_ds.runtime.verify.named_layer import NamedLayer, chained
from terapipe_ds.runtime.verify.tokens import Activations, Same, Slicing, TokenDim, alone

_T = TypeVar("_T")
_NO_MEMORY = torch.OutOfMemoryError.__name__
_SHOWN = 5  # findings in a report
_MOST_LINES = 8  # of an error; torch lists the abilities of each backend
_REMEDY = "use sliced_attention and active_slice(), or set terapipe.slices to 1"
_NO_SHARE = (
    "which is no share of that of the whole sequence (a mean, a balance of experts): hand on what each token adds to "
    "it, with sums carried over slices (docs/auxiliary_losses.md), or set terapipe.slices to 1"
)
_CARRY = "hand them on by terapipe_ds.attention.carry (docs/carried_states.md), or set terapipe.slices to 1"


_LEFT_ELSEWHERE = (
    "right after the layers, as training runs it, though it agrees on their outputs: loss_fn reads what layers leave "
    "elsewhere (an auxiliary loss in a list or an attribute), which is of one slice; hand it on with the outputs "
    "(docs/auxiliary_losses.md), or set terapipe.slices to 1"
)


class VerifyError(ValueError):
    """Say that slices give another result than whole sequences; the text names the first layer that differs."""


@dataclass(frozen=True, order=True)
class Finding:
    """Name a layer, or the loss, that differs or that raised an error of the class `raised`."""

    layer_id: int
    layer: str
    problem: str
    raised: str = ""

    @property
    def is_of_the_cut(self) -> bool:
        """Return whether the layer may only be unable to run on so few tokens."""
        return self.raised not in ("", PlainAttentionError.__name__)

    def __str__(self) -> str:
        return f"{self.layer}: {self.problem}"


@dataclass
class Findings:
    """Collect the findings of one rank, or of all ranks, and describe them in words."""

    with_layers: bool = True  # layers are compared, not the loss alone
    cut: Cut | None = None  # None if every sequence runs in one slice
    num_layers: int = 0
    num_losses: int = 0
    without_dropout: int = 0  # layers that draw random numbers, compared with constants in their place
    loss_waits: bool = False  # the loss could not be compared on this batch, but may be on another
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of_all(cls, ranks: Sequence[Findings], copies: int) -> Findings:
        """Join the findings of all ranks; `copies` of them (replicas, tensor-parallel peers) have the same layers."""
        by_layer = {(one.layer_id, one.layer): one for rank in reversed(ranks) for one in reversed(rank.findings)}
        return replace(
            cls._joined(ranks, []),
            cut=next((rank.cut for rank in ranks if rank.cut is not None), None),
            num_layers=sum(rank.num_layers for rank in ranks) // copies,
            without_dropout=sum(rank.without_dropout for rank in ranks) // copies,
            findings=sorted(by_layer.values()),
        )

    @classmethod
    def of_plans(cls, plans: Sequence[Findings]) -> Findings:
        """Join the findings for several lists of slices: the first list with a difference, or the coverage of all."""
        wrong = next((found for found in plans if found.findings), None)
        if wrong is not None or len(plans) == 1:
            return wrong or plans[0]
        others = [found.cut for found in plans[1:] if found.cut is not None and found.cut != plans[0].cut]
        return cls._joined(plans, [f"and so on {cut}" for cut in others])

    @classmethod
    def _joined(cls, several: Sequence[Findings], notes: list[str]) -> Findings:
        """Return the first findings with the notes of all, and whether any has a loss."""
        num_losses = max(one.num_losses for one in several)
        waits = not num_losses and any(one.loss_waits for one in several)
        notes = list(dict.fromkeys([*notes, *(note for one in several for note in one.notes)]))
        return replace(several[0], num_losses=num_losses, loss_waits=waits, notes=notes)

    def text(self, took_s: float, only_loss: bool = False) -> str:
        """Return one line per finding; without findings, one line about the coverage."""
        cut = self.cut
        if cut is None:
            return "verify: nothing to compare, every sequence runs in one slice"
        if not self.findings:
            compared = [f"{self.num_layers} layers"] * self.with_layers + ["the loss"] * bool(self.num_losses)
            verb = "agree" if self.with_layers else "agrees"
            what = f"{' and '.join(compared)} {verb} on {cut} with the whole, " if compared else ""
            random = (
                f"{self.without_dropout} layers that draw random numbers were compared with constants in their place"
            )
            facts = [f"verify: {what}{took_s:.2g} s", *[random] * bool(self.without_dropout)]
            facts += ["layers were not compared"] * (not self.with_layers and not only_loss)
            return "; ".join([*facts, *self.notes])
        counted = f" (tokens count from {cut.start} on)" if cut.start else ""
        head = f"verify: {cut} do not give what the whole sequence gives{counted}:"
        hidden = len(self.findings) - _SHOWN
        more = [f"and {hidden} more layers"] * (hidden > 0)
        return "\n  ".join([head, *map(str, self.findings[:_SHOWN]), *more, *self.notes])


@dataclass
class StageCheck:
    """Check the layers of one part of the stage `module`, and the loss. Use it inside `untouched(module)`."""

    module: nn.Module
    slicing: Slicing
    found: Findings
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext  # in which the engine runs layers
    note: Callable[[str], None] = lambda text: None  # called with the checked layer
    intercept: bool = True  # plain causal attention goes to sliced_attention
    of_hidden: Callable[[Tensor, Any, float], Tensor] | None = None  # the loss that training runs, if without logits
    weights: WeightGradients | None = None  # if slices leave their weight gradients to W, or to the last one's B
    splits: bool = True  # they leave them to W
    kind: type[LayerCheck] = LayerCheck
    is_last: bool = True  # its outputs go to the loss, not to another part
    _last: tuple[NamedLayer, Activations] | None = None  # the layer that it joins, and its inputs
    _part: tuple[NamedLayer, Activations] | None = None  # all layers as one, and their inputs, if they are compared
    # the failure of a layer whose output cannot be cut, so that it is compared together with the next layer
    _uncut: TrialFailure | None = None

    def check_layers(self, layers: Sequence[NamedLayer], inputs: Activations) -> Activations | None:
        """Check one layer after the other; return the last one's outputs, None if one cannot run."""
        outputs: Activations | None = inputs
        if not self.found.with_layers:
            if self.of_hidden is not None and len(layers) > 1:
                outputs, layers = self._run_layers(layers[:-1], inputs), layers[-1:]
            if outputs is None:
                return None
            # without a graph, nothing says that the last layer hands a gradient on
            trained = outputs.changed(lambda t: t.detach().requires_grad_(t.is_floating_point()))
            self._last = layers[0], trained
            return self._run_layers(layers, outputs)
        self._part = chained(layers), inputs
        together: list[NamedLayer] = []
        for layer in layers:
            # a layer whose output cannot be cut is compared with the layers after it
            together.append(layer)
            if outputs is not None:
                given, self._last = outputs, (chained(together), outputs)
                outputs = self._check_layer(*self._last)
                if self._uncut is not None:
                    outputs = given
                else:
                    self.found.num_layers += len(together) - 1
                    together.clear()
        if self._uncut is not None and together:
            self._end_uncut(chained(together), self._uncut)
        return self._handed_on(layers[-1], outputs) if self._uncut is None else None

    def _handed_on(self, last: NamedLayer, outputs: Activations | None) -> Activations | None:
        """Return the outputs of the part, if another part can get them."""
        if outputs is None or self.is_last or outputs.fits_a_message:
            return outputs
        self._end(last, "it returns a dict, None or nested tuples")
        return None

    def _end_uncut(self, last: NamedLayer, failure: TrialFailure) -> None:
        """Report the last layer of a part, which has no layer after it to be compared with."""
        if failure.kind == OtherOutput.__name__:  # other parts, and the check of the loss, need tensors
            self._end(last, failure.text)
        else:
            self.found.notes.append(f"{last}: not compared: the part ends with tensors that are not cut")

    def _end(self, last: NamedLayer, text: str) -> None:
        text = f"{text}, and the part ends here: return tensors, or set terapipe.partition"
        self._find(last.layer_id, str(last), text, OtherOutput.__name__)

    def _check_layer(self, layer: NamedLayer, inputs: Activations) -> Activations | None:
        self.note(f"verifying {layer}")
        # detect plain attention by its call, whatever it adds to the output
        context = inputs, self.slicing, self.module, self.autocast
        check = self.kind(layer, *context, weights=self.weights, splits=self.splits)

        def run() -> Difference | None:
            with guard_plain_attention(self.intercept), GuardCapturedNames():
                return check.run()

        difference, failure = self._try(run, f"verifying {layer}")
        is_uncut = failure is not None and failure.kind in (UncutOutput.__name__, OtherOutput.__name__)
        self._uncut = failure if is_uncut else None
        if is_uncut:
            return None
        is_unable = failure is not None and failure.kind == NotImplementedError.__name__ and not check.is_running
        # torch or the memory failed outside the layer, which is not its fault: its outputs serve the next one
        if failure is not None and (is_unable or failure.kind == _NO_MEMORY):
            self.found.notes.append(f"{layer}: not checked: {failure.text}")
            return self._run(layer, inputs, f"running {layer} once more")[0]
        if failure is not None:
            self._find(layer.layer_id, str(layer), failure.text, failure.kind)
            return None
        # the layer ran: first the differences, then facts that are only worth a note
        assert check.outputs is not None
        problems = [] if difference is None else [_shown_by(difference, self.slicing.plan, check.adds_loss)]
        if problems or check.faults:
            self._find(layer.layer_id, str(layer), "; ".join([*problems, *check.faults]) + _defined_at(layer.module))
        notes = {
            f"{', '.join(check.counters)} counts calls or is a mean over them, one call for each slice: what depends "
            "on it changes after other steps than on whole sequences": bool(check.counters),
            "draws from a generator of Python or NumPy once per call and not per token: where what it gives depends on "
            "that (a dropped layer), each slice draws its own": check.may_drop,
            "compared in evaluation mode, without what it does in training alone: it draws random numbers by an "
            "operation that cannot be made constant": check.in_evaluation_mode and not check.is_random,
            "not checked: it draws random numbers in evaluation mode as well, other ones for slices than for a whole "
            "sequence": check.is_random,
        }
        self.found.notes += [f"{layer}: {note}" for note, holds in notes.items() if holds]
        self.found.notes += [f"{layer}: {note}" for note in dict.fromkeys(check.unable)]
        self.found.without_dropout += check.draws and not check.in_evaluation_mode
        self.found.num_layers += not check.is_random
        return check.outputs

    def _run_layers(self, layers: Sequence[NamedLayer], inputs: Activations) -> Activations | None:
        """Run all layers as one, forward only. If this fails, it is a note, not a finding: layers are not checked."""
        running: NamedLayer | None = None

        def joined(values: Any) -> Any:
            nonlocal running
            for running in layers:
                values = running.function(values)
            return values

        outputs, difference, failure = self._run(NamedLayer(-1, joined), inputs, "running layers to compare the loss")
        if failure is not None:
            self.found.notes.append(f"the loss was not compared: {running} {failure.text}")
        elif difference is not None and difference.tokens is None:
            self.found.notes.append(f"the loss was not compared: an {difference.what} does not add up over slices")
            return None
        return outputs

    def _run(
        self, layer: NamedLayer, inputs: Activations, what: str
    ) -> tuple[Activations | None, Difference | None, TrialFailure | None]:
        """Run a layer without graphs, to learn its outputs and how slices are cut from them."""
        check = LayerCheck(layer, inputs, self.slicing, self.module, self.autocast, with_gradients=False)
        with torch.no_grad():
            difference, failure = self._try(check.run, what)
        return check.outputs if failure is None else None, difference, failure

    def _find(self, layer_id: int, layer: str, problem: str, raised: str = "") -> None:
        self.found.findings.append(Finding(layer_id, layer, problem, raised))

    def check_labels(self, probe: LabelProbe, everyone: Sequence[SliceableTensors], layer_id: int) -> bool:
        """Return whether `loss_fn` treats every kind of label as the section says, or whether this is unknown."""
        looks = (probe.look(labels) for labels in everyone)
        problem, failure = self._try(lambda: next(filter(None, looks), None), "trying labels on the loss")
        if failure is not None:
            self.found.notes.append(f"not every kind of label was tried on the loss: it {failure.text}")
        elif problem is not None:
            self._find(layer_id, "loss_fn", problem)
        return problem is None

    def check_loss(self, check: LossCheck, layer_id: int, everyone: Sequence[SliceableTensors] = ()) -> bool:
        """Return whether the loss was compared, with the labels of the cut and then of `everyone`, and agrees."""
        if self.of_hidden is not None and self._last is not None:
            check = replace(check, head=self.compare_without_logits)
        result, failure = self._try(lambda: compare_everywhere(check, everyone, self.note), "verifying the loss")
        problem, waits = result or (None, "")
        if failure is not None and (failure.kind == _NO_MEMORY or not self.found.with_layers):
            self.found.notes.append(f"the loss was not compared: {failure.text}")
        elif failure is not None:
            self._find(layer_id, "loss_fn", failure.text, failure.kind)
        elif problem is not None:
            self._find(layer_id, "loss_fn", problem)
        elif waits:
            self.found.notes.append(f"the loss was not compared: {waits}")
            self.found.loss_waits = True
        elif self._agrees_after_layers(check, layer_id):
            self.found.num_losses += 1
            return True
        return False

    def compare_without_logits(self, loss: LossCheck) -> Difference | None:
        """Compare the loss of slices without logits, and all its gradients, with the loss of the whole's logits."""
        assert self.of_hidden is not None and self._last is not None
        (layer, inputs), of_hidden, weights = self._last, self.of_hidden, loss.slicing.weights

        def loss_of(outputs: Any, labels: Any, active: ActiveSlice) -> Tensor:
            if active.wants_logits:
                return weighted_loss(outputs, labels, 1.0, loss.loss_fn)
            return of_hidden(outputs, labels, weights[active.slice_id])

        # losses have their weights: they and the gradients add up
        slicing = replace(loss.slicing, weights=(1.0,) * len(weights), wants_logits=False)
        both = joined(layer, loss.labels, loss_of)
        with guard_plain_attention(self.intercept), GuardCapturedNames():
            return LossOfHiddenCheck(both, inputs, slicing, self.module, self.autocast).run()

    def _agrees_after_layers(self, loss: LossCheck, layer_id: int) -> bool:
        """Return whether the loss agrees right after its layers as well, which may leave it something elsewhere."""
        if self._part is None or self.of_hidden is not None:
            return True
        part, inputs = self._part

        def loss_of(outputs: Any, labels: Any, active: ActiveSlice) -> Tensor:
            weight = 1.0 if active.is_whole else self.slicing.weights[active.slice_id]
            with torch.autocast(inputs.tensors[0].device.type, enabled=False):
                return weighted_loss(outputs, labels, weight, loss.loss_fn).reshape(())

        both = joined(part, loss.labels, loss_of)
        check = LossAfterLayers(both, inputs, self.slicing, self.module, self.autocast, with_gradients=False)
        check.loss = loss
        with torch.no_grad(), guard_plain_attention(self.intercept), GuardCapturedNames():
            difference, failure = self._try(check.run, "verifying the loss after its layers")
        if failure is not None:
            self.found.notes.append(f"the loss was not compared right after the layers: it {failure.text}")
        elif difference is not None:
            self._find(layer_id, "loss_fn", f"{difference} {_LEFT_ELSEWHERE}")
        return difference is None

    def _try(self, run: Callable[[], _T], what: str) -> tuple[_T | None, TrialFailure | None]:
        """Return the result of `run`; or its failure, here or on a tensor-parallel peer, with a text for the report."""
        result = caught = None
        where = ""
        try:
            result = run()
        except Exception as error:
            caught, where = error, _where(error)
        finally:
            self.slicing.store.reset()
            if self.weights is not None:
                self.weights.open_batch()
        failure = self.slicing.ranks.trials.failure(caught, what)
        if failure is None:
            return result, None
        # torch lists all its backends
        if failure.text.count("\n") > _MOST_LINES:
            failure = failure._replace(text=first_sentence(failure.text))
        text = f"raised {failure}{where}" if failure.rank is None else f"raised on {failure}"
        if failure.kind == _NO_MEMORY:
            text = "there is not enough memory beside what training needs"
        elif "backward through the graph a second time" in failure.text:
            text += ": it keeps tensors with their graph from one slice to the next: use sliced_attention"
        elif self.weights is not None and "not have been used in the graph" in failure.text:
            text += (
                ": slices leave the gradients of nn.Linear to one product, so torch.autograd.grad does not reach its "
                "weight: derive a class of your own from nn.Linear for this layer, which autograd treats as usual"
            )
        return None, failure._replace(text=text)


def _shown_by(difference: Difference, plan: SlicePlan, adds_loss: bool) -> str:
    first, tokens = difference.first_token, difference.tokens
    last_of_slice = (stop - 1 for _, stop in map(plan.span, range(plan.num_slices)))
    # from the most specific cause to the most general one
    if adds_loss:
        meaning = f"the layer adds a loss of its own in the backward, of the tokens of one forward pass, {_NO_SHARE}"
    elif not difference.is_of_outputs:
        meaning = (
            "outputs agree, so look at the backward: what it gives depends on the tokens of one call (an auxiliary "
            "loss, a hook, an autograd.Function), gradients from later slices to earlier tokens are lost or doubled "
            "(a kernel that gives its last state no gradient, a result of carry.write() that is not used), or a layer "
            "with defer_weight_gradients() leaves something else to W"
        )
    elif first is None or tokens is None:
        meaning = (
            "one value for all tokens of a call (a pooled state, an auxiliary loss) does not add up over slices: a "
            "layer that computes the loss to train on needs labels that are shifted in the data; an auxiliary loss is "
            f"of the tokens of one forward pass, {_NO_SHARE}"
        )
    elif first < plan.lengths[0]:
        meaning = f"early outputs change with later tokens, with how many there are, or from call to call: {_REMEDY}"
    elif not bool(tokens[next(last for last in last_of_slice if last >= first)]):
        meaning = (
            f"the first tokens of a slice differ: they need the tokens before it (a convolution or shift): {_CARRY}"
        )
    else:
        meaning = (
            "slices after the first differ: they see no tokens before them, or their positions start at 0. Use "
            "sliced_attention, let positions start at `active_slice().start`, carry the state of a recurrence "
            "(docs/carried_states.md), or set terapipe.slices to 1"
        )
    return f"{difference}: {meaning}"


def _where(error: BaseException) -> str:
    """Return the innermost place outside torch and this package, else the innermost; "" if the text names one."""
    if isinstance(error, (PlainAttentionError, LossKindError)):
        return ""
    places = list(traceback.walk_tb(error.__traceback__))
    frame, line = ([place for place in places if not _is_of_others(place[0].f_globals.get("__name__"))] or places)[-1]
    return f" (in {frame.f_code.co_name}, {frame.f_code.co_filename}:{line})"


def _defined_at(module: nn.Module | None) -> str:
    """Return where the user wrote the class of a layer; "" for the classes of torch, transformers, this package."""
    kind = type(module)
    if _is_of_others(kind.__module__):
        return ""
    try:
        return f" (the class: {inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]})"
    except (OSError, TypeError):  # a notebook, or a class that a program has made
        return ""


def _is_of_others(module: object) -> bool:
    return str(module).partition(".")[0] in ("builtins", "torch", "transformers", "megatron", "terapipe_ds")


def inputs_of(batch: SliceableTensors) -> Activations:
    """Return the first layer's inputs from a micro-batch."""
    layouts = tuple(TokenDim(batch.dim) if is_cut else Same() for is_cut in batch.sliced)
    return Activations(batch.tensors, tuple if batch.is_tuple else alone, layouts)
