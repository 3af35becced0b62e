"""What the package logs is seen, and a program that configures logging keeps the last word."""

import logging
from collections.abc import Iterator

import pytest

from terapipe_ds.runtime.log import show_log


@pytest.fixture
def bare_logger() -> Iterator[logging.Logger]:
    """The package's logger in a program without any logging of its own."""
    logger = logging.getLogger("terapipe_ds")
    before = logger.level, logger.propagate, logger.handlers[:]
    logger.handlers, logger.propagate = [], False  # pytest has handlers at the root
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.setLevel(before[0])
    logger.propagate, logger.handlers = before[1], before[2]


@pytest.mark.parametrize(("rank", "told"), [(0, ["the plan", "beware"]), (3, ["beware"])])
def test_rank_0_tells_all_and_others_warn(
    rank: int, told: list[str], bare_logger: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    bare_logger.handlers.clear()  # pytest's own
    show_log(rank)
    show_log(rank)
    bare_logger.info("the plan")
    bare_logger.warning("beware")
    assert capfd.readouterr().err.splitlines() == [f"[terapipe_ds rank {rank}] {line}" for line in told]


def test_the_programs_own_handlers_stay(bare_logger: logging.Logger) -> None:
    own = logging.NullHandler()
    bare_logger.handlers[:] = [own]
    show_log(0)
    assert bare_logger.handlers == [own] and bare_logger.level == logging.NOTSET
