"""End a process whose main thread waits in a call that cannot be interrupted: by SIGTERM, or by a timer in C."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import threading
from typing import Any

POLL_S = 0.25
_HURRY_S = 5.0  # the most that the thread may take to end the process after SIGTERM


class Sigterm:
    """Let a thread notice SIGTERM, which launchers send to every rank when one has ended.

    A Python handler would run in the main thread, which may wait in a call that cannot be interrupted; the wake-up
    descriptor is written at once. A signal that others handle is left alone.
    """

    installed: Sigterm | None = None

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._receiver.settimeout(POLL_S)
        in_main_thread = threading.current_thread() is threading.main_thread()
        if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        descriptor_of_others = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        if descriptor_of_others != -1:
            signal.set_wakeup_fd(descriptor_of_others)
            return
        signal.signal(signal.SIGTERM, self._handle)
        Sigterm.installed = self

    def wait(self) -> bool:
        """Return whether the signal comes within the next `POLL_S`; for the watching thread."""
        try:
            return signal.SIGTERM in self._receiver.recv(64) and signal.getsignal(signal.SIGTERM) == self._handle
        except TimeoutError:
            return False

    def wake(self) -> None:
        """Let a thread in `wait` go on."""
        self._sender.send(bytes(1))

    def remove(self) -> None:
        """Give the signal back; only the main thread can."""
        if Sigterm.installed is self and threading.current_thread() is threading.main_thread():
            Sigterm.installed = None
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.set_wakeup_fd(-1)

    def _handle(self, *_: Any) -> None:
        """Let the watching thread end the process: the main thread may hold the lock of the store."""
        arm_timer(_HURRY_S)


def _leave_sigterm_to_the_parent() -> None:
    """Give the signal back in a forked child, a data loader's worker: it must die of its own signals."""
    if Sigterm.installed is not None:
        Sigterm.installed.remove()


os.register_at_fork(after_in_child=_leave_sigterm_to_the_parent)


# -- the timer -------------------------------------------------------------------------------------------------------

_not_forking = threading.Event()
_not_forking.set()


def arm_timer(seconds: float) -> None:
    """Print all stacks and end this process after `seconds`, unless the timer is armed again before."""
    if _not_forking.is_set():
        faulthandler.dump_traceback_later(seconds, exit=True)


def disarm_timer() -> None:
    """Disarm the timer, so that it does not end this process."""
    faulthandler.cancel_dump_traceback_later()


def _disarm_timer_to_fork() -> None:
    """Disarm the timer, because a child that has a copy of it would hang at its end."""
    _not_forking.clear()
    disarm_timer()


os.register_at_fork(before=_disarm_timer_to_fork, after_in_parent=_not_forking.set, after_in_child=_not_forking.set)
