"""What rank 0 finds out for all: its errors reach every rank, with the ranks played by a stand-in."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from terapipe_ds.runtime import planning
from terapipe_ds.runtime.header import raised_on_every_rank


class _WithoutItsArgs(Exception):
    """Pickle writes it, and cannot read it again."""

    def __init__(self, *, stage: int) -> None:
        super().__init__(f"stage {stage}")


class _Ranks:
    """torch.distributed as rank 0 or 1 of two; what rank 0 sends is pickled, as it is there."""

    def __init__(self, rank: int, sent: list[bytes]) -> None:
        self.rank, self.sent = rank, sent

    def get_rank(self) -> int:
        return self.rank

    def broadcast_object_list(self, values: list[Any], src: int, group: Any) -> None:
        if self.rank == src:
            self.sent[:] = [pickle.dumps(value) for value in values]
        else:
            values[:] = [pickle.loads(each) for each in self.sent]


def _everywhere(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What both ranks get or raise, where rank 0 finds 7 or fails with ``error``."""
    groups: Any = SimpleNamespace(world="both")

    def ask() -> int:
        if error is not None:
            raise error
        return 7

    sent: list[bytes] = []
    found: list[Any] = []
    for rank in (0, 1):
        monkeypatch.setattr(planning, "torch_dist", _Ranks(rank, sent))
        try:
            found.append(planning.from_rank_0(groups, ask if rank == 0 else lambda: pytest.fail("rank 1 asks")))
        except Exception as raised:
            found.append(raised)
    return found


def test_what_rank_0_finds_is_known_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _everywhere(None, monkeypatch) == [7, 7]


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("no plan"), ValueError, "no plan"),
        (KeyError("layer"), KeyError, "'layer'"),
        (_WithoutItsArgs(stage=3), RuntimeError, "rank 0: _WithoutItsArgs: stage 3"),
        (TypeError(lambda: 0), RuntimeError, "rank 0: TypeError: <function"),
    ],
)
def test_any_error_of_rank_0_is_raised_everywhere(
    error: Exception, kind: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = _everywhere(error, monkeypatch)
    assert first is error and type(second) is kind and text in str(second)
    assert raised_on_every_rank(first) and raised_on_every_rank(second)
