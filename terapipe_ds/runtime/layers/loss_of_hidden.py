"""Leave the product of a model's last layer to a loss that keeps no logits (`terapipe_ds.losses`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from torch import Tensor
from torch.utils._pytree import tree_leaves

from terapipe_ds.losses import Head, find_head
from terapipe_ds.messages import logger
from terapipe_ds.runtime.batch.loss_weights import exact_zero
from terapipe_ds.runtime.layers.weight_gradients import WeightGradients

Context = Callable[[], AbstractContextManager[Any]]
_WORTH_TELLING_BYTES = 16_384  # that a token keeps for the loss


class LossOfHidden:
    """Compute the loss of the last part from the hidden states that its last layer hands on.

    Args:
        autocast: the context in which the engine runs layers.
        around: a context for the layer's work in the backward.
    """

    def __init__(
        self, loss_fn: Any, head: Callable[[], Head | str], weights: WeightGradients, autocast: Context, around: Context
    ) -> None:
        self._of_hidden, self._head, self._weights = loss_fn.of_hidden, head, weights
        self._autocast, self._around = autocast, around

    @classmethod
    def of(
        cls, module: Any, weights: WeightGradients, autocast: Context = nullcontext, around: Context = nullcontext
    ) -> LossOfHidden | None:
        """Return the loss of the part that is active in `module`, its last one; None if its loss needs logits."""
        loss_fn = module.loss_fn
        # partitioned checkpoints empty the hidden states that a layer hands on
        empties = getattr(module, "activation_checkpoint_interval", 0) > 0 and ds_checkpointing.PARTITION_ACTIVATIONS
        if empties or not hasattr(loss_fn, "of_hidden"):
            return None
        # functools.wraps copies the attributes of the inner loss, of_hidden among them; a program may give it its own
        is_copied = getattr(getattr(loss_fn, "__wrapped__", None), "of_hidden", None) == loss_fn.of_hidden
        wraps = "it wraps another loss, to which it may add something" if is_copied else ""
        head = getattr(loss_fn, "needs_logits", "") or wraps or find_head(module.forward_funcs[-1])
        if isinstance(head, str):
            logger.info("the loss keeps the logits of each slice: %s", head)
            return None
        return cls(loss_fn, head, weights, autocast, around)

    @property
    def needs_logits(self) -> str:
        """Return why the loss needs logits now, since a program has changed the last layer; "" if it does not."""
        head = self._head()
        return head if isinstance(head, str) else ""

    def operations(self, hidden: Tensor) -> int:
        """Return the operations of the product that gives logits."""
        return 2 * hidden.numel() * self._own_head().weight.shape[0]

    def _own_head(self) -> Head:
        head = self._head()
        assert isinstance(head, Head), f"{head}, and was not when the batch began"
        return head

    def __call__(self, hidden: Tensor, labels: Any, weight: float) -> Tensor:
        """Return the share of a slice in the loss, whose value is there after its backward."""
        head = self._own_head()
        # the weights of every rank need a gradient, also without a label: the product of no rows gives one, and
        # autograd would give a matrix of zeros
        if weight == 0.0:
            of_none = head.weight.new_zeros(0, head.weight.shape[1])
            is_trained = any(each is not None and each.requires_grad for each in (head.weight, head.bias))
            outputs = [self._weights.linear(of_none, head.weight, head.bias)] if is_trained else []
            return exact_zero([hidden, *outputs])
        with self._autocast():
            kind = hidden.device.type
            if torch.is_autocast_enabled(kind):
                hidden = hidden.to(torch.get_autocast_dtype(kind))
            # W would need the gradients of all logits
            add = self._weights.adder(hidden, head.weight, waits=False)
            loss: Tensor = self._of_hidden(hidden, labels, head, weight, add, self._around)
        return loss


def tell_of_logits(who: str, outputs: Any, num_tokens: int) -> None:
    """Log the bytes per token that the outputs of the last layer take, if they are many."""
    of_token = sum(each.nbytes for each in tree_leaves(outputs) if torch.is_tensor(each)) // num_tokens
    if of_token >= _WORTH_TELLING_BYTES:
        logger.info(
            f"{who} takes the outputs of the last layer, {of_token:,} bytes per token of a slice, which keeps as much "
            "again for its backward. terapipe_ds.losses.LinearCrossEntropy takes hidden states (docs/losses.md)"
        )
