"""The recorder of measured timelines, in one process."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from terapipe_ds.bench.drivers.recorder import EngineRecorder
from terapipe_ds.runtime.engine import trace
from terapipe_ds.runtime.engine.trace import Tracer, is_traced
from terapipe_ds.schedule.action import Action, Kind
from terapipe_ds.timeline import Timeline, timeline_file_name

F, B = Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)


def run(tracer: Tracer, step: int | None, *actions: Action) -> None:
    tracer.begin(step)
    for action in actions:
        with tracer.measure(action):
            tracer.input_is_here()
    tracer.write(step or 0)


def test_the_wait_for_a_message_is_not_computation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "time", lambda: 100.0)
    tracer = Tracer(str(tmp_path), rank=3, stage_id=1, num_stages=2)
    tracer.begin(1)
    with tracer.measure(F):
        clock[0] += 5.0  # waiting
        tracer.input_is_here()
        clock[0] += 2.0
    with tracer.measure(B):
        clock[0] += 4.0
    tracer.write(1)
    timeline = Timeline.load(tmp_path / "timeline-step000001-rank0003.json")
    events = [(e.action, e.stage_id, e.start_s, e.end_s) for e in timeline.events]
    assert events == [("F0.0", 1, 105.0, 107.0), ("B0.0", 1, 107.0, 111.0)]


def test_a_clock_that_is_set_back_moves_no_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an hour, at each look: an event that ends before it begins would end the training."""
    wall = [time.time()]
    start_s = wall[0]

    def earlier() -> float:
        wall[0] -= 3600.0
        return wall[0] + 3600.0

    monkeypatch.setattr(time, "time", earlier)
    tracer = Tracer(str(tmp_path), rank=0, stage_id=0, num_stages=1)
    for step in (1, 2):
        run(tracer, step, F, B)
    files = [Timeline.load(tmp_path / timeline_file_name(step, 0)) for step in (1, 2)]
    for timeline, hour in zip(files, (0, 1), strict=True):
        assert all(abs(e.start_s - start_s + 3600 * hour) < 60 and e.end_s >= e.start_s for e in timeline.events)
        assert timeline.events[1].start_s >= timeline.events[0].end_s


def test_traces_that_cannot_be_written_are_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracer = Tracer(str(tmp_path), rank=0, stage_id=5, num_stages=1)  # which do not fit together
    for step in (1, 2):
        run(tracer, step, F)
    [said] = caplog.messages
    assert f"terapipe.trace_dir: cannot write to {tmp_path}" in said and "The training goes on without" in said


def test_evaluations_and_steps_in_between_are_not_written(tmp_path: Path) -> None:
    tracer = Tracer(str(tmp_path), 0, 0, 1)
    for step in (None, *range(42, 51), None):  # resumed after step 41
        run(tracer, step, F)
    assert sorted(path.name for path in tmp_path.iterdir()) == [timeline_file_name(s, 0) for s in range(42, 47)]
    assert [step for step in range(1, 301) if is_traced(step, step)] == [1, 2, 3, 4, 5, 100, 200, 300]


def test_on_an_accelerator_only_the_computation_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append("for the stream"))
    # without a `synchronize` of its own: that waits for messages as well, which may need what is computed here
    device = SimpleNamespace(is_synchronized_device=lambda: False, current_stream=lambda: stream)
    monkeypatch.setattr(trace, "get_accelerator", lambda: device)
    tracer = Tracer(str(tmp_path), rank=0, stage_id=0, num_stages=1)
    tracer.begin(1)
    with tracer.measure(F):
        tracer.input_is_here()
    assert len(waits) == 2  # for the input, and for the end
    recorder = EngineRecorder()
    with recorder.measure(B):
        recorder.input_is_here()
    assert len(waits) == 5  # and for what ran before
