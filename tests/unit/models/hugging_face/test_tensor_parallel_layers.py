"""Layers that hold a share of a weight: the gradient of their inputs equals the whole layer's."""

import copy

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from tests.distributed.harness import rank_pool


def shares() -> dict[str, tuple[Tensor, Tensor]]:
    """Return for each layer the gradients of inputs whose numbers lie by columns, of the whole and of the shares."""
    import torch.distributed as torch_dist
    from deepspeed.module_inject.layers import set_autotp_mode

    from terapipe_ds.models.hugging_face.tensor_parallel.layers import ColumnLinear, SharedHeads

    set_autotp_mode(training=True)
    torch.manual_seed(0)
    group, linear, results = torch_dist.group.WORLD, nn.Linear(6, 8).double(), {}
    inputs = torch.randn(1, 6, 5, dtype=torch.float64)  # of one sequence, as a convolution leaves them
    for name in ("columns", "heads"):
        whole, own = (inputs.clone().requires_grad_() for _ in range(2))
        linear(whole.transpose(1, 2)).sum().backward()
        share = nn.Linear(6, 8).double()
        share.load_state_dict(linear.state_dict())
        layer = ColumnLinear(share, group) if name == "columns" else SharedHeads(share, group, 2)
        copy.deepcopy(layer)(own.transpose(1, 2)).sum().backward()
        assert whole.grad is not None and own.grad is not None
        results[name] = whole.grad, own.grad
    return results


def test_gradients_of_inputs_are_summed_however_they_lie_in_memory() -> None:
    for results in rank_pool(2).run(shares):
        for name, (whole, own) in results.items():
            torch.testing.assert_close(own, whole, msg=name)
