"""Let linear layers compute their weight gradients themselves: one product for several slices adds to a sum.

Autograd makes a gradient for each backward and then adds it to `.grad`: once per slice, however short. Here the layers
keep in B the factors of their weight gradients (input and output gradient). The factors of several slices are joined
(`plan.weight_groups`), and their product adds to the sum in one pass, as the fused accumulation of Megatron-LM does:
after the B of the last of these slices or, if the schedule splits backwards, in its W (zero bubble, Qi et al., arXiv
2401.10241). If backwards are not split, the product of a slice is in its own B where the slice is alone in its group,
or where slices do not join (`joins_unsplit`).

This holds for `nn.Linear` itself, and any module that has `defer_weight_gradients(gradients)`, which gets the
`WeightGradients` of its stage once (`docs/how-it-works.md`). Biases, norms, embeddings and every other layer have all
their gradients in B.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.overrides import _get_current_function_mode_stack

from terapipe_ds.attention import ActiveSlice, active_slice
from terapipe_ds.compat.replaced import packages_of
from terapipe_ds.losses.head import HandsOn
from terapipe_ds.runtime.batch.in_flight import InFlightError, Key
from terapipe_ds.runtime.layers.gradient_sums import GradientSums, hooks_without_need


def accumulate_in_products(module: nn.Module, optimizer: Any) -> WeightGradients:
    """Prepare the plain linear layers of `module` and those that split their backwards; the result runs their W."""
    hooks = hooks_without_need(optimizer)
    is_narrow = any(parameter.itemsize < 4 for parameter in module.parameters())
    gradients = WeightGradients(hooks is None, GradientSums.of(optimizer), hooks or 0, is_narrow)
    for layer in module.modules():
        defer = getattr(layer, "defer_weight_gradients", None)
        if defer is not None:
            defer(gradients)
        elif type(layer) in (nn.Linear, nn.Embedding) and not _is_replaced(layer):
            layer.forward = partial(_forward_of, layer, gradients)  # type: ignore[assignment, method-assign]
    return gradients


def leave_to_autograd(module: nn.Module) -> WeightGradients:
    """Undo what an earlier engine has prepared in `module`, or its optimizer would get the gradients of a later one."""
    gradients = WeightGradients()
    gradients.close()
    for layer in module.modules():  # a layer comes before those that it prepares
        forward = vars(layer).get("forward")
        is_ours = isinstance(forward, partial) and any(isinstance(each, WeightGradients) for each in forward.args)
        if is_ours or isinstance(forward, HandsOn):
            del layer.forward
        defer = getattr(layer, "defer_weight_gradients", None)
        if defer is not None:
            defer(gradients)
    return gradients


_Sum = tuple[int, int, bool]


class _Product(NamedTuple):
    """Hold the factors of one weight gradient: `rows^T inputs`."""

    weight: Tensor
    rows: Tensor  # [tokens, out]
    inputs: Tensor  # [tokens, in]
    versions: tuple[int, int]
    gather: Callable[[Tensor], Tensor] | None  # makes all inputs from this rank's, if other ranks have parts of them
    bias: Tensor | None  # whose gradient is the sum of the rows; None: autograd has made it

    @property
    def sum(self) -> _Sum:
        """Return a value that products have in common if one product may join them.

        Layers that share a weight may have biases of their own, or look up its rows.
        """
        return id(self.weight), id(self.bias), self.inputs.is_floating_point()


class WeightGradients:
    """Compute the weight gradients of the linear layers of one stage here, not in autograd.

    With `is_watched` an optimizer of DeepSpeed's collects gradients by hooks. It must learn of each gradient, except
    gradients that go to its `sums` at once. Without `is_watched` its first `own_hooks` on a parameter do nothing.
    Gradients are narrower than fp32 if `is_narrow`.
    """

    def __init__(
        self, is_watched: bool = False, sums: GradientSums | None = None, own_hooks: int = 0, is_narrow: bool = False
    ) -> None:
        self.is_watched, self.sums, self._own_hooks, self._is_narrow = is_watched, sums, own_hooks, is_narrow
        self.running: list[_Product] | None = None
        self.waiting: dict[Key, list[_Product]] = {}
        # gets no gradient; autograd's engine passes it if parameters get theirs, and not for gradients of inputs alone
        self.witness = torch.zeros((), requires_grad=True, device="cpu")
        self.is_closed = False
        self.open_batch()

    def close(self) -> None:
        """Leave all gradients to autograd from now on, and let go of the optimizer: its engine has ended."""
        self.is_closed, self.sums = True, None
        self.open_batch()

    def __deepcopy__(self, memo: object) -> WeightGradients:
        return self  # a copy of a layer works for the same batch

    def __reduce__(self) -> tuple[type[WeightGradients], tuple[()]]:
        return WeightGradients, ()  # a layer in a file has no engine

    def open_batch(
        self, split: Iterable[Key] = (), groups: Iterable[Collection[Key]] = (), is_trial: bool = False
    ) -> None:
        """Begin a batch in which the slices `split` have a W of their own; keep nothing of another batch.

        The slices of each of the `groups` have one product per weight, once the B or W of all of them have run.
        In a trial the slices `split` stand for a group, and no optimizer watches the weights.
        """
        self._split, self.running, self.waiting = frozenset(split), None, {}
        self._is_trial = is_trial
        self._groups = {key: group for group in map(_Group, groups) for key in group.missing}

    def joins_unsplit(self, checkpoints: bool) -> bool:
        """Return whether slices join their products although their backwards are not split.

        Tensors that wait for a joint product take almost as much memory as the activations that slices save. This pays
        if gradients are narrower than the sums to which they are added, because additions then cost most. Layers that
        run a second time in B (`checkpoints`) would keep many times the bytes of a slice. Where an optimizer without
        sums watches each gradient, autograd makes it.
        """
        return self._is_narrow and not checkpoints and not (self.is_watched and self.sums is None)

    @contextmanager
    def deferred(self, key: Key) -> Iterator[None]:
        """Run the B of a slice in this context, and keep factors for `compute`.

        It raises InFlightError if the factors of an earlier B still wait.
        """
        if key in self.waiting:
            raise InFlightError(f"B{key[1]}.{key[2]} of part {key[0]} ran twice before its W")
        self.running = self.waiting[key] = []
        try:
            yield
        finally:
            self.running = None

    def is_due(self, key: Key) -> bool:
        """Return whether `compute` will have products to compute, because all slices of a group have run."""
        group, is_kept = self._groups.get(key), bool(self.waiting.get(key))
        return is_kept if group is None else group.missing == {key} and (is_kept or bool(group.products))

    def compute(self, key: Key, around: Callable[[], Any]) -> int:
        """Run the W of a slice, or the end of its B, and return how many weight gradients it had.

        The products come with the last slice of a group; `around` them if hooks collect gradients. This raises
        InFlightError if the B of the slice has not run, its W has, or a layer has changed a kept factor in place.
        """
        products, what = self.waiting.pop(key, None), f"W{key[1]}.{key[2]} of part {key[0]}"
        if products is None:
            raise InFlightError(f"{what} ran before its B, or a second time")
        group, count = self._groups.pop(key, None) or _Group({key}), len(products)
        group.missing.discard(key)
        group.products += products
        del products
        if not group.missing:
            self._compute(group, what, around)
        return count

    def _compute(self, group: _Group, what: str, around: Callable[[], Any]) -> None:
        """Compute the products of a group, one per weight, or more if layers share it; each frees its factors."""
        for product in group.products:  # layers may have views of these tensors
            if product.versions != (product.rows._version, product.inputs._version):
                raise InFlightError(
                    f"{what}: the input or the output gradient of a linear layer with weight "
                    f"{list(product.weight.shape)} was changed in place after its B"
                )
        by_weight: dict[_Sum, list[_Product]] = {}
        while group.products:
            product = group.products.pop(0)
            by_weight.setdefault(product.sum, []).append(product)
            del product
        # sums of the optimizer come first: they need neither hooks nor a gradient in between
        for key in list(by_weight):
            if not self._is_hooked(by_weight[key][0].weight):
                self._add_joined(by_weight.pop(key))
        if by_weight:
            with around():
                _in_autograd(by_weight)

    @torch.no_grad()
    def _add_joined(self, products: list[_Product]) -> None:
        weight, bias = products[0].weight, products[0].bias
        rows, inputs = _factors(products)
        products.clear()
        self.add(weight, rows, inputs)
        if bias is not None and self.sums is not None:
            self.sums.add_bias(bias, rows)

    def add(
        self, weight: Tensor, rows: Tensor, inputs: Tensor, gather: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Add `rows^T inputs` to the gradient of `weight` in this step, [tokens, out] and [tokens, in] to [out, in].

        It goes to the optimizer's sum, or to `.grad` where there is none. For weights without hooks, without autograd.
        `gather` makes all inputs from this rank's, as in `keep`.
        """
        inputs = inputs if gather is None else gather(inputs)
        if self.sums is not None and self.sums.has(weight):
            self.sums.add(weight, rows, inputs)
            return
        fresh = _add_product(weight, rows, inputs)
        if fresh is not None:
            weight.grad = fresh if weight.grad is None else weight.grad + fresh

    def _is_hooked(self, weight: Tensor) -> bool:
        """Return whether code other than the optimizer's own must learn of each gradient of the weight."""
        has_sum = self._has_sum(weight)
        if weight._backward_hooks or (self.is_watched and not has_sum and not self._is_trial):
            return True
        hooks = getattr(weight, "_post_accumulate_grad_hooks", None)
        if not hooks:
            return False
        return len(hooks) > (self._own_hooks if self.sums is None or not has_sum else self.sums.own_hooks(weight))

    def _is_summed(self, parameter: Tensor) -> bool:
        """Return whether gradients of the parameter may go to a sum of the optimizer, and to nobody else."""
        return parameter.requires_grad and self._has_sum(parameter) and not self._is_hooked(parameter)

    def _has_sum(self, weight: Tensor) -> bool:
        return self.sums is not None and self.sums.has(weight)

    def kept_bytes(self, key: Key) -> int:
        """Return the bytes that wait for the W of a slice."""
        kept = [t.untyped_storage() for product in self.waiting.get(key, ()) for t in (product.rows, product.inputs)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())

    def factor_bytes(self, key: Key) -> int:
        """Return the bytes of the largest of the products that wait for the W of a slice, its two factors together."""
        return max((product.rows.nbytes + product.inputs.nbytes for product in self.waiting.get(key, ())), default=0)

    def assert_done(self) -> None:
        """Raise InFlightError unless every W has run."""
        missing = {*self.waiting, *(key for group in self._groups.values() if group.products for key in group.missing)}
        if missing:
            raise InFlightError(f"the W of {sorted(missing)} (part, micro-batch, slice) did not run in this batch")

    def linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None, is_transposed: bool = False) -> Tensor:
        """Return `F.linear(inputs, weight, bias)`, whose weight gradient comes from here; transposed: [in, out]."""
        add = self.adder(inputs, weight)
        if add is None:
            return F.linear(inputs, weight.t() if is_transposed else weight, bias)
        if add != self.keep:
            return _Linear.apply(inputs, weight, bias, None, _Leaf(weight, is_transposed, add))
        # a sum over all rows is more exact than the sum of rounded ones
        if bias is not None and not is_transposed and self._is_summed(weight) and self._is_summed(bias):
            add, bias = partial(self.keep, bias=bias), bias.detach()
        # the product comes later: leave out the edge to the weight, or B would call its hooks with nothing
        return _Linear.apply(inputs, weight.detach(), bias, self.witness, _Leaf(weight, is_transposed, add))

    def lookup(self, ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
        """Return `F.embedding(ids, weight, padding_idx)`; with sums, a group of slices has one gradient of the table.

        Without sums, or with hooks, autograd makes a gradient as large as the table for each slice.
        """
        active = self._running_slice()
        is_summed = type(weight) in _PLAIN and self._is_summed(weight)
        if active is None or not is_summed or not self._is_kept(active, False):
            return F.embedding(ids, weight, padding_idx)
        return _Lookup.apply(ids, weight.detach(), self.witness, partial(self.keep, weight), padding_idx)

    def taker(self, inputs: Tensor, weight: Tensor) -> Callable[..., None] | None:
        """Return the function that a layer's backward must call with the factors of its weight gradient.

        It takes the arguments of `keep` after the weight. None: the layer computes the gradient by itself.
        """
        add = self.adder(inputs, weight)
        if add == self.keep:
            return partial(self.keep, weight)
        goes_to_sum = self.sums is not None and add == self.sums.add and inputs.requires_grad
        return partial(self.add, weight) if goes_to_sum else None

    def adder(self, inputs: Tensor, weight: Tensor, waits: bool = True) -> _Add | None:
        """Return the taker of the weight gradient's factors in the backward; None: autograd.

        It is `keep` where factors wait, unless the caller cannot let them (`waits`).
        """
        active = self._running_slice()
        if active is None or not (weight.requires_grad and weight.is_leaf and inputs.dtype == weight.dtype):
            return None
        is_plain = type(weight) in _PLAIN and type(inputs) in _PLAIN and inputs.layout is torch.strided
        # the products here have no conjugates, and no rows of several lengths
        is_plain = is_plain and not (inputs.is_nested or weight.is_complex())
        if not is_plain or torch.is_autocast_enabled(inputs.device.type):
            return None
        # the greatest saving first: later, the optimizer's sum, `.grad` in one pass
        hooked = self._is_hooked(weight)
        if waits and inputs.requires_grad and self._is_kept(active, hooked):
            return self.keep  # otherwise the output would depend only on the weight, which is hidden
        if hooked:
            return None
        if self.sums is not None and self.sums.has(weight):
            return self.sums.add
        return None if active.is_whole else _add_product

    def _running_slice(self) -> ActiveSlice | None:
        """Return the slice whose forward is recorded; None: nothing that this object may compute."""
        # vmap and similar tools see operations, not our products
        if self.is_closed or not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return None
        return None if _are_operations_replaced() else active_slice()

    def _is_kept(self, active: ActiveSlice, hooked: bool) -> bool:
        """Return whether factors wait: for W, or in the first forward of a slice whose products join others'."""
        key = active.part_id, active.micro_batch_id, active.slice_id
        if key in self._split and not self._is_trial:
            return True
        is_joined = key in self._split or (key in self._groups and self._groups[key].is_joined)
        return is_joined and not hooked and self.running is None

    def adder_of_rows(self, table: Tensor) -> Callable[[int, Tensor], None] | None:
        """Return what adds the gradient of some rows of `table`, from the first one on; None: autograd does.

        Each call to it is for one backward of the slice that runs now.
        """
        active = None if self.is_closed else active_slice()
        if active is None or not torch.is_grad_enabled() or not table.requires_grad:
            return None
        if self.sums is not None and self._is_summed(table):
            return partial(self.sums.add_rows, table)
        return None if active.is_whole or self._is_hooked(table) else partial(_add_rows, table)

    def splits_now(self) -> bool:
        """Return whether the slice that runs now has a W of its own."""
        active = active_slice()
        return active is not None and (active.part_id, active.micro_batch_id, active.slice_id) in self._split

    def keep(
        self,
        weight: Tensor,
        rows: Tensor,
        inputs: Tensor,
        gather: Callable[[Tensor], Tensor] | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """Leave `rows^T inputs` to the W of the slice whose B runs, or to its group's product.

        `weight` is [out, in], `rows` are gradients of the layer's outputs, [tokens, out]. `inputs` are [tokens, in], or
        a value from which `gather` makes them when W runs; integers are the rows of `weight` to add `rows` to.
        `gather` may use collectives, since W has its products in the order of `keep`. The sum of the rows goes to the
        optimizer's sum of `bias`. In any other backward this raises InFlightError: the gradient would get lost.
        """
        if self.running is None:
            raise InFlightError("a backward through layers of a slice whose weight gradients wait, but not in its B")
        self.running.append(_Product(weight, rows, inputs, (rows._version, inputs._version), gather, bias))


class _Group:
    """Hold the products of slices that are computed together, and the slices whose B or W has not run yet."""

    def __init__(self, keys: Collection[Key]) -> None:
        self.missing, self.is_joined = set(keys), len(keys) > 1
        self.products: list[_Product] = []


def _factors(products: list[_Product]) -> tuple[Tensor, Tensor]:
    """Return the rows and the inputs of all products of one weight, each as one tensor."""
    if len(products) == 1:
        [only] = products
        return only.rows, only.inputs if only.gather is None else only.gather(only.inputs)
    # `gather` may return the same memory each time
    inputs = [each.inputs if each.gather is None else each.gather(each.inputs).clone() for each in products]
    return torch.cat([each.rows for each in products]), torch.cat(inputs)


def _in_autograd(by_weight: dict[_Sum, list[_Product]]) -> None:
    """Run the hooks of each weight; free products one by one, so that only one extra gradient exists."""
    for key in list(by_weight):
        products = by_weight.pop(key)
        weight = products[0].weight
        with torch.no_grad():
            rows, inputs = _factors(products)
            gradient = rows.t() @ inputs
        del products, rows, inputs
        torch.autograd.backward([weight], [gradient])


def _is_replaced(layer: nn.Module) -> bool:
    """Return whether the user has replaced the forward of a layer; an earlier engine's does not count."""
    forward = vars(layer).get("forward")
    return forward is not None and getattr(forward, "func", None) is not _forward_of


# `deepcopy` copies the layer that a partial holds, but none that a function closes over: a copy of the layer, such as a
# moving average, has to use weights of its own
#
# a program may give the layer another class or other options, or the class another forward, when the engine is built


def _forward_of(layer: nn.Module, gradients: WeightGradients, input: Tensor) -> Tensor:
    forward: Callable[..., Tensor] = type(layer).forward
    # torch's compiler, in a function that the user compiles, would break its graph at each layer
    is_torchs = not torch.compiler.is_dynamo_compiling() and _is_of_torch(forward)
    if is_torchs and isinstance(layer, nn.Linear) and forward is nn.Linear.forward:
        return gradients.linear(input, layer.weight, layer.bias)
    if is_torchs and isinstance(layer, nn.Embedding) and forward is nn.Embedding.forward:
        is_plain = not (layer.sparse or layer.max_norm or layer.scale_grad_by_freq)
        return gradients.lookup(input, layer.weight, layer.padding_idx) if is_plain else forward(layer, input)
    return forward(layer, input)


@lru_cache(maxsize=64)
def _is_of_torch(function: Any) -> bool:
    """Return whether torch or DeepSpeed's profiler has written a function: a program may replace torch's own."""
    return packages_of(function) <= {"torch", "deepspeed", "terapipe_ds"}


def _are_operations_replaced() -> bool:
    """Return whether a program replaces operations, whose derivative is then another: by patches or function modes.

    Forward-mode derivatives need operations as well.
    """
    if not _is_of_torch(F.linear) or not _is_of_torch(F.embedding) or forward_ad._current_level >= 0:
        return True
    is_free = not torch._C._len_torch_function_stack()
    return not is_free and not all(map(_is_of_torch, map(type, _get_current_function_mode_stack())))


_PLAIN = (Tensor, nn.Parameter)  # other classes may have products, and backwards, of their own
_Add = Callable[[Tensor, Tensor, Tensor], Tensor | None]
"""Takes weight, rows and inputs; returns a gradient for autograd, or None where it has taken that."""


class _Leaf(NamedTuple):
    """Hide the weight from autograd, which takes an edge to each tensor argument; `add` takes its factors."""

    weight: Tensor
    is_transposed: bool  # [in, out]
    add: _Add


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, witness: Tensor, keep: Callable[..., None], padding: int | None
    ) -> Tensor:
        ctx.save_for_backward(ids)  # as F.embedding does, which may run in its place when a checkpoint runs again
        ctx.keep, ctx.padding = keep, None if padding is None else padding % len(weight)  # -1 is the last row
        return F.embedding(ids, weight, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        rows, ids = grad.reshape(-1, grad.shape[-1]), ctx.saved_tensors[0].reshape(-1)
        ctx.keep(rows if ctx.padding is None else rows.masked_fill((ids == ctx.padding).unsqueeze(1), 0.0), ids)
        return None, None, None, None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, witness: Tensor | None, leaf: _Leaf
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.leaf = leaf  # the saved one is another object, without .grad
        ctx.place = 1 if witness is None else -1  # of what tells, among the edges to tensors
        outputs = F.linear(inputs, weight.t() if leaf.is_transposed else weight, bias)
        return outputs if bias is None else outputs.detach()  # with a bias it is a view, which forbids in-place work

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # a layer may compute some gradients in its forward, and go on with these: they are no gradients of the step
        try:
            is_of_step = torch._C._will_engine_execute_node(ctx.next_functions[ctx.place][0])
        except RuntimeError:  # `torch.autograd.grad` asks for the weight's, which torch does not tell otherwise
            return _backward(ctx, grad, lambda weight, rows, inputs: rows.t() @ inputs)
        if not is_of_step:
            return _backward(ctx, grad, lambda weight, rows, inputs: None)
        add = ctx.leaf.add
        return _backward_once(ctx, grad, add) if torch.is_grad_enabled() else _backward(ctx, grad, add)


def _backward(ctx: Any, grad: Tensor, add: _Add) -> tuple[Tensor | None, ...]:
    # the gradient of the inputs comes first: the stage before waits for it
    inputs, _ = ctx.saved_tensors
    needs_inputs, _, needs_bias, *_ = ctx.needs_input_grad
    leaf, is_transposed, _ = ctx.leaf
    rows = grad.reshape(grad.shape[:-1].numel(), grad.shape[-1])  # not -1, for a width of 0
    inputs_grad = (rows @ (leaf.t() if is_transposed else leaf)).view(inputs.shape) if needs_inputs else None
    bias_grad = rows.sum(dim=0) if needs_bias else None
    flat = inputs.reshape(inputs.shape[:-1].numel(), inputs.shape[-1])
    weight_grad = add(leaf, flat, rows) if is_transposed else add(leaf, rows, flat)
    return inputs_grad, weight_grad, bias_grad, None, None


_backward_once = once_differentiable(_backward)  # if the backward is recorded; otherwise it only takes time


def _add_rows(table: Tensor, start: int, rows: Tensor) -> None:
    if table.grad is None:
        table.grad = torch.zeros_like(table)
    table.grad[start : start + len(rows)].add_(rows)


def _add_product(weight: Tensor, rows: Tensor, inputs: Tensor) -> Tensor | None:
    """Add `rows^T inputs` to `weight.grad`; or return it for autograd, if there is no gradient to add to."""
    total = weight.grad
    if total is None or total.dtype != rows.dtype or total.layout != torch.strided:
        return rows.t() @ inputs
    total.addmm_(rows.t(), inputs)
    return None
