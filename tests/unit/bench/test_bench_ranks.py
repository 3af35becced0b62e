"""Starting the ranks of a benchmark, and waiting for them."""

from __future__ import annotations

import os

import pytest

from terapipe_ds.bench import ranks
from terapipe_ds.bench.ranks import spawn_ranks


def end_with(rank: int, rendezvous: str, codes: list[int]) -> None:
    os._exit(codes[rank])


def test_ranks_that_end_are_waited_for() -> None:
    spawn_ranks(end_with, 2, [0, 0])


@pytest.mark.parametrize("codes", [[3, 0], [0, 3]])
def test_a_rank_that_fails_is_an_error_whoever_ends_first(codes: list[int]) -> None:
    with pytest.raises(RuntimeError, match=f"rank {codes.index(3)} ended with exit code 3"):
        spawn_ranks(end_with, 2, codes)


@pytest.mark.parametrize(("code", "said"), [(0, None), (3, "rank 1 ended with exit code 3")])
def test_the_last_rank_may_end_while_nobody_looks(
    monkeypatch: pytest.MonkeyPatch, code: int, said: str | None
) -> None:
    """Both ranks have ended by the time the first of them is noticed; a wait for nobody would never end."""

    def wait_for_all(sentinels: list[int], timeout: float | None = None) -> list[int]:
        if timeout is not None:  # asked by multiprocessing itself, which looks at a process now and then
            return plain(sentinels, timeout)
        assert sentinels, "waits for nobody"
        return [ended for sentinel in sentinels for ended in plain([sentinel])]

    plain = ranks.connection.wait
    monkeypatch.setattr(ranks.connection, "wait", wait_for_all)
    if said is None:
        spawn_ranks(end_with, 2, [0, code])
    else:
        with pytest.raises(RuntimeError, match=said):
            spawn_ranks(end_with, 2, [0, code])
