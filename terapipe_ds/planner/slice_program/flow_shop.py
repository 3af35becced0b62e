"""What a plan takes on unequal stages: the exact recursion of a permutation flow shop, with links as machines."""

from __future__ import annotations

import numpy as np

from terapipe_ds.planner.slice_program.dynamic_programs import Floats


def fill_drain_s(forward_s: Floats, backward_s: Floats, send_s: Floats | None, num_micro_batches: int) -> float:
    """Return the seconds from the first forward on the first stage to the last backward on it, exactly.

    All arrays [K, s]: stage and slice; `send_s[k]` is a transfer out of stage k, in either direction. Every stage runs
    all forwards, then all backwards in the reverse order (the schedule "terapipe"). No stage starts its backwards
    before the last one has run all forwards, so the time is that of two flow shops, one after the other.
    """
    ahead = makespan(forward_s, None if send_s is None else send_s[:-1], num_micro_batches)
    back = makespan(backward_s[::-1, ::-1], None if send_s is None else send_s[:0:-1, ::-1], num_micro_batches)
    return ahead + back


def makespan(times_s: Floats, links_s: Floats | None, repeats: int = 1) -> float:
    """Return the seconds until all jobs, `repeats` times over, have passed all machines in order; see `ends_s`."""
    links_s = None if links_s is None else np.tile(links_s, repeats)
    return float(ends_s(np.tile(times_s, repeats), links_s)[-1])


def ends_s(times_s: Floats, links_s: Floats | None) -> Floats:
    """Return the time [K] when each machine has done all jobs.

    `times_s` [K, s] of job i on machine k, `links_s` [K - 1, s] from machine k to k + 1 (None: no time). Machines and
    links take the jobs in order, one at a time: end[k, i] = max(end[k, i - 1], end[k - 1, i]) + time[k, i].

    With the times of backwards the result is the mirror image: the seconds from the start of the last job on each
    machine until the first job leaves machine 0.
    """
    ready = np.zeros(times_s.shape[1])
    ends = []
    for k, row in enumerate(times_s):
        ready = _through(ready, row)
        ends.append(ready[-1])
        if links_s is not None and k < len(links_s):
            ready = _through(ready, links_s[k])
    return np.array(ends)


def _through(ready: Floats, times_s: Floats) -> Floats:
    """Return when each job leaves one machine: the latest, over j <= i, of ready[j] plus the times of j..i."""
    ends = np.cumsum(times_s)
    latest: Floats = np.maximum.accumulate(ready - (ends - times_s)) + ends
    return latest
