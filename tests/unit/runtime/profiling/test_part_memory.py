"""The line through measured working bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from terapipe_ds.runtime.profiling.all_parts import _line

BYTES = st.integers(0, 10**9)


def test_a_line_by_hand() -> None:
    """5 fixed, 2 per token and 3 per token of prefix, with slices of 4 tokens and sequences of 24."""
    assert _line(small=5 + 8, late=5 + 8 + 60, whole=5 + 48, smallest=4, length=24) == (5, 2.0, 3.0)


@given(BYTES, BYTES, BYTES, st.integers(1, 50), st.integers(0, 500))
def test_the_line_reaches_what_was_measured(small: int, late: int, whole: int, smallest: int, more: int) -> None:
    length = smallest + more
    whole = whole if more else small
    fixed, per_token, per_prefix = _line(small, late if more else small, whole, smallest, length)
    assert min(fixed, per_token, per_prefix) >= 0
    slack = 1e-6 * max(small, late, whole) + 1
    assert fixed + per_token * smallest >= small - slack
    assert fixed + per_token * length >= whole - slack
    if more:
        assert fixed + per_token * smallest + per_prefix * more >= late - slack
