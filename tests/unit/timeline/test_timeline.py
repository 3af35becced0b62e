import csv
import dataclasses
import io
import itertools
import json
import math
import re
import resource
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terapipe_ds.timeline import (
    CriticalStep,
    Timeline,
    TimelineError,
    TimelineEvent,
    parse_file_name,
    picture,
    timeline_file_name,
)
from terapipe_ds.timeline.export import to_chrome_trace, to_csv
from terapipe_ds.timeline.picture import build_figure, draw_timelines
from terapipe_ds.timeline.waits import find_waits
from tests.unit.timeline.drawn_texts import overlaps, texts_of


def event(stage_id: int, action: str, start_s: float, end_s: float, chunk_id: int = 0) -> TimelineEvent:
    kind = action.rstrip("0123456789.")
    micro_batch_id, slice_id = map(int, action[len(kind) :].split(".")) if "." in action else (-1, -1)
    return TimelineEvent(stage_id, action, micro_batch_id, slice_id, kind, start_s, end_s, chunk_id)


def two_stages() -> Timeline:
    """Stage 0 computes 4 of 6 seconds, stage 1 computes 3; what is no F, B or W does not count."""
    first = (event(0, "L0", 8, 10), event(0, "F0.0", 10, 12), event(0, "B0.0", 14, 16), event(0, "ST", 16, 20))
    second = (event(1, "F0.0", 12, 13), event(1, "B0.0", 13, 14), event(1, "W0.0", 14, 15))
    return Timeline(2, (*first, *second), name="seq1f1b", peak_live_slices=(1, 1))


def large(num_stages: int, num_units: int, slices: int = 4) -> Timeline:
    events = []
    for stage_id in range(num_stages):
        for unit in range(num_units):
            text = f"{unit // slices}.{unit % slices}"
            start_s = 1e-3 * (stage_id + unit)
            back_s = 1e-3 * (2 * num_stages + num_units - stage_id + 2 * unit)
            events.append(event(stage_id, f"F{text}", start_s, start_s + 1e-3))
            events.append(event(stage_id, f"B{text}", back_s, back_s + 2e-3))
    return Timeline(num_stages, tuple(events))


seconds = st.floats(0, 1e6, allow_nan=False)
events = st.builds(
    lambda stage_id, kind, m, s, start_s, length_s, chunk_id: TimelineEvent(
        stage_id, f"{kind}{m}.{s}", m, s, kind, start_s, start_s + length_s, chunk_id
    ),
    st.integers(0, 3),
    st.sampled_from(["F", "B", "W", "SA", "ST"]),
    st.integers(-1, 20),
    st.integers(-1, 20),
    seconds,
    seconds,
    st.integers(0, 2),
)
peaks = st.none() | st.lists(st.integers(0, 10**12), min_size=4, max_size=4)
timelines = st.builds(Timeline, st.just(4), st.lists(events, max_size=12), st.text(max_size=8), peaks, peaks)


def test_makespan_and_bubble_count_computation_only() -> None:
    timeline = two_stages()
    assert timeline.makespan_s == 6.0
    assert timeline.busy_s() == (4.0, 3.0)
    assert timeline.bubble_fraction == pytest.approx(5 / 12)
    assert timeline.bubbles() == pytest.approx((1 / 3, 1 / 2))
    overlapping = Timeline(1, (event(0, "B0.0", 0, 4), event(0, "W0.1", 1, 3), event(0, "W0.0", 3, 5)))
    assert (overlapping.busy_s(), overlapping.bubble_fraction) == ((5.0,), 0.0)
    for events in ((), (event(0, "ST", 1, 2),), (event(0, "F0.0", 1, 1),)):
        nothing = Timeline(3, events)
        assert (nothing.makespan_s, nothing.bubble_fraction, nothing.bubbles()) == (0.0, 0.0, (0.0, 0.0, 0.0))


@pytest.mark.parametrize(("start_s", "end_s"), [(1.0, 0.5), (math.nan, 1.0), (0.0, math.inf)])
def test_impossible_times(start_s: float, end_s: float) -> None:
    with pytest.raises(TimelineError, match=r"F0.0 on stage 0 runs from .* finite times"):
        event(0, "F0.0", start_s, end_s)


def test_impossible_timelines() -> None:
    with pytest.raises(TimelineError, match="F0.0 is on stage 2 of 2 stages"):
        Timeline(2, (event(2, "F0.0", 0, 1),))
    with pytest.raises(TimelineError, match="num_stages is 0"):
        Timeline(0, ())
    with pytest.raises(TimelineError, match="peak_bytes has 1 entries for 2 stages"):
        Timeline(2, (), peak_bytes=(1,))


@given(timelines)
def test_json_there_and_back(timeline: Timeline) -> None:
    assert Timeline.from_json(timeline.to_json()) == timeline


def simulated() -> Timeline:
    first = event(0, "F0.0", 0, 1)
    second = event(0, "B0.0", 1, 3)
    path = (CriticalStep(first, "start"), CriticalStep(second, "stage"))
    return Timeline(1, (first, second), "made", (1,), (9,), bytes_over_time=(((0.0, 5), (1.5, 9)),), critical_path=path)


def test_what_a_simulation_adds_comes_back_and_a_measured_file_does_not_have_it() -> None:
    assert Timeline.from_json(simulated().to_json()) == simulated()
    text = json.loads(two_stages().to_json())
    assert text["version"] == 1
    assert not {"critical_path", "bytes_over_time"} & text.keys()


MEASURED, SIMULATED = (json.loads(make().to_json()) for make in (two_stages, simulated))
LATE = [MEASURED["events"][0] | {"start_s": 1e9}]


@pytest.mark.parametrize(("content", "reason"), [
    (MEASURED | {"format": "other"}, "not a timeline"),
    (MEASURED | {"version": 2}, "version = 2: expected 1; give a file"),
    (MEASURED | {"extra": 1}, "the file has an unknown key .extra."),
    (
        {"format": "terapipe_ds.timeline", "version": 1, "name": ""},
        "the file lacks num_stages, peak_live_slices, .*; give a file of",
    ),
    (MEASURED | {"num_stages": 2.0}, "num_stages = 2.0: expected a valid integer"),
    (MEASURED | {"num_stages": 1}, "is on stage 1 of 1 stages"),
    (MEASURED | {"events": [3]}, r"events\[0\] = 3: expected an object"),
    (MEASURED | {"events": [LATE[0] | {"start_s": "0"}]}, r"events\[0\].start_s = .0.: expected a valid"),
    (MEASURED | {"events": [LATE[0] | {"start_s": 10**400}]}, "finite times"),
    (MEASURED | {"events": LATE}, "runs from 1000000000.0 s to 10.0 s"),
    (SIMULATED | {"bytes_over_time": [[[0, 1]], [[0, 1]]]}, "bytes_over_time has 2 entries for 1 stages"),
    (SIMULATED | {"bytes_over_time": [[[0.0]]]}, r"bytes_over_time\[0\]\[0\] lacks 1"),
    (SIMULATED | {"bytes_over_time": [[[math.nan, 1]]]}, r"bytes_over_time\[0\]\[0\]\[0\] = nan: "),
    (SIMULATED | {"critical_path": [[2, "stage"]]}, "critical_path has event 2: give numbers below 2"),
    (SIMULATED | {"critical_path": [[-1, "stage"]]}, r"critical_path\[0\]\[0\] = -1"),
    (SIMULATED | {"critical_path": [0]}, r"critical_path\[0\] = 0"),
])  # fmt: skip
def test_other_files_are_refused(tmp_path: Path, content: dict[str, Any], reason: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(content))
    with pytest.raises(TimelineError, match=f"other.json: .*{reason}"):
        Timeline.load(path)
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(TimelineError, match="other.json: not a timeline: the text is no JSON"):
        Timeline.load(path)


def test_chrome_trace() -> None:
    rows = json.loads(to_chrome_trace(two_stages()))["traceEvents"]
    names = [row["args"]["name"] for row in rows if row["ph"] == "M"]
    assert names == ["stage 0", "stage 1"]
    forward = next(row for row in rows if row["name"] == "F0.0" and row["tid"] == 0)
    assert (forward["ts"], forward["dur"], forward["cat"]) == (2e6, 2e6, "F")
    assert forward["args"] == {"micro_batch_id": 0, "slice_id": 0, "chunk_id": 0}
    assert sum(row["ph"] == "X" for row in rows) == 7
    counters = [(row["name"], row["ts"], row["args"]) for row in rows if row["ph"] == "C"]
    assert counters == [
        ("live slices, stage 0", 4e6, {"slices": 1}),
        ("live slices, stage 0", 8e6, {"slices": 0}),
        ("live slices, stage 1", 5e6, {"slices": 1}),
        ("live slices, stage 1", 7e6, {"slices": 0}),
    ]


def test_links_and_bytes_in_a_chrome_trace() -> None:
    events = (
        event(0, "F0.0", 0, 2), TimelineEvent(0, "SA0.0>1", 0, 0, "SA", 2, 5),
        event(0, "F0.1", 2, 4), TimelineEvent(0, "SA0.1>1", 0, 1, "SA", 5, 8),
        TimelineEvent(1, "SG0.0c1>0", 0, 0, "SG", 9, 9.5, chunk_id=1),
    )  # fmt: skip
    timeline = Timeline(2, events, bytes_over_time=(((0.0, 10), (2.0, 30)), ((0.0, 20),)))
    rows = json.loads(to_chrome_trace(timeline))["traceEvents"]
    threads = {(row["pid"], row["tid"]): row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    links = {(1, 0): "activations, stage 0 > 1", (1, 1): "gradients, stage 1 chunk 1 > 0"}
    assert threads == {(0, 0): "stage 0", (0, 1): "stage 1", **links}
    boxes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row["ph"] == "X":
            boxes.setdefault((row["pid"], row["tid"]), []).append(row)
    assert boxes.keys() == threads.keys() - {(0, 1)}
    for mine in boxes.values():  # Perfetto drops what overlaps in one thread
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(mine))
    memory = [(row["name"], row["ts"], row["args"]["bytes"]) for row in rows if row["name"].startswith("memory")]
    assert memory == [("memory, stage 0", 0, 10), ("memory, stage 0", 2e6, 30), ("memory, stage 1", 0, 20)]


@given(timelines)
def test_csv_has_every_event(timeline: Timeline) -> None:
    rows = csv.DictReader(io.StringIO(to_csv(timeline)))
    assert [{key: str(value) for key, value in dataclasses.asdict(e).items()} for e in timeline.events] == list(rows)


def test_live_slices_over_time() -> None:
    assert two_stages().live_slices() == (((12.0, 1), (16.0, 0)), ((13.0, 1), (15.0, 0)))
    chunks = Timeline(1, (event(0, "F0.0", 0, 1), event(0, "F0.0", 1, 2, chunk_id=1), event(0, "B0.0", 2, 3, 1)))
    assert chunks.live_slices() == (((1, 1), (2, 2), (3, 1)),)
    back_to_back = Timeline(1, (event(0, "B0.0", 2, 3), event(0, "F0.0", 0, 2), event(0, "F0.1", 2, 3)))
    assert back_to_back.live_slices() == (((2, 1), (3, 1)),)


def test_merge_puts_the_ranks_together() -> None:
    whole = two_stages()
    first, second = (
        dataclasses.replace(whole, events=tuple(e for e in whole.events if e.stage_id == stage_id))
        for stage_id in range(2)
    )
    merged = Timeline.merge([second, dataclasses.replace(first, peak_live_slices=(3, 0))])
    assert set(merged.events) == set(whole.events)
    assert [e.start_s for e in merged.events] == sorted(e.start_s for e in whole.events)
    assert (merged.makespan_s, merged.bubble_fraction) == (whole.makespan_s, whole.bubble_fraction)
    assert (merged.name, merged.peak_live_slices, merged.peak_bytes) == ("seq1f1b", (3, 1), None)
    for ranks, reason in (
        ([first, second, first], "two timelines have stage 0"),
        ([first, Timeline(3, ())], "of 2 and of 3 stages do not merge: give those of one run"),
        ([], "no timelines to merge"),
    ):
        with pytest.raises(TimelineError, match=reason):
            Timeline.merge(ranks)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / timeline_file_name(20, 3)
    assert path.name == "timeline-step000020-rank0003.json"
    assert parse_file_name(path.name) == (20, 3)
    assert parse_file_name(timeline_file_name(12_345_678, 12_345)) == (12_345_678, 12_345)
    for other in (f"{path.name}.tmp", f".{path.name}", "timeline-step1-rank0.json", "timeline.json"):
        assert parse_file_name(other) is None
    two_stages().save(path)
    assert Timeline.load(path) == two_stages()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG")]
)
def test_pictures_are_written_whole_and_the_same_each_time(tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = tmp_path / f"step{suffix}"
    draw_timelines([("measured", two_stages())], path)
    first = path.read_bytes()
    draw_timelines([("measured", two_stages())], path)
    assert path.read_bytes() == first and first.startswith(magic)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_full_disk_is_named_and_leaves_no_half(tmp_path: Path, suffix: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            draw_timelines([("measured", two_stages())], tmp_path / f"step{suffix}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.filename == str(tmp_path / f"step{suffix}") and not list(tmp_path.iterdir())


def test_a_name_with_dollars_is_no_formula(tmp_path: Path) -> None:
    """A title begins with the name of a schedule, which may be the name of a file."""
    draw_timelines([(r"a$\foo$.csv", two_stages())], tmp_path / "step.svg")
    assert r"a$\foo$.csv" in (tmp_path / "step.svg").read_text()


def test_pictures_that_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for titled, name, reason in (
        ([("", two_stages())], "step.jpg", r"end the name in .png, .svg or .pdf"),
        ([("", Timeline(2, (event(0, "ST", 0, 1),)))], "step.png", "nothing to draw"),
        ([], "step.png", "nothing to draw"),
    ):
        with pytest.raises(TimelineError, match=reason):
            draw_timelines(titled, tmp_path / name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(TimelineError, match="pip install matplotlib"):
        draw_timelines([("", two_stages())], tmp_path / "step.png")
    assert not list(tmp_path.iterdir())


def words_of(figure: Any) -> list[str]:
    return [text.get_text() for text in texts_of(figure)]


LARGE = ((8, 64, 4), (16, 200, 2), (8, 64, 16))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 16, 4), *(pytest.param(n, marks=pytest.mark.full) for n in LARGE)])
def test_no_text_runs_into_another_or_out_of_the_picture(shape: tuple[int, int, int]) -> None:
    figure = build_figure([("stock", large(*shape)), ("sliced", large(*shape))])
    assert not overlaps(figure)


def test_a_picture_of_many_stages_goes_over_the_events_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per stage, or per wait, takes minutes for thousands of stages."""
    passes, computations = [], Timeline.computations
    monkeypatch.setattr(Timeline, "computations", lambda timeline: passes.append(1) or computations(timeline))
    timeline = large(40, 4)
    build_figure([("", timeline)])
    assert len(find_waits(timeline)) > 40
    assert len(passes) < 20


@pytest.mark.parametrize(("name", "most"), [("_MOST_PIXELS", 1e5), ("_MOST_ACROSS", 300)])
def test_a_png_has_at_most_so_many_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, most: float
) -> None:
    monkeypatch.setattr(picture, name, most)
    draw_timelines([("", two_stages())], tmp_path / "step.png")
    size = struct.unpack(">II", (tmp_path / "step.png").read_bytes()[16:24])
    assert 0.9 * most < (math.prod(size) if name == "_MOST_PIXELS" else max(size)) <= 1.01 * most


def test_what_the_picture_says() -> None:
    figure = build_figure([("stock", two_stages()), ("sliced", large(2, 4))])
    texts = words_of(figure)
    for expected in ("stock", "makespan 6 s, bubble 41.7 %", "sliced", "stage 0", "stage 1", "idle", "33 %", "50 %"):
        assert expected in texts
    for legend in ("micro-batch 0", "forward", "backward", "weight gradient", "reduce, optimizer", "waiting"):
        assert legend in texts
    first, second = figure.axes
    assert first.get_xlim() == second.get_xlim()
    assert (first.get_xlabel(), second.get_xlabel()) == ("", "time (s)")


def test_eight_stages_of_64_units_are_legible() -> None:
    """Nine boxes of ten have their label, though a forward takes half of a backward and slices differ."""
    from terapipe_ds.plan import SlicePlan
    from terapipe_ds.schedule import build
    from terapipe_ds.simulator import UnitCosts, simulate

    uneven = SlicePlan((20, 18, 17, 16, 15, 15, 14, 13))
    timeline = simulate(build("seq1f1b", 8, 8, 8), uneven, UnitCosts(128, 0.1))
    figure = build_figure([("seq1f1b", timeline)])
    labels = [text for text in words_of(figure) if re.fullmatch(r"[0-7]\.[0-7]", text)]
    assert len(labels) >= 0.9 * 8 * 128
    assert not overlaps(figure)
    assert all(text.get_fontsize() >= 5 for axes in figure.axes for text in axes.texts)


def test_boxes_stand_at_their_times_and_in_their_colours() -> None:
    figure = build_figure([("", two_stages())])
    boxes = {}
    for collection in figure.axes[0].collections:
        for path, colour in zip(collection.get_paths(), collection.get_facecolor(), strict=False):
            extent = path.get_extents()
            boxes[round(extent.x0, 6), round(extent.x1, 6), round((extent.y0 + extent.y1) / 2)] = tuple(colour[:3])
    assert {(0, 6, 0), (0, 6, 1)} <= set(boxes), "the ground that shows where a stage waits"
    forward, backward, weight = boxes[0, 2, 0], boxes[4, 6, 0], boxes[4, 5, 1]
    assert (2, 3, 1) in boxes
    assert (3, 4, 1) in boxes
    assert (6, 10, 0) in boxes, "the optimizer step"
    assert sum(forward) > sum(weight) > sum(backward), "forward is light, backward is dark"
    assert [c.get_hatch() for c in figure.axes[0].collections if c.get_hatch()] == ["//////"], "of the weight gradient"
