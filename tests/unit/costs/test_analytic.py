import dataclasses
from typing import Any

import numpy as np
import pytest

from terapipe_ds.costs.analytic import AnalyticCostError, AnalyticCosts, analytic_costs
from terapipe_ds.costs.devices import DeviceCard, DeviceError, LinkCard, device_card
from terapipe_ds.costs.model_sizes import MODEL_SIZES, ModelSize, ModelSizeError

# One layer of round numbers, on a device that does 1000 FLOP and moves 100 bytes a second.
TINY = ModelSize("round", 2, 4, 2, 1, head_dim=2, ffn_size=8, vocab_size=10, max_sequence_length=64, gated_mlp=True)
NEAR, FAR, ANY = LinkCard(50.0, 0.5), LinkCard(5.0, 2.0), LinkCard(1e40, 1e-40)
SLOW = DeviceCard("slow", "a slow device", {"fp32": 1000.0}, 100.0, 10**6, 1e-40, 1.0, 1.0, 1.0, 4, NEAR, FAR)
# One FLOP a second, and everything but arithmetic for nothing: its seconds are FLOPs.
COUNTER = DeviceCard("counter", "a counter", {"fp32": 1.0}, 1e40, 10**6, 1e-40, 1.0, 1.0, 1.0, 4, ANY, ANY)


def forward_flops(costs: AnalyticCosts, tokens: int, prefix: int) -> Any:
    return dataclasses.replace(costs, device=COUNTER, peer_link=COUNTER.node_link).forward_s(tokens, prefix)


def part(**changes: Any) -> AnalyticCosts:
    options: dict[str, Any] = {"num_stages": 1, "micro_batch": 1}
    return analytic_costs(TINY, changes.pop("device", SLOW), **(options | changes))[0]


@pytest.mark.parametrize("name", MODEL_SIZES)
@pytest.mark.parametrize("stages", [1, 2])
def test_flops_of_the_whole_model(name: str, stages: int) -> None:
    """2 FLOPs per weight and token forward, 6 with the backward, and attention by its own formula."""
    size, length, rows = MODEL_SIZES[name], 1024, 3
    parts = analytic_costs(size, COUNTER, num_stages=stages, micro_batch=rows, fused_loss=False)
    norms = 2 * size.hidden_size * (2 if size.bias else 1)
    biases = 0
    if size.bias:
        biases = 3 * size.num_heads * size.head_dim + 2 * size.hidden_size + size.ffn_size
    ends = size.embedding_parameters() + size.head_parameters()
    weights = size.active_parameters() - ends - size.num_layers * (norms + biases) + size.vocab_size * size.hidden_size
    seen = [window or length for window in size.windows or (0,) * size.num_layers]  # the last tokens, of each layer
    pairs = sum(min(place, window) for window in seen for place in range(1, length + 1))
    values = size.latent.value_dim if size.latent else size.head_dim
    attention = 2 * size.num_heads * (size.head_dim + values) * pairs  # Q K^T and P V, 2 FLOPs each
    forward = sum(p.forward_s(length, 0) for p in parts)
    backward = sum(p.backward_s(length, 0) for p in parts)
    assert forward == pytest.approx(rows * (2 * weights * length + attention), rel=1e-12)
    assert forward + backward == pytest.approx(rows * (6 * weights * length + 3.5 * attention), rel=1e-12)
    # without logits the head's products are all in the backward; model FLOPs count attention's backward as two forwards
    fused = analytic_costs(size, COUNTER, num_stages=stages, micro_batch=rows)
    head = 2 * size.vocab_size * size.hidden_size * length * rows
    assert sum(p.forward_s(length, 0) for p in fused) == pytest.approx(forward - head, rel=1e-12)
    assert sum(p.backward_s(length, 0) for p in fused) == pytest.approx(backward + head, rel=1e-12)
    assert rows * size.training_flops(length) == pytest.approx(rows * (6 * weights * length + 3 * attention), rel=1e-12)


def test_a_layer_by_hand() -> None:
    """5 tokens after 3, one row, fp32; the kernel floor is too small to matter.

    Weights 4 x (2 x 4 + 2 x 2 + 3 x 8) = 144. Matrix products: 2 x 5 x 144 = 1440 FLOP, 1.44 s; bytes 4 x (144 + 5 x
    (in and out: 2 x 4 + 2 x 2 + 3 x 8 + 4 x 4 = 52)) = 1616, 16.16 s. Attention: 15 + 15 pairs x 4 x 4 = 480 FLOP,
    0.48 s; bytes 4 x 2 x (2 x 2 x 5 + 2 x 8) = 288, 2.88 s. Elementwise: 4 x 5 x (10 x 4 + 3 x 8 + 4 x 2) = 1440
    bytes, 14.4 s.
    """
    costs = dataclasses.replace(part(), num_layers=1, has_embedding=False, has_head=False)
    assert forward_flops(costs, 5, 3) == pytest.approx(1440 + 480)
    assert costs.forward_s(5, 3) == pytest.approx(16.16 + 2.88 + 14.4)
    # A window of 2: 10 pairs, 160 FLOP; one key and value of the prefix are read, 4 x 2 x (2 x 2 x 5 + 2 x 6) bytes.
    windowed = dataclasses.replace(costs, windows=((2, 1),))
    assert forward_flops(windowed, 5, 3) == pytest.approx(1440 + 160)
    assert windowed.forward_s(5, 3) == pytest.approx(16.16 + 2.56 + 14.4)
    both = dataclasses.replace(windowed, num_layers=2)
    assert both.forward_s(5, 3) == pytest.approx(2 * 16.16 + 2.56 + 2.88 + 2 * 14.4)
    # Backward: input gradients 16.16, attention 2.5 times the FLOPs (1.2 s) and 3 times the bytes (8.64 s), elementwise
    # twice. Weight gradients: in and out 4 x 5 x 52 = 1040 bytes; each slice adds to 144 sums of 8 bytes, 11.52 s.
    assert costs.weight_s(5, 3) == pytest.approx(10.4 + 11.52, rel=1e-12)
    assert costs.weight_s(8192, 0) == pytest.approx(10.4 / 5 * 8192 + 11.52, rel=1e-12)
    assert costs.backward_s(5, 3) == pytest.approx(16.16 + 10.4 + 11.52 + 8.64 + 28.8)
    again = dataclasses.replace(costs, activation_checkpointing=True)
    assert again.backward_s(5, 3) == pytest.approx(16.16 + 10.4 + 11.52 + 8.64 + 28.8 + 33.44)
    # where arithmetic is the bound: 1 FLOP/s; a product of 5 rows does not hide its addition
    weak = dataclasses.replace(costs, device=dataclasses.replace(SLOW, peak_flops={"fp32": 1.0}))
    assert weak.forward_s(5, 3) == pytest.approx(1440 + 480 + 14.4)
    assert weak.backward_s(5, 3) == pytest.approx(2 * 1440 + 11.52 + 2.5 * 480 + 28.8)
    half = dataclasses.replace(weak, device=dataclasses.replace(weak.device, matmul_efficiency=0.5))
    assert half.forward_s(5, 3) == pytest.approx(2 * 1440 + 480 + 14.4)


def test_joint_products_by_hand() -> None:
    """In bf16 slices join their products until these have 4,096 rows, in and out 2 x 52 bytes each, or 1.04 s.

    The 144 sums of 8 bytes, 11.52 s, are then added once for all of them.
    """
    layer = dataclasses.replace(part(), num_layers=1, has_embedding=False, has_head=False)
    narrow = dataclasses.replace(layer, dtype="bf16", device=dataclasses.replace(SLOW, peak_flops={"bf16": 1000.0}))
    assert narrow.weight_s(5, 3) == pytest.approx(5 * 1.04 + 11.52 * 5 / 4096, rel=1e-12)
    assert narrow.weight_s(8192, 0) == pytest.approx(8192 * 1.04 + 11.52, rel=1e-12)
    # the product of 4,096 rows hides the addition: 2 x 144 FLOP per row
    weak = dataclasses.replace(narrow, device=dataclasses.replace(SLOW, peak_flops={"bf16": 1.0}))
    assert weak.weight_s(5, 3) == pytest.approx(2 * 5 * 144, rel=1e-12)
    rows = dataclasses.replace(narrow, micro_batch=4)  # 1,024 tokens have as many rows
    assert rows.weight_s(5, 3) == pytest.approx(20 * 1.04 + 11.52 * 5 / 1024, rel=1e-12)
    # if layers run again, each slice has its own addition
    again = dataclasses.replace(narrow, activation_checkpointing=True)
    assert again.weight_s(5, 3) == pytest.approx(5 * 1.04 + 11.52, rel=1e-12)


def test_the_ends_by_hand() -> None:
    middle = dataclasses.replace(part(), num_layers=1, has_embedding=False, has_head=False)
    first = dataclasses.replace(middle, has_embedding=True)
    last = dataclasses.replace(middle, has_head=True, fused_loss=False)
    assert first.forward_s(5, 3) - middle.forward_s(5, 3) == pytest.approx(2 * 5 * 4 * 4 / 100)
    table = 10 * 4 * (2 * 4 + 8) / 100  # the gradient of the table: written, read, and added, for each slice
    assert first.backward_s(5, 3) - middle.backward_s(5, 3) == pytest.approx(3 * 5 * 4 * 4 / 100 + table)
    # Head: bytes 4 x (40 + 5 x 14) = 440, 4.4 s against 0.4 s of FLOPs; loss: 5 x (2 x 4 x 4 + 12 x 10) = 760, 7.6 s.
    assert last.forward_s(5, 3) - middle.forward_s(5, 3) == pytest.approx(4.4 + 7.6)
    assert last.backward_s(5, 3) - middle.backward_s(5, 3) == pytest.approx(4.4 + 7.6 + 2.8 + 3.2)
    assert forward_flops(last, 5, 3) - forward_flops(middle, 5, 3) == pytest.approx(2 * 5 * 4 * 10)


def test_links_and_optimizer_by_hand() -> None:
    costs = part(num_stages=2, micro_batch=3)
    assert costs.send_s(5) == pytest.approx(0.5 + 3 * 5 * 4 * 4 / 50)  # two stages fit in a node of four
    assert costs.send_gradient_s(5) == costs.send_s(5)
    packed = part(num_stages=2, micro_batch=3, wire_formats=("int8", "bf16"))
    assert packed.send_s(5) == pytest.approx(0.5 + 3 * 5 * (4 + 4) / 50)  # a byte per number, and one scale
    assert packed.send_gradient_s(5) == pytest.approx(0.5 + 3 * 5 * 4 * 2 / 50)
    assert part(num_stages=2, tensor_parallel=2).link is SLOW.node_link
    far = analytic_costs(dataclasses.replace(TINY, num_layers=5), SLOW, num_stages=5)[0]
    assert far.send_s(5) == pytest.approx(2.0 + 5 * 4 * 4 / 5)
    # layer 144 + 2 norms of 4; embedding 40; head 4 + 40
    whole = part()
    assert whole.num_parameters() == TINY.num_parameters() == 2 * 152 + 40 + 44
    assert whole.step_s() == pytest.approx(388 * 28 / 100)
    assert [p.num_parameters() for p in analytic_costs(TINY, SLOW, num_stages=2)] == [152 + 40, 152 + 44]
    tied = dataclasses.replace(TINY, tied_embedding=True)
    parts = analytic_costs(tied, SLOW, num_stages=2)
    assert [p.num_parameters() for p in parts] == [152 + 40, 152 + 4 + 40]  # the matrix stands on both
    assert analytic_costs(tied, SLOW, num_stages=1)[0].num_parameters() == tied.num_parameters()


def test_tensor_parallel_by_hand() -> None:
    """Two ranks: half the heads, ffn and vocabulary; the single K/V head stands on both; two all-reduces a layer."""
    one = dataclasses.replace(part(), num_layers=1, has_embedding=False, has_head=False)
    two = dataclasses.replace(one, tensor_parallel=2)
    # weights 4 x (2 x 2 + 2 x 2 + 3 x 4) = 80; in and out 2 x 2 + 2 x 2 + 12 + 16 = 36
    matmul_s, attention_s = 4 * (80 + 5 * 36) / 100, 4 * 2 * (2 * 5 + 2 * 8) / 100
    elementwise_s = 4 * 5 * (40 + 12 + 8) / 100
    ring_s = 2 * 1 / 2 * (5 * 4 * 4) / 50 + 0.5
    assert two.forward_s(5, 3) == pytest.approx(matmul_s + attention_s + elementwise_s + 2 * ring_s)
    assert forward_flops(two, 5, 3) == pytest.approx(2 * 5 * 80 + 480 / 2)
    weight_s = 4 * 5 * 36 / 100 + 8 * 80 / 100
    backward_s = matmul_s + weight_s + 3 * attention_s + 2 * elementwise_s + 2 * ring_s
    assert two.backward_s(5, 3) == pytest.approx(backward_s)
    last = dataclasses.replace(two, has_head=True, fused_loss=False)
    assert forward_flops(last, 5, 3) - forward_flops(two, 5, 3) == pytest.approx(2 * 5 * 4 * 5)  # half of 10
    odd = dataclasses.replace(last, model=dataclasses.replace(TINY, vocab_size=11))
    assert forward_flops(odd, 5, 3) - forward_flops(two, 5, 3) == pytest.approx(2 * 5 * 4 * 6)  # padded
    # Megatron's sequence parallelism: norms, residuals and messages have half of the tokens
    split = dataclasses.replace(two, splits_tokens=True)
    assert two.forward_s(5, 3) - split.forward_s(5, 3) == pytest.approx(4 * 5 * 40 / 2 / 100)
    messages = [
        analytic_costs(TINY, SLOW, num_stages=2, tensor_parallel=2, splits_tokens=on)[0] for on in (False, True)
    ]
    assert [one.send_s(5) for one in messages] == [pytest.approx(0.5 + 5 * 4 * width / 50) for width in (4, 2)]
    wide = analytic_costs(dataclasses.replace(TINY, num_heads=8, num_kv_heads=8), SLOW, num_stages=1, tensor_parallel=8)
    assert wide[0].peer_link is SLOW.network_link


def test_the_floor_of_small_slices() -> None:
    """gpt3-175b at tensor parallel 4 on a V100: one token takes almost what 64 take, the weights are read anyway."""
    costs = analytic_costs("gpt3-175b", "v100", num_stages=96, tensor_parallel=4)[1]
    assert costs.forward_s(64, 0) < 1.2 * costs.forward_s(1, 0)
    assert costs.forward_s(2048, 0) > 7 * costs.forward_s(128, 0)
    weights_s = 12 * 12288**2 / 4 * 2 / 900e9
    assert costs.forward_s(1, 0) > weights_s
    slow_launch = dataclasses.replace(device_card("v100"), kernel_floor_s=1.0)
    launches = analytic_costs("gpt3-175b", slow_launch, num_stages=96, tensor_parallel=4)[1]
    assert launches.forward_s(1, 0) == pytest.approx(15, abs=0.1)
    assert launches.backward_s(1, 0) == pytest.approx(25, abs=0.1)  # products for weight gradients are for more tokens


def test_arrays_and_numbers_agree() -> None:
    costs = analytic_costs("tiny", "h100", num_stages=1, activation_checkpointing=True)[0]
    i, j = np.array([[1], [64], [500]]), np.array([0, 7, 512])
    for name in ("forward_s", "backward_s", "weight_s"):
        table = getattr(costs, name)(i, j)
        assert table.shape == (3, 3)
        assert table.tolist() == [[getattr(costs, name)(int(a), int(b)) for b in j] for a in i[:, 0]]
        assert type(getattr(costs, name)(3, 4)) is float
    assert type(costs.send_s(3)) is float and costs.send_s(np.array([3, 4])).shape == (2,)


def test_parts() -> None:
    parts = analytic_costs("gpt3-13b", "v100", num_stages=12, tensor_parallel=8, dtype="fp16")
    assert [p.num_layers for p in parts] == [4, 4, 4, 4, 3, 3, 3, 3, 3, 3, 3, 3]
    assert [p.has_embedding for p in parts] == [True] + [False] * 11
    assert [p.has_head for p in parts] == [False] * 11 + [True]
    assert parts[1] is parts[3] and parts[4] is parts[10] and parts[10] is not parts[11]
    assert sum(p.num_parameters() for p in parts) == MODEL_SIZES["gpt3-13b"].num_parameters() + 50257 * 5120
    given_layers = analytic_costs("tiny", "cpu", num_stages=3, layers_per_part=(1, 3, 0))
    assert [p.num_layers for p in given_layers] == [1, 3, 0]
    assert all(p.dtype == "bf16" for p in analytic_costs("tiny", "h100", num_stages=2))


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"tensor_parallel": 3}, AnalyticCostError, "tensor_parallel = 3: num_heads = 40 of gpt3-13b does not divide"),
    ({"tensor_parallel": 0}, AnalyticCostError, "tensor_parallel = 0: give an integer >= 1"),
    ({"num_stages": 41}, AnalyticCostError, "num_stages = 41: gpt3-13b has 40 layers; give at most"),
    ({"layers_per_part": [20, 19]}, AnalyticCostError, r"\[20, 19\]: give 2 integers that add up to the 40 layers"),
    ({"dtype": "bf16"}, DeviceError, "dtype = 'bf16': NVIDIA V100.*give one of fp32, fp16, or auto"),
    ({"device": "v1000"}, DeviceError, "did you mean 'v100'"),
    ({"model": "gpt3-14b"}, ModelSizeError, "did you mean 'gpt3-1.?b'"),
])  # fmt: skip
def test_bad_input(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    options = {"model": "gpt3-13b", "device": "v100", "num_stages": 2} | arguments
    with pytest.raises(error, match=message):
        analytic_costs(**options)


def test_more_bad_input() -> None:
    # 8 K/V heads, each repeated on 8 ranks
    assert analytic_costs("llama-3-70b", "v100", num_stages=2, tensor_parallel=64)[0].forward_s(1, 0) > 0
    odd = dataclasses.replace(TINY, num_heads=12, num_kv_heads=6)
    with pytest.raises(AnalyticCostError, match="num_kv_heads = 6 of round does not .* a divisor or a multiple of 6"):
        analytic_costs(odd, SLOW, num_stages=1, tensor_parallel=4)
    with pytest.raises(AnalyticCostError, match="ffn_size = 9"):
        analytic_costs(dataclasses.replace(TINY, ffn_size=9), SLOW, num_stages=1, tensor_parallel=2)
    for tokens, prefix in [(0, 0), (1, -1), (np.array([1, 0]), 0), (float("nan"), 0)]:
        with pytest.raises(AnalyticCostError, match="give tokens >= 1 and prefix >= 0"):
            part().forward_s(tokens, prefix)
    with pytest.raises(AnalyticCostError, match="give tokens >= 1"):
        part().send_s(0)
