"""End a process whose main thread waits in a call that cannot be interrupted: by SIGTERM, or by a timer in C."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import NoReturn

POLL_S = 0.25
SAY_S = 2.0  # time for a reader of stderr before the rest of a text is dropped
LEAVE_S = 7.0  # time from the decision to end to the end, whatever blocks


class Sigterm:
    """Let a thread notice SIGTERM, which launchers send to every rank when one has ended.

    A Python handler would run in the main thread, which may wait in a call that cannot be interrupted. Python writes
    the wake-up descriptor at once. If the program handles the signal itself, this class leaves it alone.
    """

    installed: Sigterm | None = None

    def __init__(self, received: Callable[[], None]) -> None:
        self._handle = lambda *_: received()  # in the main thread, which may hold any lock
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        if Sigterm.installed is None:
            self.take()

    def take(self) -> None:
        """Receive the signal in the place of another engine, which may be destroyed; only the main thread can."""
        if Sigterm.installed is self or threading.current_thread() is not threading.main_thread():
            return
        if Sigterm.installed is not None:
            Sigterm.installed.remove()
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        # Keep the descriptor of another library: asyncio, for example, needs it
        descriptor_of_others = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        if descriptor_of_others != -1:
            signal.set_wakeup_fd(descriptor_of_others)
            return
        signal.signal(signal.SIGTERM, self._handle)
        Sigterm.installed = self

    def wait(self) -> bool:
        """Return whether the signal comes within the next `POLL_S`, or until `wake`; for the watching thread."""
        # Other signals arrive here, too; a byte 0 is a call of `wake`
        deadline, received = time.monotonic() + POLL_S, b""
        with suppress(TimeoutError):
            while all(received) and signal.SIGTERM not in received and (left_s := deadline - time.monotonic()) > 0:
                self._receiver.settimeout(left_s)
                received = self._receiver.recv(64)  # numbers of signals, others among them
        ours = (self._handle, signal.SIG_DFL)  # the latter if it came just before `remove`
        return signal.SIGTERM in received and signal.getsignal(signal.SIGTERM) in ours

    def wake(self) -> None:
        """Let a thread in `wait` go on."""
        with suppress(BlockingIOError):  # it has enough to read
            self._sender.send(bytes(1))

    def remove(self) -> None:
        """Restore the signal's handler; only the main thread can."""
        if Sigterm.installed is self and threading.current_thread() is threading.main_thread():
            Sigterm.installed = None
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            descriptor = signal.set_wakeup_fd(-1)
            if descriptor != self._sender.fileno():
                signal.set_wakeup_fd(descriptor)

    def close(self) -> None:
        """Close the sockets, unless signals still arrive there because another thread has closed the engine."""
        if Sigterm.installed is not self:
            self._receiver.close()
            self._sender.close()


# -- output to stderr ----------------------------------------------------------------------------------------------


class Stderr:
    """Write to stderr without waiting for a reader that is gone or blocks.

    The constructor opens the descriptor early, because there may be none left later.
    """

    def __init__(self) -> None:
        try:
            number = sys.stderr.fileno()
        except (AttributeError, OSError, ValueError):  # it is None, closed, or an object that only has `write`
            number = 2
        self.descriptor = _opened(number)

    @property
    def for_timer(self) -> int:
        """Return a descriptor for the timer in C: a socket cannot be opened anew, and it would wait for its reader."""
        return _nowhere() if stat.S_ISSOCK(os.fstat(self.descriptor).st_mode) else self.descriptor

    def write(self, text: str) -> None:
        """Write as much as the reader takes within `SAY_S`. Never raises."""
        rest, deadline = text.encode(errors="replace"), time.monotonic() + SAY_S
        with suppress(OSError, ValueError):
            poll = select.poll()
            poll.register(self.descriptor, select.POLLOUT)
            while rest and poll.poll(1000.0 * max(0.0, deadline - time.monotonic())):
                piece = rest[: select.PIPE_BUF]  # a pipe that is ready takes it whole: lines of ranks do not mix
                rest = rest[os.write(self.descriptor, piece[: piece.rfind(b"\n") + 1] or piece) :]

    def close(self) -> None:
        """Close the descriptor; nothing is written from now on."""
        os.close(self.descriptor)
        self.descriptor = -1


def _opened(number: int) -> int:
    """Return a new descriptor for the file of another descriptor, or for the null device.

    Only pipes and terminals are opened anew: two descriptors of a file would write at two places in it.
    """
    with suppress(OSError):  # not every system has the folder
        mode = os.fstat(number).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            return os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    with suppress(OSError):
        return os.dup(number)
    return os.dup(_nowhere())


@cache
def _nowhere() -> int:
    """Return a descriptor of the null device, opened once: there may be none left later."""
    return os.open(os.devnull, os.O_WRONLY)


# -- the timer -------------------------------------------------------------------------------------------------------

_timer = threading.RLock()  # held while this process forks; the handler of a signal may interrupt that
_armed: tuple[float, int] | None = None  # the seconds and the descriptor
_is_forking = False


def arm_timer(seconds: float, stderr: Stderr) -> None:
    """Make this process print all its stacks and end after some time, unless the timer is armed again before.

    Raises:
        RuntimeError: no thread can be started.
    """
    global _armed
    with _timer:
        _armed = seconds, stderr.for_timer
        if not _is_forking:
            faulthandler.dump_traceback_later(seconds, exit=True, file=stderr.for_timer)


def disarm_timer() -> None:
    """Disarm the timer, so that it does not end this process."""
    global _armed
    with _timer:
        _armed = None
        faulthandler.cancel_dump_traceback_later()


def leave(code: int) -> NoReturn:
    """End this process now, after its printed output is flushed; output that a blocked reader does not take is lost.

    The timer is armed, and ends the process if stdout blocks.
    """
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(code)


# -- children --------------------------------------------------------------------------------------------------------

_store_ports: set[int] = set()


def keep_from_children(port: int) -> None:
    """Keep forked children from holding the connections of a store, which would outlive this process unnoticed."""
    _store_ports.add(port)


def _drop_store_connections() -> None:
    """Replace the store's sockets by the null device: the copied store still knows their numbers."""
    if not _store_ports:
        return
    with suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        for name in os.listdir("/dev/fd"):
            with suppress(OSError):  # it is no socket
                if _ports(int(name)) & _store_ports:
                    os.dup2(null, int(name), inheritable=False)
        os.close(null)


def _ports(descriptor: int) -> set[int]:
    """Return the ports at both ends of a TCP socket; none for another socket. Raises OSError if it is no socket."""
    end, names = socket.socket(fileno=descriptor), []
    with suppress(OSError):  # if it only listens
        names += [end.getsockname()]
        names += [end.getpeername()]
    is_tcp = end.family in (socket.AF_INET, socket.AF_INET6)
    end.detach()
    return {name[1] for name in names} if is_tcp else set()


_mask: set[int] = set()


def _before_fork() -> None:
    """Defer SIGTERM and the timer: a child would send the signal to this process, and hang at its end."""
    global _is_forking, _mask
    # The lock keeps the state of the timer whole in both processes
    _timer.acquire()
    _is_forking = True
    if _armed is not None:
        faulthandler.cancel_dump_traceback_later()
    _mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _after_fork() -> None:
    global _is_forking
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask)
    _is_forking = False
    if _armed is not None:
        with suppress(RuntimeError):
            faulthandler.dump_traceback_later(_armed[0], exit=True, file=_armed[1])
    _timer.release()


def _after_fork_in_child() -> None:
    """Drop the signal, the timer and the store: a data loader's worker must die of its own signals."""
    global _armed
    if Sigterm.installed is not None:
        Sigterm.installed.remove()
    _drop_store_connections()
    _armed = None
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
