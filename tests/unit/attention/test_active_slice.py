"""The stack of active slices: immutable values, seen by every thread, put back as they were."""

import dataclasses
import threading

import pytest

from terapipe_ds.attention import ActiveSlice, active_slice, push_slice


def test_pushed_slices_nest_and_come_off_again_after_an_exception_too() -> None:
    outer, inner = ActiveSlice(0, 4, 8), ActiveSlice(4, 8, 8, mode="recompute")
    with push_slice(outer) as given:
        assert given is outer and active_slice() is outer
        with pytest.raises(KeyError), push_slice(inner):
            assert active_slice() is inner
            raise KeyError
        assert active_slice() is outer
    assert active_slice() is None


def test_what_a_body_left_behind_goes_with_it() -> None:
    left = push_slice(ActiveSlice(4, 8, 8))
    with push_slice(ActiveSlice(0, 4, 8)):
        left.__enter__()
    assert active_slice() is None
    with pytest.raises(RuntimeError, match="reverse order"):
        left.__exit__(None, None, None)


def test_other_threads_see_it() -> None:
    """Autograd runs CUDA backward passes in threads of its own."""
    seen = []
    active = ActiveSlice(0, 4, 8)
    with push_slice(active):
        thread = threading.Thread(target=lambda: seen.append(active_slice()))
        thread.start()
        thread.join()
    assert seen == [active]


def test_properties_and_replace() -> None:
    active = ActiveSlice(2, 5, 8, micro_batch_id=3, slice_id=1, part_id=2, extras={"document_ids": 7})
    assert (active.num_tokens, active.is_whole, active.mode) == (3, False, "train")
    assert ActiveSlice(0, 8, 8).is_whole and not ActiveSlice(0, 7, 8).is_whole
    again = active.replace(mode="recompute")
    assert (again.mode, again.start, again.extras, again.micro_batch_id) == ("recompute", 2, {"document_ids": 7}, 3)
    assert active.mode == "train"
    with pytest.raises(dataclasses.FrozenInstanceError):
        active.start = 0  # type: ignore[misc]


@pytest.mark.parametrize("bounds", [(-1, 4, 8), (4, 4, 8), (5, 4, 8), (4, 9, 8)])
def test_impossible_bounds_are_refused(bounds: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="0 <= start < stop <= sequence_length"):
        ActiveSlice(*bounds)


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(ValueError, match="'training'.*train, eval, recompute, weight, probe"):
        ActiveSlice(0, 4, 8, mode="training")
