"""Run one piece of a model of transformers by the model's own forward, with stand-ins for all the rest.

A causal language model is a list of decoder layers with something before and after it. Each piece of the pipeline runs
the forward of the whole model, in which a `StandIn` replaces each decoder layer and each other module with weights. The
model's own code does the work before the list (rotary embeddings, masks, the scale of embeddings) and after it (scales
and caps of logits), so this file contains no code for any family. The run ends as soon as the piece has its result.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from terapipe_ds import compat
from terapipe_ds.attention import active_slice
from terapipe_ds.attention.active_slice import ActiveSlice, push_slice
from terapipe_ds.models.hugging_face.forward.attention import NAME, own_attentions
from terapipe_ds.models.hugging_face.forward.cache import SliceCache
from terapipe_ds.models.hugging_face.refusals import ModelRefusedError, end_of_scaled_angles
from terapipe_ds.models.positions import longest_document, places

Run = Callable[..., Any]
Form = Callable[[Tensor], Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

# The forms in which decoder layers return their hidden states, by family.
_FORMS: tuple[Form, ...] = (lambda h: h, lambda h: (h,), lambda h: (h, None), lambda h: (h, None, None))


class _Finished(Exception):
    """Leave the model's forward with the result of the piece."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


def _finish(result: Any, *_: Any, **__: Any) -> None:
    raise _Finished(result)


class _OtherFormError(ValueError):
    """Report hidden states in a form that the model does not take."""


class _Shared:
    """Keep the arguments of all decoder layers for the slice `of`, by the kind of their hidden states."""

    def __init__(self, of: weakref.ref[ActiveSlice]) -> None:
        self.of = of
        self.by_kind: dict[Hashable, list[Arguments]] = {}
        self._tensors: list[tuple[Tensor, int]] = []

    def add(self, kind: Hashable, arguments: list[Arguments]) -> None:
        """Keep the arguments, and note what state their tensors are in."""
        self.by_kind[kind] = arguments
        distinct = {id(each): each for args, named in arguments for each in (*args, *named.values())}
        leaves = {id(leaf): leaf for leaf in tree_leaves([*distinct.values()]) if torch.is_tensor(leaf)}
        self._tensors += [(leaf, leaf._version) for leaf in leaves.values()]

    @property
    def are_changed(self) -> bool:
        """Tell whether a layer has changed one of the tensors in place."""
        return any(tensor._version != version for tensor, version in self._tensors)


class StandIn(nn.Module):
    """Stand in for a module of the model: have its attributes, and run the function that a piece sets."""

    def __init__(self, original: nn.Module, dtypes: Mapping[torch.dtype, torch.dtype]) -> None:
        super().__init__()
        self.__dict__["original"] = original  # not a child: there are no weights here
        self.device, self.dtypes = torch.device("cpu"), dtypes
        self.let(self.skip)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["original"], name)
        if torch.is_tensor(value) and value.is_meta:  # models ask weights for their device and dtype
            dtype = self.dtypes.get(value.dtype, value.dtype)
            return torch.zeros((), dtype=dtype, device=self.device).expand(value.shape)
        return value

    def let(self, run: Run) -> None:
        """Call `run` from now on; if it is a module, it does not become a child."""
        self.__dict__["_run"] = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_run"](*args, **kwargs)

    def skip(self, x: Tensor, *_: Any, **named: Any) -> Tensor:
        """Return `x`, or a tensor without content for a module that embeds numbers or has another output width."""
        original = self.__dict__["original"]
        if isinstance(original, nn.Linear):  # of another width
            return x.new_zeros(()).expand(*x.shape[:-1], original.out_features)
        if not isinstance(original, nn.Embedding):
            return x
        numbers = x if named.get("position_ids") is None else named["position_ids"]  # OPT gives a mask before them
        like = self.weight
        return torch.zeros((), dtype=like.dtype, device=x.device).expand(*numbers.shape, like.shape[1])


class _StandIns(nn.ModuleList):
    """Hold stand-ins of decoder layers. Models take the first N of them in each run: as a list, no further module."""

    def __getitem__(self, index: Any) -> Any:
        return [*self._modules.values()][index] if isinstance(index, slice) else super().__getitem__(index)


class Outline:
    """Run the forward of a model without its weights.

    `layers` are the decoder layers. `before`, `after` and `head` name the other modules with weights: the modules that
    run before the decoder layers, after them, and the output matrix. `embedding` is the name in `before` of the module
    that embeds tokens.

    Args:
        model: a `...ForCausalLM` whose parameters are on the device "meta" and whose buffers are real. It is changed.

    Raises:
        ModelRefusedError: the forward is not a list of decoder layers that hand on their hidden states alone.
    """

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        # checked before modules become stand-ins
        self.tied = _tied_matrix(model)
        self.cache = SliceCache(self.config.num_hidden_layers)
        self.layers_name, layers = _decoder_layers(model, self.config.num_hidden_layers)
        self.layers = list(layers)
        self.dtypes: dict[torch.dtype, torch.dtype] = {}  # that weights have, by those that they were made with
        self._layer_stand_ins = [StandIn(layer, self.dtypes) for layer in self.layers]
        _put(model, self.layers_name, _StandIns(self._layer_stand_ins))
        # decoder layers are stand-ins by now, so the remaining modules with weights run before or after them
        self._others = {name: StandIn(module, self.dtypes) for name, module in _with_weights(model, "")}
        _refuse_shared_parameters([*self.layers, *(other.original for other in self._others.values())], self.tied)
        for name, stand_in in self._others.items():
            _put(model, name, stand_in)
        if left := [name for name, _ in model.named_parameters()]:
            raise ModelRefusedError(f"it has parameters beside those of its layers ({', '.join(left)})")
        # forwards name their cache differently, and some take no positions
        parameters = inspect.signature(type(model).forward).parameters
        self._cache_name = next(filter(parameters.get, compat.cache_arguments(transformers.__version__)), "")
        if not self._cache_name:
            raise ModelRefusedError("its forward takes no cache, so that nothing goes from slice to slice")
        self._takes_positions = "position_ids" in parameters
        self.takes_patterns = True  # instead of masks; False: its forward reads the masks
        self.own_attentions = own_attentions(model)
        self._form: Form = _FORMS[0]
        self._device = torch.device("cpu")
        self._shared: _Shared | None = None
        self.embedding = self._name_of(model.get_input_embeddings())
        self.before, self.after, self.head = self._find_pieces()
        self.num_positions = self._find_num_positions()
        for module in model.modules():
            if "longrope" in str(getattr(module, "rope_type", "")):
                if "position_ids" not in inspect.signature(module.forward).parameters:
                    raise ModelRefusedError(
                        f"transformers {transformers.__version__} gives the length of a slice to its 'longrope' "
                        f"angles; {compat.TESTED_VERSIONS['transformers']} gives positions"
                    )
                module.forward = functools.partial(_angles_of_whole, module.forward)

    def _name_of(self, stand_in: nn.Module | None) -> str:
        name = next((name for name, other in self._others.items() if other is stand_in), None)
        if name is None:
            raise ModelRefusedError("its embedding, or its output matrix, is not a module with weights of its own")
        return name

    @property
    def names(self) -> list[str]:
        """Return the names of all modules with weights."""
        return [*self._others, *map(self.layer_name, range(len(self.layers)))]

    def layer_name(self, index: int) -> str:
        return f"{self.layers_name}.{index}"

    def module(self, name: str) -> nn.Module:
        """Return a module of the model, whose parameters are on the device "meta"."""
        original: nn.Module = self.model.get_submodule(name).original
        return original

    def copy_of(self, module: nn.Module) -> nn.Module:
        """Return a copy of a module that shares the config, which sets how attention runs, and parameters on meta."""
        shared: dict[int, object] = {id(config): config for config in (self.config, self.model.config)}
        shared |= {id(each): each for each in module.parameters() if each.is_meta}  # bitsandbytes cannot copy its own
        return copy.deepcopy(module, shared)

    def initialize(self, module: nn.Module) -> None:
        """Draw the initial values of the module's own parameters as the family does."""
        self.model._init_weights(module)
        own = [p for p in module.parameters(recurse=False) if p.isnan().any()]
        if own and hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]

    def run_before(self, own: Mapping[str, Run], tokens: Tensor) -> Tensor:
        """Return the hidden states [B, T, H] that the first decoder layer gets."""
        return self._run(own, tokens, [_finish] * len(self.layers))

    def run_layer(self, index: int, layer: Run, hidden: Tensor, attention: str) -> Tensor:
        """Return a decoder layer's output for `hidden`, with the arguments that the model passes at its place.

        `attention` is a result of `attention`, or one of `own_attentions`.
        """
        arguments = self._arguments_of(index, hidden, attention)
        self._prepare(hidden, attention)
        out = layer(hidden, *arguments[0], **arguments[1])
        return self.cache.tied(out[0] if isinstance(out, tuple) else out)

    def _arguments_of(self, index: int, hidden: Tensor, attention: str) -> Arguments:
        """Return a layer's arguments beside hidden states; all layers share one run of the model per slice.

        A run for each layer would pass by all layers before it: time would grow with the square of their number.
        """
        active, last = active_slice(), len(self.layers) - 1
        # outside of the engine nothing says where a pass over the layers begins
        if active is None or torch.is_inference_mode_enabled():
            return self._find_arguments(index, hidden, attention)[index]
        kind = attention, hidden.shape, hidden.dtype, hidden.device, self.model.training, torch.is_autocast_enabled()
        if self._shared is None or self._shared.of() is not active or self._shared.are_changed:
            self._shared = _Shared(weakref.ref(active))
        if kind not in self._shared.by_kind:
            self._shared.add(kind, self._find_arguments(last, hidden, attention))
        return self._shared.by_kind[kind][index]

    def _find_arguments(self, last: int, hidden: Tensor, attention: str) -> list[Arguments]:
        """Return what the model passes to the decoder layers up to `last`, in a run that leaves the random state."""
        found: list[Arguments] = []

        def note(x: Tensor, *args: Any, **named: Any) -> Any:
            found.append((args, named))
            if len(found) > last:
                _finish(x)
            return self._form(x)

        device = hidden.device
        # a recomputed forward may need another run where the first one did not: its layers draw the same numbers
        with keeping_random_state(device):
            self._run({}, _without_content(hidden), [note] * len(self.layers), attention)
        return found

    def run_after(self, own: Mapping[str, Run], hidden: Tensor) -> Tensor:
        """Return the input of the output matrix, for the hidden states of the last decoder layer."""
        runs: list[Run] = [lambda *_, **__: self._form(hidden)] * len(self.layers)
        return self._run({**own, self.head: _finish}, _without_content(hidden), runs)

    def run_head(self, head: Run, hidden: Tensor) -> Tensor:
        """Return the logits, for the input of the output matrix."""
        runs: list[Run] = [lambda skipped, *_, **__: self._form(skipped)] * len(self.layers)
        return self._run({self.head: lambda *_, **__: head(hidden)}, _without_content(hidden), runs)

    def scale_and_cap(self, dtype: torch.dtype) -> tuple[float, float | None] | str:
        """Return what the model's code does to logits: it multiplies them by a scale, and limits them by cap * tanh.

        If it does anything else, return a reason for which a loss needs its logits.
        """
        form, is_wide = self._scale_and_cap
        if form is None or (dtype == torch.float64 and not is_wide):
            return f"the code of {type(self.model).__name__} after its output matrix is neither a scale nor a soft cap"
        return form

    @functools.cached_property
    def _scale_and_cap(self) -> tuple[tuple[float, float | None] | None, bool]:
        # logits of all sizes: a tiny one shows the scale, a huge one the cap, and all others whether this explains them
        tiny, huge = 2.0**-20, 2.0**20
        count = self.model.get_output_embeddings().weight.shape[0]
        logits = torch.linspace(-60.0, 60.0, 2 * count, dtype=torch.float64).view(2, count)[None]
        logits[0, :, 0], logits[0, :, -1] = tiny, huge
        hidden = torch.zeros((), dtype=torch.float64).expand(1, 2, self.config.hidden_size)
        try:
            with _whole_rows_of(2):
                out = self.run_head(lambda _: logits.clone(), hidden)
        except Exception:  # in the model's own code
            return None, False
        scale, most = float(out[0, 0, 0]) / tiny, abs(float(out[0, 0, -1]))
        cap = most if most < 0.5 * abs(scale) * huge else None
        expected = scale * logits if cap is None else cap * torch.tanh(scale * logits / cap)
        is_wide = out.dtype == torch.float64
        agrees = out.shape == expected.shape and torch.allclose(out.double(), expected, 1e-12 if is_wide else 1e-6)
        return ((scale, cap) if agrees else None), is_wide

    def check_loss(self, loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Raise ModelRefusedError if the model's forward computes another loss of logits and shifted labels."""
        if "labels" not in inspect.signature(type(self.model).forward).parameters:
            return
        hidden = torch.zeros(2, 4, self.config.hidden_size)
        labels = torch.tensor([[0, 1, -100, 1], [1, 0, 0, -100]])
        layers: list[Run] = [lambda x, *_, **__: self._form(x)] * len(self.layers)
        generator = torch.Generator().manual_seed(0)
        head, drawn = self._others[self.head], list[Tensor]()

        def draw(x: Tensor, *_: Any, **__: Any) -> Tensor:
            drawn.append(torch.randn(head.skip(x).shape, generator=generator.manual_seed(0)))
            return drawn[-1]

        def difference() -> str:
            drawn.clear()
            try:
                with _whole_rows_of(4):
                    own = float(self._run({self.head: draw}, hidden, layers, labels=labels))
            except Exception as error:  # in the model's own code
                return f"gives no loss in a trial ({type(error).__name__}: {error})"
            return "" if math.isclose(own, expected, rel_tol=1e-4) else f"gives the loss {own:.5g}"

        with _whole_rows_of(4):
            logits = self._run({self.head: draw}, hidden, layers)
        expected = float(loss_of(logits[:, :-1], labels[:, 1:]))
        found = difference()
        if found and not drawn and self.model.training:
            # a kernel makes the loss of weights, which are not here: in evaluation there are logits
            self.model.eval()
            found = difference()
            self.model.train()
        if found:
            raise ModelRefusedError(
                f"its forward {found} where the mean cross entropy of the next tokens is {expected:.5g}, and stages "
                "compute the loss_fn alone: give one as loss_fn= of from_pretrained or from_config, "
                "LinearCrossEntropy() for that mean. Trainer takes none: train such a model without it"
            )

    def _run(
        self,
        own: Mapping[str, Run],
        inputs: Tensor,
        runs: list[Run],
        attention: str | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Return the logits, or with labels the model's own loss, or the result with which a piece ends the run."""
        # for this run alone, and restored after it: a closure holds the activations of a slice
        stand_ins = list(zip(self._layer_stand_ins, runs, strict=True))
        stand_ins += [(self._others[name], run) for name, run in own.items()]
        for stand_in, run in stand_ins:
            stand_in.let(run)
        self._prepare(inputs, attention or self.attention(self.takes_patterns))
        named: dict[str, Any] = {self._cache_name: self.cache, "use_cache": True}
        named["inputs_embeds" if inputs.is_floating_point() else "input_ids"] = inputs
        if self._takes_positions:
            named["position_ids"] = places(inputs).clone()  # XGLM adds to them in place
        if labels is not None:
            named["labels"] = labels
        try:
            outputs = self.model(**named)
            result: Tensor = outputs.logits if labels is None else outputs.loss
        except _Finished as finished:
            result = finished.result
        finally:
            for stand_in, _ in stand_ins:  # they hold tensors
                stand_in.let(stand_in.skip)
        return result

    def attention(self, is_fast: bool) -> str:
        """Return the name of the attention by which layers run the fast way, or by code of their own."""
        return NAME if is_fast else self.own_attentions[-1]

    def _prepare(self, inputs: Tensor, attention: str) -> None:
        """Set the layer's way of attention, and move buffers to the device of its inputs."""
        # the model reads this name whenever it makes a mask or attends
        if self.config._attn_implementation != attention:
            self.model.config._attn_implementation = self.config._attn_implementation = attention
        self.cache.gives_prefix = attention != NAME
        if inputs.device == self._device:  # the walk over all modules would come once per layer and slice
            return
        self._device = inputs.device
        for module in self.model.modules():
            if isinstance(module, StandIn):
                module.device = inputs.device
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != inputs.device and not buffer.is_meta:
                    with torch.inference_mode(False):  # models change some buffers in training
                        module._buffers[name] = buffer.to(inputs.device)

    # -- what runs when ----------------------------------------------------------------------------------------------

    def _find_pieces(self) -> tuple[tuple[str, ...], tuple[str, ...], str]:
        """Run with stand-ins alone, and note when each is called; find the form of the decoder layers' outputs."""
        head, problems = self._name_of(self.model.get_output_embeddings()), []
        for self.takes_patterns, self._form in itertools.product((True, False), _FORMS):
            try:
                calls = self._calls(head)
            except Exception as error:  # of the model's own code, which got a form that it does not know
                problems.append(error)
                continue
            # calls up to the first decoder layer, and from the last one on
            before = tuple(dict.fromkeys(itertools.takewhile(bool, calls)))
            after = tuple(dict.fromkeys(itertools.takewhile(bool, reversed(calls))))[::-1]
            unknown = {*self._others, head} - {*before, *after, head}
            if (runs := calls.count("")) > len(self.layers):
                raise ModelRefusedError(f"its {len(self.layers)} decoder layers run {runs} times in a forward")
            if unknown or set(before) & set(after) or runs != len(self.layers):
                raise ModelRefusedError(f"its forward is not a list of decoder layers between other modules: {calls}")
            return before, after, head
        refusals = [problem for problem in problems if isinstance(problem, ModelRefusedError)]
        in_this_form = [problem for problem in problems if not isinstance(problem, _OtherFormError)]
        raise ModelRefusedError(str((refusals or in_this_form or problems)[-1])) from problems[0]

    def _find_num_positions(self) -> int | None:
        """Return for how many positions the model has learned vectors, tables or scaled angles; None if for any."""
        tokens = self._others[self.embedding].original
        learned = [each.original for each in self._others.values() if isinstance(each.original, nn.Embedding)]
        for table in learned:
            if table is not tokens:
                return int(table.num_embeddings - getattr(table, "offset", 0))  # OPT begins at position 2
        # tables are buffers of the model or a layer, or go to all layers as an argument; some have a row per position
        names = "max_position_embeddings", "max_seq_len"
        most = {int(size) for size in (getattr(self.config, name, None) for name in names) if size}
        hidden = torch.zeros(1, 2, self.config.hidden_size)
        with _whole_rows_of(2):
            arguments = self._find_arguments(0, hidden, self.attention(self.takes_patterns))
        buffers = [b for module in (self.model, self.layers[0]) for b in module.buffers() if b.dim() > 1]
        tensors = [*buffers, *(leaf for leaf in tree_leaves(arguments) if torch.is_tensor(leaf))]
        ends = most & {size for tensor in tensors for size in tensor.shape}
        return min(ends) if ends else end_of_scaled_angles(self.config)

    def _calls(self, head: str) -> list[str]:
        """Return the names of the modules that the forward calls, "" for a decoder layer, with 2 x 3 tokens.

        Raises ModelRefusedError if decoder layers get arguments other than hidden states that depend on the tokens.
        """
        # twice, and only the last layer gives the same: whatever differs afterwards has not come from it alone
        tokens, layers = torch.zeros(2, 3, dtype=torch.long), len(self.layers)
        trial, again = _Trial(self._form, layers, 0), _Trial(self._form, layers, 1)
        logits = self._try(trial, head, tokens)
        others = self._try(again, head, torch.randn_like(trial.hidden[0]).requires_grad_() * 1)
        for first, second in zip(trial.others, again.others, strict=True):
            differ = [name for name in {**first, **second} if not _are_alike(first.get(name), second.get(name))]
            if differ:
                raise ModelRefusedError(
                    "its decoder layers get more that depends on the tokens than hidden states of the layer before: "
                    f"{', '.join(sorted(differ))}. Only hidden states go from stage to stage"
                )
        if len(trial.others) != layers:  # they run several times
            return trial.calls
        if again.changed:  # in the first trial embeddings are zeros
            raise ModelRefusedError(
                f"its forward changes the hidden states before decoder layer {again.changed[0]}, and stages would not: "
                "let a layer do it"
            )
        if not torch.equal(trial.hidden[-1], again.hidden[-1]) or not torch.equal(logits, others):
            raise ModelRefusedError(
                "its logits depend on more than the hidden states of the last decoder layer. Only these go from stage "
                "to stage"
            )
        return trial.calls

    def _try(self, trial: _Trial, head: str, inputs: Tensor) -> Tensor:
        with torch.random.fork_rng([]), _whole_rows_of(3):
            torch.manual_seed(0)  # both trials drop the same numbers
            runs = trial.runs(self._others, head)
            return self._run(runs, inputs, [trial.layer] * len(self.layers)).detach()


def _whole_rows_of(tokens: int) -> AbstractContextManager[Any]:
    """Return a context for a trial: it has positions of its own, whatever slice or documents run when it is made."""
    return push_slice(ActiveSlice(0, tokens, tokens))


class _Trial:
    """Note which modules a forward calls, and which arguments beyond hidden states its decoder layers get."""

    def __init__(self, form: Form, num_layers: int, seed: int) -> None:
        self.calls: list[str] = []
        self.hidden: list[Tensor] = []  # that decoder layers and the output matrix get
        self.others: list[dict[str, Any]] = []
        self.changed: list[int] = []  # decoder layers that get other hidden states than the layer before them gave
        self._form, self._num_layers, self._seed = form, num_layers, seed
        self._returned: Tensor | None = None

    def runs(self, others: Mapping[str, StandIn], head: str) -> dict[str, Run]:
        """Return the functions that stand in for all but the decoder layers; their results need a gradient."""

        def noted(name: str, skip: Run) -> Run:
            def run(x: Tensor, *args: Any, **named: Any) -> Any:
                self._note(name, x)
                out = skip(x, *args, **named)
                return out if out.requires_grad else out.clone().requires_grad_() * 1

            return run

        def end(x: Tensor, *_: Any, **__: Any) -> Tensor:
            self._note(head, x)
            self.hidden.append(x)
            return self._drawn(others[head].skip(x), self._num_layers)

        return {name: noted(name, other.skip) for name, other in others.items()} | {head: end}

    def layer(self, hidden: Tensor, *args: Any, **named: Any) -> Any:
        if torch.is_tensor(hidden) and hidden.dim() > 3:
            raise ModelRefusedError(
                f"its decoder layers get hidden states {list(hidden.shape)} for 2 x 3 tokens. Only those of one stream "
                "go from stage to stage"
            )
        self._note("", hidden)
        if self._returned is not None and not torch.equal(hidden, self._returned):
            self.changed.append(len(self.others))
        self.hidden.append(hidden)
        arguments = {f"argument {place}": argument for place, argument in enumerate(args, 1)} | named
        self.others.append(
            {name: argument for name, argument in arguments.items() if not isinstance(argument, SliceCache)}
        )
        self._returned = self._drawn(hidden, len(self.others) - 1)
        return self._form(self._returned)

    def _drawn(self, like: Tensor, place: int) -> Tensor:
        """Return what a decoder layer or the output matrix gives; the last ones give the same in all trials."""
        seed = place if place >= self._num_layers - 1 else -1 - place - self._num_layers * self._seed
        drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.dtype)
        return drawn.requires_grad_() * 1

    def _note(self, name: str, x: Tensor) -> None:
        if (not name or "" in self.calls) and (not torch.is_tensor(x) or x.shape[:2] != (2, 3)):
            what = f"{type(x).__name__} {list(getattr(x, 'shape', []))}"
            raise _OtherFormError(f"{name or 'a decoder layer'} gets {what} and no hidden states of 2 x 3 tokens")
        self.calls.append(name)


def _angles_of_whole(angles_of: Run, x: Tensor, position_ids: Tensor, *others: Any, **named: Any) -> Any:
    """Return the cosines and sines of a slice, chosen by the longest row or document of the micro-batch."""
    if (active := active_slice()) is None:
        return angles_of(x, position_ids, *others, **named)
    starts = None if active.documents is None else active.documents.starts
    last = longest_document(active.sequence_length, starts) - 1  # the model looks for the highest position that it gets
    return tree_map(lambda each: each[:, :-1], angles_of(x, F.pad(position_ids, (0, 1), value=last), *others, **named))


def _are_alike(one: Any, other: Any) -> bool:
    """Return whether two arguments are equal, and need no gradient."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=False)
    return all(not a.requires_grad and torch.equal(a, b) for a, b in pairs if torch.is_tensor(a) and torch.is_tensor(b))


def _tied_matrix(model: transformers.PreTrainedModel) -> nn.Parameter | None:
    """Return the weights of the embedding if these are the output matrix as well."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or embedding is None or head.weight is not embedding.weight:
        return None
    if len(list(head.parameters())) > 1:
        raise ModelRefusedError("its output matrix is tied to the embedding, and has a bias of its own")
    return head.weight


def _refuse_shared_parameters(modules: Iterable[nn.Module], tied: nn.Parameter | None) -> None:
    owners: dict[int, nn.Module] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            if owners.setdefault(id(parameter), module) is not module and parameter is not tied:
                raise ModelRefusedError(f"{name} of {type(module).__name__} is shared by several layers")


def _decoder_layers(model: nn.Module, number: int) -> tuple[str, nn.ModuleList]:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == number:
            return name, module
    raise ModelRefusedError(f"it has no list of {number} decoder layers")


def _with_weights(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """Return the outermost modules with parameters beside the decoder layers, which are stand-ins already."""
    modules: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList) or any(isinstance(inner, StandIn) for inner in child.modules()):
            modules += _with_weights(child, f"{prefix}{name}.")
        elif any(True for _ in child.parameters()):
            modules.append((f"{prefix}{name}", child))
    return modules


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def keeping_random_state(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Put back the random state of the CPU and of the device, any accelerator, after the block."""
    return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)


def _without_content(hidden: Tensor) -> Tensor:
    return hidden.new_zeros(()).expand(hidden.shape)
