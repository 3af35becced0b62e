"""What layers of all kinds have in common: bytes that replicas sum, W of rows, and sums over layers."""

import pytest

from terapipe_ds.costs.model_sizes import model_size
from terapipe_ds.planner.layers.chain import LayerChain
from terapipe_ds.planner.layers.counted import CountedLayers
from terapipe_ds.planner.layers.part_costs import PartCosts
from terapipe_ds.planner.layers.parts import Setting
from terapipe_ds.planner.strategy import Cluster
from tests.costs import CostsOf


@pytest.mark.parametrize(
    ("dtype", "zero_stage", "per_parameter"),
    [("fp32", 0, 4), ("fp32", 1, 4 + 4 / 2), ("fp16", 0, 2), ("fp16", 1, 2 + 2 / 2), ("bf16", 0, 3), ("bf16", 1, 3)],
)
def test_zero_1_sums_whole_gradients_and_gathers_parameters(dtype: str, zero_stage: int, per_parameter: float) -> None:
    """A sum sends and receives each byte about twice, a gather once: it counts half."""
    size = model_size("gpt3-1b")
    layers = CountedLayers(size, Cluster("h100", 1, 8), dtype)
    summed, _ = layers.end_bytes(Setting(tensor=2, micro_batch=1, data=4, zero_stage=zero_stage))
    assert summed[1] == per_parameter * size.layer_parameters() / 2
    if dtype == "fp32":  # as a chain's
        chain = LayerChain(*[[1.0]] * 4, [4.0]).of_length(8)
        assert chain.end_bytes(Setting(1, 1, 4, zero_stage))[0] == per_parameter


# A second per token forward, two backward, of which one and a half are W's.
FORWARD_AND_BACKWARD = lambda tokens, prefix: 1.0 * tokens, lambda tokens, prefix: 2.0 * tokens
UNSPLIT = CostsOf(*FORWARD_AND_BACKWARD)
SPLIT = CostsOf(*FORWARD_AND_BACKWARD, weight_s=lambda tokens, prefix: 1.5 * tokens)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_layer_of_a_chain_splits_its_backward_where_its_costs_do(recompute: bool) -> None:
    numbers = [[1.0, 1.0]] * 5

    def part_of(last: object) -> PartCosts:
        layers = LayerChain(*numbers, costs=[SPLIT, last]).of_length(8)
        return PartCosts(layers.layer_costs(Setting(1, 3), recompute))

    split = part_of(SPLIT)
    assert split.weight_s(4, 0) == 2 * 3 * 1.5 * 4  # two layers, three rows; W computes no forward again
    assert split.backward_s(4, 0) == 2 * 3 * (2 + recompute) * 4
    assert not hasattr(part_of(UNSPLIT), "weight_s")
