"""Starting the ranks of a benchmark, and waiting for them."""

import os
import pickle
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from terapipe_ds.bench import ranks
from terapipe_ds.bench.ranks import spawn_ranks


def end_with(rank: int, rendezvous: str, codes: list[int | None]) -> None:
    while (code := codes[rank]) is None:  # waits for what never comes
        pass
    os._exit(code)


@pytest.mark.parametrize("codes", [[3, 0], [0, 3], [None, 3]])
def test_a_rank_that_fails_is_an_error_and_ends_the_others(codes: list[int | None]) -> None:
    with pytest.raises(RuntimeError, match=f"rank {codes.index(3)} ended with exit code 3"):
        spawn_ranks(end_with, 2, codes)


@pytest.mark.parametrize(("code", "said"), [(0, None), (3, "rank 1 ended with exit code 3")])
def test_the_last_rank_may_end_while_nobody_looks(monkeypatch: pytest.MonkeyPatch, code: int, said: str | None) -> None:
    """Both ranks have ended by the time the first of them is noticed; a wait for nobody would never end."""

    def wait_for_all(sentinels: list[int], timeout: float | None = None) -> list[int]:
        if timeout is not None:  # asked by multiprocessing itself, which looks at a process now and then
            return plain(sentinels, timeout)
        assert sentinels, "waits for nobody"
        return [ended for sentinel in sentinels for ended in plain([sentinel])]

    plain = ranks.connection.wait
    monkeypatch.setattr(ranks.connection, "wait", wait_for_all)
    with pytest.raises(RuntimeError, match=said) if said else nullcontext():
        spawn_ranks(end_with, 2, [0, code])


def test_interrupts_are_as_before_where_a_rank_cannot_be_started() -> None:
    with pytest.raises((AttributeError, pickle.PicklingError)):
        spawn_ranks(end_with, 1, lambda: None)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def wait_long(rank: int, rendezvous: str) -> None:
    print("begins", flush=True)
    threading.Event().wait(200.0)


def test_ranks_end_with_a_command_that_is_killed() -> None:
    """Such a signal leaves no time to end them; they have its stdout, which ends with the last of them."""
    words = f"import sys; sys.path[0] = {str(Path(__file__).parent)!r}; import test_bench_ranks as these; "
    words += "these.spawn_ranks(these.wait_long, 1)"
    command = subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert command.stdout is not None and command.stdout.readline() == b"begins\n"
        command.kill()
        command.communicate(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)


def fail_with_a_thread(rank: int, rendezvous: str) -> None:
    """Like gloo's threads and messages on their way, the thread outlives whatever waits for its end."""
    threading.Thread(target=threading.Event().wait).start()
    raise ValueError("no such model")


def test_a_rank_that_raises_ends_whatever_its_threads_do(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="rank 0 ended with exit code 1"):
        spawn_ranks(fail_with_a_thread, 1)
    assert "no such model" in capfd.readouterr().err


def tell_of_interrupts(rank: int | str, rendezvous: str, folder: str) -> None:
    Path(folder, str(rank)).write_text(str(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])))


def test_an_interrupt_is_for_the_process_that_started_the_ranks(tmp_path: Path) -> None:
    """A new process starts the ranks: only its first child also starts the resource tracker of Python."""
    words = f"import sys; sys.path[0] = {str(Path(__file__).parent)!r}; import test_bench_ranks as these; "
    words += f"these.spawn_ranks(these.tell_of_interrupts, 2, {str(tmp_path)!r}); "
    words += f"these.tell_of_interrupts('own', '', {str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", words], timeout=120, check=True)
    blocked = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert blocked == {"0": "True", "1": "True", "own": "False"}  # a rank is ended; its traceback says nothing


def build(rank: int, rendezvous: str, folder: str) -> None:
    """A step that one rank cannot take and both have ended, and one in which the other waits for it."""
    import torch
    import torch.distributed as torch_dist

    torch_dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    both = ranks.problem_of_any_rank("both" if rank == 1 else None, "first step")
    Path(folder, f"{rank}").write_text(both or "")
    assert ranks.problem_of_any_rank(None, "second step") is None
    if rank == 0:
        torch_dist.all_reduce(torch.zeros(1))
    ranks.problem_of_any_rank("no layers" if rank == 1 else None, "third step", patience_s=0.2)


def test_a_rank_that_fails_alone_ends_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="rank 1 ended with exit code 1"):
        spawn_ranks(build, 2, str(tmp_path))
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["both"] * 2
    error = capfd.readouterr().err
    assert "and may wait for rank 1, which failed: no layers" in error and "RuntimeError: third step: others" in error


def count_threads(rank: int, rendezvous: str, out: str) -> None:
    """Leave the number of threads of the world's group, and twice how many three more add, and a sum over one."""
    import torch
    import torch.distributed as torch_dist

    torch_dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    numbers, groups = [_loop_threads()], []
    for _ in range(2):
        before, total = _loop_threads(), torch.tensor([rank + 1.0])
        groups += [torch_dist.new_group([0, 1]) for _ in range(3)]
        torch_dist.all_reduce(total, group=groups[-1])
        torch_dist.broadcast(total, src=0, group=groups[-3])
        numbers += [_loop_threads() - before, int(total)]
        ranks.share_gloo_thread()
    Path(out, f"{rank}").write_text(str(numbers))
    torch_dist.barrier()
    os._exit(0)


def _loop_threads() -> int:
    """The threads that wait for sockets, each by its epoll instance: not all versions of torch give them a name."""
    handles = Path("/proc/self/fd")
    return sum("eventpoll" in os.readlink(handle) for handle in handles.iterdir() if handle.is_symlink())


def test_all_groups_share_one_thread(tmp_path: Path) -> None:
    spawn_ranks(count_threads, 2, str(tmp_path))
    # unshared is how torch does it today: if that changes, what is shared here has become needless
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["[1, 3, 3, 0, 3]"] * 2
