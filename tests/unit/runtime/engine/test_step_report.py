"""What monitors and the log are told of steps, worked out by hand."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from terapipe_ds.costs.devices import device_card, peak_of_card
from terapipe_ds.planner.result import Prediction
from terapipe_ds.runtime.engine import trace
from terapipe_ds.runtime.engine.step_report import (
    Ran,
    Took,
    after_steps,
    device_figures,
    first_line,
    of_device,
    step_figures,
)
from terapipe_ds.runtime.engine.trace import Tracer
from terapipe_ds.schedule import build
from terapipe_ds.schedule.action import Action, Kind
from terapipe_ds.timeline import Timeline, TimelineEvent

SCHEDULE = build("seq1f1b", 2, 1, 1)
PREDICTED = Prediction(predicted_s=9.0, unsliced_s=18.0)


def event(stage_id: int, kind: str, start_s: float, end_s: float) -> TimelineEvent:
    return TimelineEvent(stage_id, f"{kind}0.0", 0, 0, kind, start_s, end_s)


TIMELINE = Timeline(2, (event(0, "F", 0, 2), event(0, "B", 9, 12), event(1, "F", 3, 5), event(1, "B", 5, 8)))


def test_figures_by_hand() -> None:
    """The stages work 10 of 2 x 12 seconds; each of the two messages takes one second."""
    figures = step_figures(Ran(SCHEDULE, 4096, PREDICTED), 16.0, TIMELINE, 3e12, 1e12)
    assert figures == pytest.approx({
        "step_seconds": 16.0, "tokens_per_second": 256.0, "pipeline_seconds": 12.0, "bubble": 14 / 24,
        "exposed_communication": 2 / 24, "predicted_seconds": 9.0, "predicted_over_measured": 0.75,
        "mfu": 3 / (16 * 2),
    })  # fmt: skip


@pytest.mark.parametrize(("timeline", "flops", "peak", "predicted", "missing"), [
    (TIMELINE, 3e12, None, PREDICTED, {"mfu"}), (TIMELINE, 0.0, 1e12, PREDICTED, {"mfu"}),
    (TIMELINE, 3e12, 1e12, None, {"predicted_seconds", "predicted_over_measured"}),
    (None, 3e12, 1e12, PREDICTED,
     {"mfu", "predicted_seconds", "predicted_over_measured", "pipeline_seconds", "bubble", "exposed_communication"}),
])  # fmt: skip
def test_what_is_not_known_is_left_out(
    timeline: Timeline | None, flops: float, peak: float | None, predicted: Prediction | None, missing: set[str]
) -> None:
    everything = step_figures(Ran(SCHEDULE, 4096, PREDICTED), 16.0, TIMELINE, 3e12, 1e12).keys()
    found = step_figures(Ran(SCHEDULE, 4096, predicted), 16.0, timeline, flops, peak)
    assert everything - found.keys() == missing


def test_the_first_line() -> None:
    line = first_line(Ran(build("seq1f1b-zb", 2, 4, 3), 1, PREDICTED), 4, 1)
    assert line == (
        "training runs seq1f1b-zb on 2 stages, 4 micro-batches of 3 slices; from first forward to last backward it "
        "should take 9 s, 2.00 times as fast as whole sequences"
    )
    slow = first_line(Ran(build("1f1b", 2, 1, 2), 1, Prediction(predicted_s=4.0, unsliced_s=2.0)), 1, 1)
    assert slow.endswith(
        '0.50 times as fast as whole sequences; "slices": "auto" chooses whole sequences where they are faster'
    )
    ramp = first_line(Ran(build("seq1f1b", 2, 3, [4, 2, 3]), 1, None), 3, 2)
    assert "3 micro-batches of 2 to 4 slices, 2 replicas; no prediction" in ramp
    assert "on 1 stage, 1 micro-batch of 1 slice; no " in first_line(Ran(build("1f1b", 1, 1, 1), 1, None), 1, 1)
    for num_parts in (1, 2):  # an interleaved order of one part per stage is a plain one
        looped = first_line(Ran(build("seq1f1b-interleaved", 2, 2, 2, chunks_per_stage=num_parts), 1, None), 2, 1)
        assert ('"chunks_per_stage": 2' in looped) == (num_parts == 1)


def test_what_steps_took() -> None:
    seconds = [(10.5, 9.9), (10.0, 9.0), (99.0, 99.0)]
    line = after_steps([Took(1000, PREDICTED, *each) for each in seconds])
    assert line == (
        "steps 2 to 4: median 10.5 s, 95 tokens/s; 9.9 s from first forward to last backward, 10% more than "
        "predicted, 1.82 times as fast as whole sequences by prediction"
    )
    far = after_steps([Took(1000, PREDICTED, 7.0, 6.0)])
    assert "33% less than predicted" in far and "start again to measure anew (with planner.cache_dir, delete" in far
    assert "predicted" not in after_steps([Took(1000, None, 7.0, 6.0)])


@pytest.mark.parametrize(("device", "dtype", "card"), [
    ("NVIDIA H100 80GB HBM3", "bf16", "h100"), ("NVIDIA A100-SXM4-40GB", "fp16", "a100-40gb"),
    ("Tesla V100-SXM2-16GB", "fp16", "v100"), ("NVIDIA H200", "fp32", "h200"), ("NVIDIA H100 PCIe", "bf16", None),
    ("NVIDIA H100 NVL", "bf16", None), ("NVIDIA A10G", "bf16", "a10g"), ("NVIDIA H200 MIG 1g.18gb", "bf16", None),
    ("NVIDIA GeForce RTX 4090", "bf16", "4090"), ("NVIDIA GeForce RTX 4090 D", "bf16", None),
    ("AMD Instinct MI300X", "bf16", "mi300x"), ("Tesla T4", "fp16", "t4"), ("NVIDIA GB200", "bf16", "gb200"),
])  # fmt: skip
def test_the_peak_of_a_card(device: str, dtype: str, card: str | None) -> None:
    expected = None if card is None else device_card(card).peak_flops[dtype]
    assert peak_of_card(device, dtype) == expected


class Stream:
    """A device that comes to an event some time after it was given: `lag_s`."""

    def __init__(self) -> None:
        self.now_s, self.lag_s = 50.0, 0.0

    def event(self) -> Any:
        one = SimpleNamespace(at_s=0.0, waited=False)
        one.record = lambda: setattr(one, "at_s", self.now_s + self.lag_s)
        one.synchronize = lambda: setattr(self, "now_s", max(self.now_s, one.at_s))
        one.elapsed_time = lambda other: (other.at_s - one.at_s) * 1e3
        return one


def test_events_of_a_device_tell_when_it_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host runs 3 s ahead, and waits once, at the end of the step."""
    stream, waits = Stream(), []
    computing = SimpleNamespace(synchronize=lambda: waits.append("for the stream"))
    device = SimpleNamespace(
        is_synchronized_device=lambda: False, current_stream=lambda: computing, Event=lambda **_: stream.event()
    )
    monkeypatch.setattr(trace, "get_accelerator", lambda: device)
    monkeypatch.setattr(time, "time", lambda: 1000.0 + stream.now_s)
    tracer = Tracer(None, rank=0, stage_id=0, num_stages=1, is_monitored=True)
    tracer.begin(7)
    stream.lag_s = 3.0
    with tracer.measure(Action(Kind.FORWARD, 0, 0)):
        stream.now_s += 0.5
        tracer.input_is_here()
        stream.now_s += 2.0
    tracer.write(7)
    assert tracer.last is not None and not waits
    assert [(one.start_s, one.end_s) for one in tracer.last] == [pytest.approx((1053.5, 1055.5))]
    assert not tracer.listens
    tracer.begin(None)
    assert not tracer.listens and tracer.last is None


def test_what_a_device_adds() -> None:
    """Nothing without one: there is no allocator that retries, and every message is in the host's memory."""
    assert device_figures(0, None) == {} and of_device(None) == ""
    assert device_figures(2, 0.15) == {"allocator_retries": 2, "host_share": 0.15}
    assert of_device(0.15) == "; messages of 15% of the batches by way of the host, 0 allocator retries"
