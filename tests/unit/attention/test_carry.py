"""Carried states: what each mode reads and writes, wrong orders, memory and the end of life."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from attention_cases import slices_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from terapipe_ds.attention import ActiveSlice, SliceStore, SliceStoreError, carry, push_slice
from terapipe_ds.attention.document_edges import Starts

LENGTHS = (3, 1, 4)


class Sums:
    """A running sum over tokens, with a state of [B, D], slice by slice."""

    def __init__(self, rows: int = 2, lengths: Sequence[int] = LENGTHS, starts: Starts | None = None) -> None:
        self.store = SliceStore()
        self.slices = slices_of(lengths, self.store, starts)
        self.leaves = [torch.ones(rows, each.num_tokens, 2, requires_grad=True) for each in self.slices]
        self.outs: list[Tensor] = []
        self.states: list[Tensor | None] = []

    def __call__(self, x: Tensor) -> Tensor:
        before = carry.read("sums", "recurrent")
        self.states.append(before)
        out = x.cumsum(1) if before is None else x.cumsum(1) + before[:, None]
        return carry.write("sums", "recurrent", out[:, -1], out)

    def forward(self, i: int, mode: str = "train", run: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        with push_slice(self.slices[i].replace(mode=mode)):
            out = (run or self)(self.leaves[i])
        self.outs.append(out)
        return out

    def forward_all(self, run: Callable[[Tensor], Tensor] | None = None) -> None:
        for i in range(len(self.slices)):
            self.forward(i, run=run)

    def backward(self, i: int, **options: Any) -> None:
        with push_slice(self.slices[i].replace(mode="recompute")):
            self.outs[i].sum().backward(**options)

    def play(self, units: str) -> None:
        """Run some forwards and backwards, such as "F0 F1 B1"; W is a weight pass. A slice may have several B."""
        for unit in units.split():
            if unit[0] == "B":
                self.backward(int(unit[1:]), retain_graph=True)
            else:
                self.forward(int(unit[1:]), {"F": "train", "W": "weight"}[unit[0]])

    def backward_all(self) -> None:
        for i in reversed(range(len(self.slices))):
            self.backward(i)


# -- what the modes do ------------------------------------------------------------------------------------------------


def test_without_a_slice_and_on_a_whole_one() -> None:
    x, store = torch.ones(1, 4, 2), SliceStore()
    assert carry.read(0, "tokens") is None and carry.write(0, "tokens", x[:, -1], x) is x
    with push_slice(ActiveSlice(0, 4, 4, store=store)):
        assert carry.read(0, "tokens") is None and carry.write(0, "tokens", x[:, -1], x) is x
    store.assert_drained()


def test_a_slice_without_a_store() -> None:
    with (
        push_slice(ActiveSlice(0, 2, 4)),
        pytest.raises(SliceStoreError, match=r"state 'tokens'.*needs a slice store"),
    ):
        carry.read(0, "tokens")


def test_a_state_is_a_leaf_with_memory_of_its_own() -> None:
    sums = Sums()
    sums.forward(0)
    sums.forward(1)
    state = sums.states[1]
    assert state is not None and state.is_leaf and state.requires_grad and state.tolist() == [[3.0, 3.0]] * 2
    assert state.untyped_storage().nbytes() == state.nbytes  # the layer wrote a view of its whole output
    assert sums.store.pool.live_bytes == 2 * state.nbytes


def handed_on(written: Tensor, output: Tensor) -> Tensor:
    """Return the state that the second slice reads."""
    first, second, _ = slices_of(LENGTHS, SliceStore())
    with push_slice(first):
        carry.write(0, "any", written, output)
    with push_slice(second):
        state = carry.read(0, "any")
    assert state is not None
    return state


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_a_state_keeps_its_dtype(dtype: torch.dtype) -> None:
    state = handed_on(torch.full((2, 2), 5, dtype=dtype), torch.ones(2, 3, requires_grad=True))
    assert state.dtype == dtype and state.unique().tolist() == [5]
    assert not state.requires_grad  # nothing in what was written does


def test_a_state_may_be_a_number() -> None:
    x = torch.ones(2, 3)
    assert handed_on(x.sum(), x).item() == 6.0


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_in_evaluation_the_newest_state_alone_is_kept(grad_mode: Any) -> None:
    sums = Sums()
    with grad_mode():
        sums.forward(0, "eval")
        live = sums.store.pool.live_bytes
        sums.forward(1, "eval")
        assert sums.store.pool.live_bytes == sums.store.pool.peak_bytes == live == 2 * 2 * 4
        sums.forward(2, "eval")
    assert sums.outs[2][0, :, 0].tolist() == [5.0, 6.0, 7.0, 8.0]
    sums.store.release(0, 0)
    sums.store.assert_drained()
    assert sums.store.pool.live_bytes == 0


@pytest.mark.parametrize("mode", ["recompute", "weight"])
def test_a_forward_that_runs_again_reads_the_same_and_writes_nothing(mode: str) -> None:
    sums = Sums()
    sums.forward_all()
    live = sums.store.pool.live_bytes
    for i in (1, 0, 2):
        sums.forward(i, mode, lambda x: sums(7 * x))
        assert sums.states[-1] is sums.states[i]
    assert sums.store.pool.live_bytes == live
    sums.backward_all()
    assert [leaf.grad[0, 0, 0].item() for leaf in sums.leaves if leaf.grad is not None] == [8.0, 5.0, 4.0]


def test_a_probe_may_run_any_slice_at_any_time() -> None:
    store, leaf = SliceStore(), torch.ones(2, 2, 2, requires_grad=True)
    sums = Sums()
    for start in (4, 4, 0, 6, 2):
        with push_slice(ActiveSlice(start, start + 2, 8, store=store, mode="probe")):
            out = sums(leaf)
            out.sum().backward()
        assert store.pool.live_bytes == store.pool.peak_bytes == 2 * 2 * 4
    assert [state is None for state in sums.states] == [True, False, True, False, False]
    assert all(state.requires_grad for state in sums.states if state is not None)
    assert store.carried.bytes_of(0, 0) == 16
    store.release(0, 0)


def test_a_probe_that_runs_again_in_its_backward_reads_what_it_read_before() -> None:
    """Checkpoints without reentry compare what both runs save."""
    store, leaf, found = SliceStore(), torch.ones(2, 2, 2, requires_grad=True), []

    def layer(x: Tensor) -> Tensor:
        state = carry.read("layer", "sum")
        found.append(state is None)
        total = x.exp().sum(1) + (0 if state is None else state.exp())
        return carry.write("layer", "sum", total, x * total[:, None])

    for _ in range(2):
        with push_slice(ActiveSlice(4, 6, 8, store=store, mode="probe")):
            checkpoint(layer, leaf, use_reentrant=False).sum().backward()
    assert found == [True, True, False, False]


# -- documents --------------------------------------------------------------------------------------------------------


def test_a_document_that_begins_in_all_rows_reads_none() -> None:
    sums = Sums(starts=((0, 3), (0, 3)))
    sums.forward_all()
    assert sums.states[1] is None and sums.states[2] is not None
    assert sums.store.pool.live_bytes == sums.states[2].nbytes
    sums.backward_all()
    sums.store.release(0, 0)


def test_a_state_without_rows_at_an_edge() -> None:
    first, *_ = slices_of(LENGTHS, SliceStore(), ((0, 3), (0,)))
    x = torch.ones(2, 3)
    with push_slice(first), pytest.raises(SliceStoreError, match=r"token 3 in 1 of 2 rows.*is \[5, 2\]; give it"):
        carry.write(0, "convolution", x.new_zeros(5, 2), x)


# -- wrong orders -----------------------------------------------------------------------------------------------------


ORDERS = ("B0", "B1", "B2 B0", "B2 B2", "B2 B1 B1", "B2 B1 B0 B0")  # of backwards, of which the last is refused
OUT_OF_ORDER = "out of order, the next one must end at token"
LEFT_OVER = r"before any backward.*use the tensor that carry.write\(\) returns"
WRONG: list[tuple[str, Callable[[Sums], Any], str]] = [  # what runs before, then what is refused, and the message
    ("F0 F1 F2 B2 W2", lambda it: it.outs[-1].sum().backward(), "out of order"),
    ("", lambda it: it.forward(1), r"slice \[3, 4\) reads the state 'recurrent', which no slice before"),
    (
        "F0",
        lambda it: it.forward(0, run=lambda x: (carry.read("sums", "recurrent"), x)[1]),
        r"\[0, 3\) has written it already: .*reads after it writes",
    ),
    (
        "",
        lambda it: it.forward(0, run=lambda x: carry.write("sums", "recurrent", x[:, -1], it(x))),
        r"\[0, 3\) has written it already: two layers of this part share the name",
    ),
    *((f"F0 F1 F2 {order[:-2]}", lambda it, last=order[-2:]: it.play(last), OUT_OF_ORDER) for order in ORDERS),
    (
        "F0 F1 F2 B2 B1 B0",
        lambda it: it.forward(2, "weight"),
        "reads the state at token 4 again, but the slice before has run",
    ),
    ("F0 F1 F2", lambda it: it.store.release(0, 0), LEFT_OVER),
    ("F0 F1 F2 B2", lambda it: it.store.release(0, 0), r"gradients of \[0, 4\) still waiting"),
    ("F0 F1 F2 B2 B1", lambda it: it.store.release(0, 0), r"gradients of \[0, 3\) still waiting"),
    ("F0", lambda it: it.store.assert_drained(), r"state 'recurrent' of layer 'sums' \(part 0, micro-batch 0\)"),
]


@pytest.mark.parametrize(("before", "refused", "message"), WRONG, ids=lambda each: "" if callable(each) else each)
def test_what_comes_in_a_wrong_order_or_is_left_over(before: str, refused: Callable[[Sums], Any], message: str) -> None:
    sums = Sums()
    sums.play(before)
    with pytest.raises(SliceStoreError, match=message):
        refused(sums)


def test_a_state_that_a_slice_leaves_out() -> None:
    sums = Sums()
    sums.forward(0)
    sums.forward(1, run=lambda x: x)
    with pytest.raises(SliceStoreError, match=r"slice \[4, 8\) reads it but only \[0, 3\) has written it; every"):
        sums.forward(2)
    with pytest.raises(
        SliceStoreError, match=r"slice \[4, 8\) writes it but only \[0, 3\) has written it; every slice"
    ):
        sums.forward(2, run=lambda x: carry.write("sums", "recurrent", x[:, -1], x))


@pytest.mark.parametrize("state_and_output", [(None, torch.ones(2)), (torch.ones(2), (torch.ones(2),))])
def test_a_state_or_an_output_that_is_no_tensor(state_and_output: Any) -> None:
    """As of a kernel that was not asked for its last state, or that gives more than one tensor."""
    message = r"layer 3, state 's': carry.write\(\) takes .* one tensor each, got .*(NoneType|tuple).*; ask the kernel"
    with push_slice(ActiveSlice(0, 5, 10, store=SliceStore())), pytest.raises(TypeError, match=message):
        carry.write(3, "s", *state_and_output)


@pytest.mark.parametrize("mode", ["recompute", "weight"])
def test_a_slice_that_runs_again_before_it_has_run(mode: str) -> None:
    sums = Sums()
    sums.forward(0)
    with pytest.raises(SliceStoreError, match=r"but only \[0, 3\) has run"):
        sums.forward(1, mode)
    with pytest.raises(SliceStoreError, match=r"but only \[0, 3\) has run"):
        sums.forward(1, mode, lambda x: carry.write("sums", "recurrent", x[:, -1], x))


def test_a_gradient_that_comes_too_late() -> None:
    """It passes by the output that is tied: the layer hands on a second one."""
    sums, late = Sums(), []

    def with_a_second_output(x: Tensor) -> Tensor:
        out = sums(x)
        late.append(sums.states[-1])
        return out

    sums.forward_all(with_a_second_output)
    assert late[2] is not None
    second = late[2] * 2
    for i in (2, 1):
        sums.backward(i)
    with pytest.raises(SliceStoreError, match="the state at token 4 got a gradient after"):
        second.sum().backward()


def test_a_state_that_is_changed_in_place() -> None:
    sums = Sums()
    sums.forward(0)

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():  # as in the first forward of a reentrant checkpoint
            state = carry.read("sums", "recurrent")
            assert state is not None
            return carry.write("sums", "recurrent", state.add_(1), x)

    sums.forward(1, run=run)
    with pytest.raises(SliceStoreError, match="token 3 was changed in place.*a tensor of its own"):
        sums.forward(1, "recompute")


def test_an_output_may_be_changed_in_place() -> None:
    sums = Sums()
    sums.forward_all(lambda x: sums(x).mul_(2))
    sums.backward_all()
    assert [leaf.grad[0, 0, 0].item() for leaf in sums.leaves if leaf.grad is not None] == [16.0, 10.0, 8.0]


def test_a_gradient_whose_memory_another_node_keeps() -> None:
    """Autograd gives both terms of a sum one gradient. A linear layer may keep it for W, when the state's is taken."""
    sums, kept = Sums(starts=((0, 3), (0,))), list[Tensor]()

    def run(x: Tensor) -> Tensor:
        before, new = carry.read("sums", "s"), x[:, -1] * 2
        if before is not None:
            new.register_hook(kept.append)
            new = (before.view(-1) + new.view(-1)).view(2, 2)
        return carry.write("sums", "s", new, x + new[:, None])

    sums.forward_all(run)
    for i in (2, 1):
        sums.backward(i)
    assert kept[1].tolist() == [[5.0, 5.0]] * 2
    sums.backward(0)
    assert kept[1].tolist() == [[5.0, 5.0]] * 2
    assert [leaf.grad[0, -1, 0].item() for leaf in sums.leaves if leaf.grad is not None] == [7.0, 11.0, 9.0]


# -- end of life ------------------------------------------------------------------------------------------------------


def test_an_output_that_goes_on_untied() -> None:
    sums = Sums()

    def forgetful(x: Tensor) -> Tensor:
        sums(x)
        return x

    sums.forward_all(forgetful)
    sums.backward_all()
    with pytest.raises(SliceStoreError, match=r"use the tensor that carry.write\(\) returns"):
        sums.store.release(0, 0)


def test_a_state_that_is_written_without_gradients() -> None:
    """The forwards of reentrant checkpoints do that too, but their second run ties the output."""
    sums = Sums()

    def untied(x: Tensor) -> Tensor:
        state = carry.read("sums", "s")
        out = x.cumsum(1) if state is None else x.cumsum(1) + state[:, None]
        with torch.no_grad():
            carry.write("sums", "s", out[:, -1], out)
        return out

    sums.forward_all(untied)
    sums.backward_all()
    with pytest.raises(SliceStoreError, match=r"gradients of its states that no backward has taken.*no_grad"):
        sums.store.release(0, 0)


@pytest.mark.parametrize("starts", [None, ((0, 3), (0, 3)), ((0, 4), (0, 4)), ((0, 3, 4), (0, 2))])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_state_that_needs_no_gradient_in_a_checkpoint(reentrant: bool, starts: Starts | None) -> None:
    """Only what comes after it does. A reentrant checkpoint tells no earlier than in its second run."""
    sums, weight = Sums(starts=starts), torch.ones(2, requires_grad=True)

    def frozen(x: Tensor) -> Tensor:
        with_gradients: Tensor = checkpoint(lambda y, w: sums(y) * w, x.detach(), weight, use_reentrant=reentrant)
        return with_gradients

    sums.forward_all(frozen)
    sums.backward_all()
    assert weight.grad is not None and torch.equal(weight.grad, sum(out.detach().sum((0, 1)) for out in sums.outs))
    sums.store.release(0, 0)
    sums.store.assert_drained()


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_release_of_a_state_that_some_slices_wrote(mode: str) -> None:
    sums = Sums()
    with torch.no_grad():
        sums.forward(0, mode)
        sums.forward(1, mode)
    with pytest.raises(SliceStoreError, match=r"released after \[0, 4\) of 8 tokens had written it"):
        sums.store.release(0, 0)


def test_memory_comes_and_goes_with_the_slices() -> None:
    sums, one = Sums(), 2 * 2 * 4
    sums.forward_all()
    assert sums.store.pool.live_bytes == sums.store.pool.reserved_bytes == sums.store.carried.bytes_of(0, 0) == 2 * one
    live = []
    for i in (2, 1, 0):
        sums.backward(i)
        live.append(sums.store.pool.live_bytes)
    assert live == [2 * one, one, 0]
    sums.store.release(0, 0)
    assert sums.store.pool.peak_bytes == 2 * one and sums.store.pool.reserved_bytes == 0


def test_reset_after_an_exception() -> None:
    """What is left of the old graph can no longer reach the states of the next batch."""
    sums = Sums()
    sums.forward_all()
    sums.backward(2)
    sums.store.reset()
    sums.store.assert_drained()
    assert sums.store.pool.live_bytes == 0
    with pytest.raises(SliceStoreError, match="after the micro-batch was released"):
        sums.backward(1)


def test_micro_batches_and_parts_have_states_of_their_own() -> None:
    store = SliceStore()
    first, second, _ = slices_of(LENGTHS, store)
    changes = [{}, {"micro_batch_id": 1}, {"part_id": 1}]
    x = torch.ones(1, 1)
    for value, change in enumerate(changes):
        with push_slice(first.replace(**change)):
            carry.write(0, "any", x * value, x)
    for value, change in enumerate(changes):
        with push_slice(second.replace(**change)):
            state = carry.read(0, "any")
        assert state is not None and state.item() == value
