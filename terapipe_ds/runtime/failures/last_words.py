"""Say once why a rank ends, to the other ranks and in its output, and end its process."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from terapipe_ds.runtime.failures.device_memory import save_memory_snapshot
from terapipe_ds.runtime.failures.process_end import LEAVE_S, POLL_S, Stderr, arm_timer, leave
from terapipe_ds.runtime.failures.report import RankRecord
from terapipe_ds.runtime.failures.store import Failure, WatchStore

ACKNOWLEDGE_S = 2.0  # time for the others to read why a rank fails: launchers end them soon after it
_WHAT_NOW = "Fix the cause and start the job again from its last checkpoint."


class PipelineAborted(RuntimeError):
    """Say that another rank failed, so that this one cannot go on."""


class LastWords:
    """Let one thread say why the rank has to end: the main or the watching one, whichever notices it first.

    It leaves the rank's last actions in `trace_dir`, and of a rank that raises on a GPU the memory.
    """

    def __init__(self, record: RankRecord, trace_dir: str | None) -> None:
        self._record, self._trace_dir = record, trace_dir
        self._taken = threading.Lock()  # for good, by the thread that says why
        self._said = threading.Event()

    @cached_property
    def _stderr(self) -> Stderr:
        return Stderr()

    @property
    def are_said(self) -> bool:
        """Return whether a thread has said why the rank ends, or begins to."""
        return self._taken.locked()

    def are_mine(self) -> bool:
        """Return whether the calling thread is the first and so has to `tell`; if not, wait for the other to finish."""
        if self._taken.acquire(blocking=False):
            return True
        self._said.wait(LEAVE_S / 2)
        return False

    def tell(self, others: WatchStore, text: str, failure: Failure | None = None, more: str = "") -> None:
        """Publish why this rank ends, then print it with `more`, and wait until the others have read it.

        If two ranks see one stall at the same time, the second prints the report of the first. Each of them has asked
        all ranks at a different moment, so that their reports may differ.
        """
        # The others come first: a reader of stderr may block
        if failure is not None:
            others.publish_failure(failure)
            first = others.failure
            if failure.stalled and first is not None and first.rank != failure.rank:
                text = str(first)
        self.remark(f"ends: {text}{more}\n{_WHAT_NOW}")
        self._said.set()
        # Then launchers and files, which must not prevent the end
        if not os.path.exists(os.environ.get("TORCHELASTIC_ERROR_FILE", "")):  # else it has the program's own error
            with suppress(Exception):  # the end matters more
                get_error_handler().record_exception(PipelineAborted(text + more))  # `torchrun` reads it there
        if self._trace_dir is not None:
            with suppress(Exception):
                self._record.full().save(Path(self._trace_dir))
            with suppress(Exception):
                if self._record.is_watched:  # an error of this rank: the watching thread must not ask the allocator
                    save_memory_snapshot(Path(self._trace_dir), self._record.rank)
        if failure is not None:
            others.wait_until_read(ACKNOWLEDGE_S)
            if self._record.rank == 0:  # the server leaves last, or the clients complain
                time.sleep(POLL_S)

    def remark(self, text: str) -> None:
        """Print a message of this rank, without waiting for a reader."""
        self._stderr.write(f"\nterapipe_ds: rank {self._record.rank} (stage {self._record.stage_id}) {text}\n")

    @contextmanager
    def leaving(self, code: int) -> Iterator[None]:
        """End this process after the body, whatever goes wrong in it."""
        self.hurry()
        try:
            yield
        except Exception:
            self.remark(f"ends; what it had to say first has failed:\n{traceback.format_exc()}")
        finally:
            leave(code)

    def hurry(self) -> None:
        """Make this process end soon, whatever its threads do."""
        with suppress(RuntimeError):  # no thread for the timer can be started
            self.arm(LEAVE_S)

    def arm(self, seconds: float) -> None:
        """Make this process end after some time, unless the timer is armed again before."""
        arm_timer(seconds, self._stderr)

    def close(self) -> None:
        self._stderr.close()
