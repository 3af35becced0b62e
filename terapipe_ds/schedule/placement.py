"""Place the parts by one dict per schedule: (stage_id, chunk_id) -> part_id.

loop, K = 3, v = 2         v_shape, K = 3             bidirectional, K = 4 (down | up)
stage    0  1  2           stage    0  1  2           stage    0  1  2  3
chunk 0  0  1  2           chunk 0  0  1  2           chunk 0  0  1  2  3
chunk 1  3  4  5           chunk 1  5  4  3           chunk 1  3  2  1  0
"""

from __future__ import annotations

from terapipe_ds.schedule.action import ScheduleError

Placement = dict[tuple[int, int], int]
"""(stage_id, chunk_id) -> part_id."""

LOOPED = ("interleaved", "seq1f1b-interleaved", "seq1f1b-interleaved-zb")
V_SHAPED = ("zbv",)
BIDIRECTIONAL = ("chimera", "chimera-seq")
SEARCH = "search"
"""In the place of a name: an order that is found for the costs at hand, of one part per stage, or of two in a V."""
CHUNKED_SCHEDULES = (*LOOPED, *V_SHAPED, *BIDIRECTIONAL)
"""The schedules whose stages hold, or may hold, several chunks."""


def loop(num_stages: int, chunks_per_stage: int) -> Placement:
    """Place part `chunk * K + stage`: the parts go round the stages, v times (Megatron's interleaving)."""
    return {(s, c): c * num_stages + s for c in range(chunks_per_stage) for s in range(num_stages)}


def v_shape(num_stages: int) -> Placement:
    """Place parts 0 to K - 1 down the stages, the others back up (Qi et al., arXiv 2401.10241 and 2405.15362)."""
    return {(s, c): (s, 2 * num_stages - 1 - s)[c] for c in range(2) for s in range(num_stages)}


def bidirectional(num_stages: int) -> Placement:
    """Place two pipelines over the same K parts, chunk 0 down and chunk 1 up: every part has two places.

    (Chimera, Li and Hoefler, SC'21, arXiv 2107.06925.) Raises `ScheduleError` where K is odd.
    """
    if num_stages % 2:
        problem = f"num_stages is {num_stages}: a bidirectional schedule needs an even number of stages"
        reason = "its two pipelines share the slots of a stage in turns"
        raise ScheduleError(f"{problem}, for {reason}; give an even number or another schedule")
    return {(s, c): (s, num_stages - 1 - s)[c] for c in range(2) for s in range(num_stages)}


def placement_for(name: str, num_stages: int, chunks_per_stage: int = 1) -> Placement:
    """Return the placement of a schedule; `ScheduleError` on a number of chunks that it cannot take (see `build`)."""
    if name in LOOPED:
        return loop(num_stages, chunks_per_stage)
    if name == SEARCH and chunks_per_stage == 2:
        return v_shape(num_stages)
    if name == SEARCH and chunks_per_stage > 2:
        problem = f"chunks_per_stage is {chunks_per_stage}: {SEARCH!r} finds orders of one part per stage"
        raise ScheduleError(f"{problem}, or of two in a V; give 1 or 2")
    has_two = name in CHUNKED_SCHEDULES
    if chunks_per_stage > 1 + has_two:
        holds = "two parts per stage, give 2 or leave it out" if has_two else "one part per stage, leave it at 1"
        raise ScheduleError(f"chunks_per_stage is {chunks_per_stage}: schedule {name!r} has {holds}")
    if name in V_SHAPED:
        return v_shape(num_stages)
    return bidirectional(num_stages) if name in BIDIRECTIONAL else loop(num_stages, 1)


def count_parts(name: str, num_stages: int, chunks_per_stage: int) -> int:
    """Return the number of parts of a schedule; raise as `placement_for`. A huge number of chunks makes no table."""
    if name in LOOPED:
        return num_stages * chunks_per_stage
    return len(set(placement_for(name, num_stages, chunks_per_stage).values()))
