"""Let linear layers compute their weight gradients themselves: the product adds to a sum, later if necessary.

Autograd makes a gradient for each backward and then adds it to `.grad`. With slices this happens once per slice, and
costs about three per cent of a step on a CPU. A product with `beta=1` reads and writes `.grad` once, as the fused
accumulation of Megatron-LM does.

If the schedule splits backwards, the layers keep in B the factors of their weight gradients (input and output gradient)
and compute these in W (zero bubble, Qi et al., arXiv 2401.10241): `nn.Linear` itself, and any module that has
`defer_weight_gradients(gradients)`, which gets the `WeightGradients` of its stage once (`docs/how-it-works.md`).
Biases, norms, embeddings and every other layer have all their gradients in B.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from terapipe_ds.attention import active_slice
from terapipe_ds.runtime.batch.in_flight import InFlightError, Key
from terapipe_ds.runtime.layers.gradient_sums import GradientSums


def accumulate_in_products(module: nn.Module, optimizer: Any) -> WeightGradients:
    """Prepare the plain linear layers of `module` and those that split their backwards; the result runs their W."""
    gradients = WeightGradients(isinstance(optimizer, DeepSpeedOptimizer), GradientSums.of(optimizer))
    for layer in module.modules():
        defer = getattr(layer, "defer_weight_gradients", None)
        if defer is not None:
            defer(gradients)
        elif type(layer) is nn.Linear and "forward" not in vars(layer):
            layer.forward = _forward_of(layer, gradients)  # type: ignore[assignment, method-assign]
    return gradients


class _Product(NamedTuple):
    """Hold the factors of one weight gradient: `rows^T inputs`."""

    weight: Tensor
    rows: Tensor  # [tokens, out]
    inputs: Tensor  # [tokens, in]
    versions: tuple[int, int]
    gather: Callable[[Tensor], Tensor] | None  # makes all inputs from this rank's, if other ranks have parts of them

    def all_inputs(self) -> Tensor:
        return self.inputs if self.gather is None else self.gather(self.inputs)


class WeightGradients:
    """Compute the weight gradients of the linear layers of one stage here, not in autograd.

    With `is_watched` an optimizer of DeepSpeed's collects gradients by hooks. It must learn of each gradient, except
    those that go to its `sums` at once.
    """

    def __init__(self, is_watched: bool = False, sums: GradientSums | None = None) -> None:
        self.is_watched, self.sums = is_watched, sums
        self._split: frozenset[Key] = frozenset()
        self.running: list[_Product] | None = None
        self.waiting: dict[Key, list[_Product]] = {}
        # gets no gradient; autograd's engine passes it if parameters get theirs, and not for gradients of inputs alone
        self.witness = torch.zeros((), requires_grad=True)

    def open_batch(self, split: Iterable[Key]) -> None:
        """Begin a batch in which the slices `split` have a W of their own; keep nothing of another batch."""
        self._split, self.running, self.waiting = frozenset(split), None, {}

    def splits(self, key: Key) -> bool:
        """Return whether the slice has a W of its own in this batch."""
        return key in self._split

    def deferred(self, key: Key) -> _Deferred:
        """Return a context for the B of a slice that has a W, which keeps the factors for W.

        It raises InFlightError if the factors of an earlier B still wait.
        """
        return _Deferred(self, key)

    def compute(self, key: Key, around: Callable[[], Any]) -> int:
        """Run the W of a slice and return how many weight gradients it had; `around` it if hooks collect gradients.

        It raises InFlightError if its B has not run, its W has, or a layer has changed a kept factor in place.
        """
        products, what = self.waiting.pop(key, None), f"W{key[1]}.{key[2]} of part {key[0]}"
        if products is None:
            raise InFlightError(f"{what} ran before its B, or a second time")
        count = len(products)
        for product in products:  # layers may have views of these tensors
            if product.versions != (product.rows._version, product.inputs._version):
                raise InFlightError(
                    f"{what}: the input or the output gradient of a linear layer with weight "
                    f"{list(product.weight.shape)} was changed in place after its B"
                )
        # sums of the optimizer come first: they need neither hooks nor a gradient in between
        products = [product for product in products if not self._is_in_sum(product)]
        if products and (self.is_watched or any(_has_hooks(product.weight) for product in products)):
            with around():
                _in_autograd(products)
        else:
            _without_autograd(products)
        return count

    @torch.no_grad()
    def _is_in_sum(self, product: _Product) -> bool:
        """Add a product to the optimizer's sums if it can go there at once, and return whether it could."""
        if self.sums is None or not self._goes_to_sum(product.weight):
            return False
        self.sums.add(product.weight, product.rows, product.all_inputs())
        return True

    def _goes_to_sum(self, weight: Tensor) -> bool:
        """Return whether the optimizer has a sum for the weight, and no other code has a hook on its gradient."""
        if self.sums is None or not self.sums.has(weight) or weight._backward_hooks:
            return False
        return len(getattr(weight, "_post_accumulate_grad_hooks", None) or ()) <= self.sums.own_hooks(weight)

    def kept_bytes(self, key: Key) -> int:
        """Return the bytes that wait for the W of a slice."""
        kept = [t.untyped_storage() for product in self.waiting.get(key, ()) for t in (product.rows, product.inputs)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())

    def assert_done(self) -> None:
        """Raise InFlightError unless every W has run."""
        if self.waiting:
            missing = sorted(self.waiting)
            raise InFlightError(f"the W of {missing} (part, micro-batch, slice) did not run in this batch")

    def takes(self, inputs: Tensor, weight: Tensor) -> bool:
        """Return whether a linear layer that runs now must leave its weight gradient to this object.

        It must if the slice's backward is split, or if no hook collects gradients, in the dtype of the weight.
        """
        return self.adder(inputs, weight) is not None

    def adder(self, inputs: Tensor, weight: Tensor) -> _Add | None:
        """Return the taker of the weight gradient's factors in the backward, `keep` for W; None: autograd."""
        active = active_slice()
        # vmap and similar tools see operations, not our products
        if active is None or not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return None
        # the greatest saving first: W, the optimizer's sum, `.grad` in one pass
        add: _Add = _add_product
        if (active.part_id, active.micro_batch_id, active.slice_id) in self._split:
            add = self.keep
        elif self.sums is not None and self._goes_to_sum(weight):
            add = self.sums.add
        elif active.is_whole or self.is_watched or _has_hooks(weight):
            return None
        if add == self.keep and not inputs.requires_grad:  # the output depends only on the weight, which is hidden
            return None
        is_plain = weight.requires_grad and weight.is_leaf and inputs.dtype == weight.dtype
        return add if is_plain and not torch.is_autocast_enabled(inputs.device.type) else None

    def product_of(self, layer: nn.Module, with_bias: bool) -> Callable[[Tensor], Tensor]:
        """Return the function that multiplies by `layer.weight`, for a layer with work around its product."""
        return _forward_of(layer, self, with_bias)

    def adder_of_rows(self, table: Tensor) -> Callable[[int, Tensor], None] | None:
        """Return what adds the gradient of some rows of `table`, from the first one on; None: autograd does.

        Each call to it is for one backward of the slice that runs now.
        """
        active = active_slice()
        if active is None or not torch.is_grad_enabled() or not table.requires_grad:
            return None
        if self.sums is not None and self._goes_to_sum(table):
            return functools.partial(self.sums.add_rows, table)
        return None if active.is_whole or self.is_watched or _has_hooks(table) else functools.partial(_add_rows, table)

    def splits_now(self) -> bool:
        """Return whether the slice that runs now has a W of its own."""
        active = active_slice()
        return active is not None and (active.part_id, active.micro_batch_id, active.slice_id) in self._split

    def keep(
        self, weight: Tensor, rows: Tensor, inputs: Tensor, gather: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Leave `rows^T inputs` to the W of the slice whose B runs; W adds it to the gradient of `weight`.

        `weight` is [out, in], `rows` are gradients of the layer's outputs, [tokens, out]. `inputs` are [tokens, in], or
        a value from which `gather` makes them when W runs. `gather` may use collectives, since W has its products in
        the order of `keep`. In any other backward this raises InFlightError, because the gradient would get lost.
        """
        if self.running is None:
            raise InFlightError("a backward through layers of a slice whose backward is split, but not in its B")
        self.running.append(_Product(weight, rows, inputs, (rows._version, inputs._version), gather))


class _Deferred:
    """Implement `WeightGradients.deferred`, twice as fast as a generator."""

    __slots__ = ("_gradients", "_key")

    def __init__(self, gradients: WeightGradients, key: Key) -> None:
        self._gradients, self._key = gradients, key

    def __enter__(self) -> None:
        key, waiting = self._key, self._gradients.waiting
        if key in waiting:
            raise InFlightError(f"B{key[1]}.{key[2]} of part {key[0]} ran twice before its W")
        self._gradients.running = waiting[key] = []

    def __exit__(self, *error: object) -> None:
        self._gradients.running = None


def _has_hooks(weight: Tensor) -> bool:
    return bool(weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None))


def _in_autograd(products: list[_Product]) -> None:
    """Run the hooks of each weight; free products one by one, so that only one extra gradient exists."""
    while products:
        product = products.pop(0)
        weight = product.weight
        with torch.no_grad():
            gradient = product.rows.t() @ product.all_inputs()
        del product
        torch.autograd.backward([weight], [gradient])


@torch.no_grad()
def _without_autograd(products: list[_Product]) -> None:
    """Add to the gradients as autograd does, without calling hooks."""
    for product in products:
        weight = product.weight
        fresh = _add_product(weight, product.rows, product.all_inputs())
        if fresh is not None:
            weight.grad = fresh if weight.grad is None else weight.grad + fresh


def _forward_of(layer: Any, gradients: WeightGradients, with_bias: bool = True) -> Callable[[Tensor], Tensor]:
    def forward(inputs: Tensor) -> Tensor:
        weight, bias = layer.weight, layer.bias if with_bias else None
        add = gradients.adder(inputs, weight)
        if add is None:
            return F.linear(inputs, weight, bias)
        if add == gradients.keep:
            # W comes later: leave out the edge to the weight, or B would call its hooks with nothing
            return _Linear.apply(inputs, weight.detach(), bias, gradients.witness, _Leaf(weight), add)
        return _Linear.apply(inputs, weight, bias, None, _Leaf(weight), add)

    return forward


_Add = Callable[[Tensor, Tensor, Tensor], Tensor | None]
"""Takes weight, rows and inputs; returns a gradient for autograd, or None where it has taken that."""


class _Leaf(NamedTuple):
    """Hide the weight from autograd, which takes an edge to each tensor argument."""

    weight: Tensor


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, witness: Tensor | None, leaf: _Leaf, add: _Add
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.leaf = leaf  # the saved one is another object, without .grad
        ctx.add, ctx.place = add, 1 if witness is None else -1  # of what tells, among the edges to tensors
        return F.linear(inputs, weight, bias).detach()  # with a bias it is a view, which forbids in-place work on it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # a layer may compute only the gradients of its inputs in its forward, and go on with these
        if not torch._C._will_engine_execute_node(ctx.next_functions[ctx.place][0]):
            return grad @ ctx.leaf.weight, None, None, None, None, None
        return _backward_once(ctx, grad) if torch.is_grad_enabled() else _backward(ctx, grad)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # the gradient of the inputs comes first: the stage before waits for it
    inputs, weight = ctx.saved_tensors
    needs_inputs, _, needs_bias, *_ = ctx.needs_input_grad
    rows = grad.reshape(-1, grad.shape[-1])
    inputs_grad = (rows @ weight).view(inputs.shape) if needs_inputs else None
    bias_grad = rows.sum(dim=0) if needs_bias else None
    weight_grad = ctx.add(ctx.leaf.weight, rows, inputs.reshape(-1, inputs.shape[-1]))
    return inputs_grad, weight_grad, bias_grad, None, None, None


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
