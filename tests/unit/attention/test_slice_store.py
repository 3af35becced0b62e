"""The slice store: order, memory and the end of life of keys, values and their gradients."""

from collections.abc import Callable

import pytest
import torch
from attention_cases import MicroBatch, largest_error, random_inputs, run_plain, run_sliced, slices_of

from terapipe_ds.attention import ActiveSlice, SliceStore, SliceStoreError, push_slice, sliced_attention

SHAPE = (2, 4, 2, 20, 8)  # B, H, H_kv, L, D
NUMEL = 2 * 2 * 20 * 2 * 8  # keys and values of one layer and micro-batch: 2 * B * L * H_kv * D


# -- order --------------------------------------------------------------------------------------------------------


def three_slices(store: SliceStore | None = None) -> MicroBatch:
    return MicroBatch(random_inputs(SHAPE), (9, 10, 1), store or SliceStore())


def test_a_forward_out_of_order() -> None:
    micro_batch = three_slices()
    with pytest.raises(SliceStoreError, match=r"slice \[9, 19\) out of order, the next one must start at token 0"):
        micro_batch.forward(1)
    micro_batch = three_slices()
    micro_batch.forward(0)
    with pytest.raises(SliceStoreError, match=r"slice \[19, 20\) out of order, the next one must start at token 9"):
        micro_batch.forward(2)


def test_a_layer_name_used_twice_in_one_part() -> None:
    with pytest.raises(SliceStoreError, match=r"second time.*share the name 'attention' \(give each its own\)"):
        run_sliced(
            random_inputs(),
            (9, 11),
            attend=lambda q, k, v: sliced_attention(sliced_attention(q, k, v, "attention"), k, v, "attention"),
        )


NOT_DRAINED = {(2,): r"of \[0, 19\) still waiting", (2, 1): r"of \[0, 9\) still waiting"}


@pytest.mark.parametrize("order", [(0,), (1,), (2, 0), (2, 2), (2, 1, 1), (2, 1, 0, 0), *NOT_DRAINED])
def test_a_backward_out_of_order_and_a_release_before_the_last(order: tuple[int, ...]) -> None:
    micro_batch = three_slices()
    micro_batch.forward_all()

    def backward(i: int) -> None:
        micro_batch.outs[i].backward(micro_batch.grads[i], retain_graph=True)  # type: ignore[union-attr]

    for i in order if order in NOT_DRAINED else order[:-1]:
        backward(i)
    with pytest.raises(SliceStoreError, match=NOT_DRAINED.get(order, "out of order.*reverse slice order")):
        micro_batch.store.release(0, 0) if order in NOT_DRAINED else backward(order[-1])


def test_an_output_that_gets_no_gradient() -> None:
    """The loss may not use it, or a layer detaches it: nothing is lost."""
    micro_batch = three_slices()
    micro_batch.forward_all()
    micro_batch.store.release(0, 0)
    micro_batch.store.assert_drained()
    assert micro_batch.store.pool.live_bytes == 0


def test_a_forward_in_a_backward_needs_its_mode() -> None:
    micro_batch = three_slices()
    micro_batch.forward_all()
    with pytest.raises(SliceStoreError, match="mode 'train' \\(use 'recompute'\\)"):
        micro_batch.forward(1)


def test_a_forward_that_only_runs_again_and_a_release_before_the_last() -> None:
    """Also where nothing needs gradients, so that no backward would show it."""
    micro_batch = MicroBatch(random_inputs(SHAPE), (9, 10, 1), store := SliceStore(), needs_grad=(False,) * 3)
    micro_batch.forward(0)
    with push_slice(micro_batch.slices[1].replace(mode="recompute")):
        with pytest.raises(SliceStoreError, match=r"slice \[9, 19\) again, but only \[0, 9\) has run"):
            micro_batch.attend(*micro_batch.leaves[1])
    with pytest.raises(SliceStoreError, match=r"after the forward of \[0, 9\) of 20 tokens"):
        store.release(0, 0)


def test_recompute_rewrites_and_weight_only_reads() -> None:
    store = SliceStore()
    (first, _) = slices_of((2, 3), store)
    ones = torch.ones(1, 1, 2, 4)
    entry = store.write(first, 0, ones, 2 * ones)
    store.write(first.replace(mode="weight"), 0, 5 * ones, 5 * ones)
    assert [x.unique().tolist() for x in entry.keys_values(0, 2)] == [[1.0], [2.0]]
    assert store.write(first.replace(mode="recompute"), 0, 3 * ones, 4 * ones) is entry
    assert [x.unique().tolist() for x in entry.keys_values(0, 2)] == [[3.0], [4.0]]
    assert entry.filled == 2


@pytest.mark.parametrize(
    "change",
    [lambda x: x[:1], lambda x: x[:, :1], lambda x: x[..., :4], lambda x: x.float()],
    ids=["batch", "heads", "head dim", "dtype"],
)
def test_a_change_of_shape_within_a_micro_batch(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    store = SliceStore()
    first, second = slices_of((5, 5), store)
    k = torch.zeros(2, 2, 5, 8, dtype=torch.float64)
    store.write(first, "here", k, k)
    with pytest.raises(
        SliceStoreError, match=r"layer 'here'.*slice \[5, 10\).*began with .*= \[2, 2, 10, 8\], torch.float64"
    ):
        store.write(second, "here", change(k), change(k))


def test_keys_that_only_some_slices_detach() -> None:
    store = SliceStore()
    entry = store.write(slices_of((5, 5), store)[0], 0, *[torch.zeros(1, 1, 5, 4)] * 2)
    entry.record(kv_needs_grad=False)
    with pytest.raises(SliceStoreError, match="in some slices, and not in others; let k and v"):
        entry.record(kv_needs_grad=True)


# -- end of life --------------------------------------------------------------------------------------------------


def test_the_end_of_a_batch_names_what_is_left() -> None:
    store = SliceStore()
    MicroBatch(random_inputs(), (9, 11), store, micro_batch_id=3, part_id=2).forward_all()
    with pytest.raises(SliceStoreError, match=r"layer 'layer' \(part 2, micro-batch 3\)"):
        store.assert_drained()


def test_reset_after_an_exception() -> None:
    """The next batch runs in the same buffers; what is left of the old graph can no longer touch them."""
    store = SliceStore()
    old = three_slices(store)
    old.forward_all()
    old.backward(2)
    reserved = store.pool.reserved_bytes
    store.reset()
    store.assert_drained()
    assert store.pool.live_bytes == 0
    new = three_slices(store)
    new.forward_all()
    with pytest.raises(SliceStoreError, match="after the micro-batch was released"):
        old.backward(1)
    new.backward_all()
    assert largest_error(new.result(), run_plain(random_inputs(SHAPE))) <= 1e-12
    assert store.pool.reserved_bytes == reserved


# -- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "itemsize"), [(torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)]
)
def test_memory_of_one_micro_batch(dtype: torch.dtype, itemsize: int) -> None:
    store = SliceStore()
    micro_batch = MicroBatch(random_inputs(SHAPE, dtype), (9, 10, 1), store)
    kv_bytes, grad_bytes = NUMEL * itemsize, NUMEL * max(4, itemsize)
    micro_batch.forward(0)
    assert store.pool.live_bytes == kv_bytes
    micro_batch.forward(1)
    micro_batch.forward(2)
    assert store.pool.live_bytes == store.pool.peak_bytes == kv_bytes
    micro_batch.backward(2)
    assert store.pool.live_bytes == kv_bytes + grad_bytes
    micro_batch.backward(1)
    micro_batch.backward(0)
    assert store.pool.live_bytes == kv_bytes
    store.release(0, 0)
    assert store.pool.live_bytes == 0
    assert store.pool.peak_bytes == store.pool.reserved_bytes == kv_bytes + grad_bytes


def test_lengths_that_change_from_batch_to_batch() -> None:
    """Shorter sequences run in the buffers of the longest; longer ones replace them."""
    store = SliceStore()
    for length in (12, 20, 7, 16, 20, 3, 12):
        inputs = random_inputs((2, 4, 2, length, 8))
        result = run_sliced(inputs, (length // 2, length - length // 2), store)
        assert largest_error(result, run_plain(inputs)) <= 1e-12
    assert store.pool.reserved_bytes == 2 * NUMEL * 8


def test_a_probe_adds_to_the_gradients_of_the_prefix_as_training_does() -> None:
    """All slices but the last one add to the share of later ones, which costs more than to write the first share."""
    store = SliceStore()
    leaves: list[torch.Tensor] = []
    sums = []
    for start, stop in ((4, 8), (4, 8), (0, 4), (4, 8), (8, 12)):
        leaves = [x[:, :, start:stop].clone().requires_grad_() for x in random_inputs(SHAPE)[:3]]
        with push_slice(ActiveSlice(start, stop, 12, store=store, mode="probe")):
            sliced_attention(*leaves, layer=0).sum().backward()
        (entry,) = store._all()
        assert entry.grads.is_taken  # no slice is the last one to come
        sums.append(entry.grads.at(0, 4)[1].sum().item())
    one = sums[0]
    assert one > 0 and sums[1] == pytest.approx(2 * one)
    assert sums[3] > sums[2] == sums[1]  # the share of the tokens of a slice goes to its layer
    assert 0 < sums[4] < sums[3]  # the last one of a sequence has none after it
