import csv
import dataclasses
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import OTHER_KINDS, schedules

from terapipe_ds.schedule import Schedule, ScheduleError, build, fits, from_csv, load, render, to_csv
from terapipe_ds.schedule.show import count_slots, to_dict


def test_a_grid_in_full() -> None:
    grid = """seq1f1b: 2 stages, 2 micro-batches, 4 slices (2 each), 10 slots

slot     0    1    2    3    4    5    6    7    8    9
stage 0  F0.0 F0.1 F1.0 .    B0.1 F1.1 B0.0 .    B1.1 B1.0
stage 1  .    F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0 .

peak live slices  3 2
bubble            4 of 20 slots idle (20.0 %)"""
    assert render(build("seq1f1b", 2, 2, 2)) == grid


def grid_rows(text: str, label: str) -> list[str]:
    """The cells of a row, over all blocks."""
    return [cell for line in text.splitlines() if line.startswith(label) for cell in line[len(label) :].split()]


@given(schedules(), st.integers(40, 160))
def test_the_grid_has_every_entry_once_and_nothing_else(schedule: Schedule, width: int) -> None:
    text = render(schedule, width=width)
    count = count_slots(schedule)
    idle = 0
    assert grid_rows(text, "slot ") == [str(slot) for slot in range(count.num_slots)]
    for stage_id in range(schedule.num_stages):
        cells = grid_rows(text, f"stage {stage_id} ")
        assert [cell for cell in cells if cell != "."] == schedule.compute_order(stage_id)
        idle += cells.count(".") + count.num_slots - len(cells)
    assert idle == count.num_idle
    assert all(len(line) <= width for line in text.splitlines() if line.startswith(("slot ", "stage ")))


def test_long_grids_are_cut_with_a_note() -> None:
    schedule = build("gpipe", 2, 50, 10)
    text = render(schedule, max_slots=100)
    assert f"({count_slots(schedule).num_slots - 100} more slots are not shown" in text
    assert grid_rows(text, "slot ")[-1] == "99"


def test_what_is_said_beside_the_grid() -> None:
    one = "1f1b: 1 stage, 1 micro-batch, 1 slice (1 each), 2 slots"
    assert render(build("1f1b", 1, 1, 1)).splitlines()[0] == one
    assert "2 micro-batches, 7 slices (4 + 3)" in render(build("1f1b", 2, 2, [4, 3]))
    evaluation = render(build("gpipe", 2, 2, 2, forward_only=True))
    assert evaluation.startswith("gpipe, forward only: ") and "2 of 10 slots idle (20.0 %)" in evaluation
    assert "live" not in evaluation, "nothing is kept for a backward"


def test_the_dict_is_json() -> None:
    data = json.loads(json.dumps(to_dict(build("seq1f1b", 4, 2, 4))))
    assert data["orders"][3][:5] == ["F0.0", "F0.1", "F0.2", "F0.3", "B0.3"]
    assert data["peak_live_slices"] == [7, 6, 5, 4]
    assert (data["num_slots"], data["num_slices"], data["forward_only"]) == (22, [4, 4], False)
    assert data["bubble_fraction"] == pytest.approx(24 / 88)


@given(schedules())
def test_csv_there_and_back(schedule: Schedule) -> None:
    """Placement, chunks, slices and orders; one micro-batch leaves a direction of a bidirectional schedule empty."""
    text = to_csv(schedule)
    assert from_csv(text, name=schedule.name) == schedule
    rows = [row for row in csv.reader(io.StringIO(text)) if row[0] != "placement"]
    assert rows == [schedule.compute_order(k) for k in range(schedule.num_stages)]


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_csv_of_other_kinds(kind: str) -> None:
    schedule = OTHER_KINDS[kind]()
    assert from_csv(to_csv(schedule), name="by hand") == schedule
    if kind == "bidirectional":
        assert to_csv(schedule).startswith("placement,0/3,1/2,2/1,3/0\nF0.0c0,F1.0c0,F2.0c1,")


def test_a_placement_by_hand() -> None:
    """One stage with both parts; the chunk is written where it is not 0."""
    schedule = from_csv("placement,0/1\nF0.0,F0.0c1,B0.0c1,B0.0\n")
    assert schedule.placement == {(0, 0): 0, (0, 1): 1}
    swapped = from_csv("placement , 1/0\nF0.0c1,F0.0,B0.0,B0.0c1\n")
    assert swapped.placement == {(0, 0): 1, (0, 1): 0}


SPREADSHEET = "\ufeffF0.0,B0.0\r\nF0.0,B0.0\r\n"


@pytest.mark.parametrize("text", [SPREADSHEET, "F0.0,B0.0,,\nF0.0,B0.0\n\n,,\n", ' F0.0 , B0.0\n"F0.0","B0.0"'])
def test_csv_as_programs_write_it(text: str) -> None:
    assert from_csv(text).orders == build("gpipe", 2, 1, 1).orders


@pytest.mark.parametrize(("text", "reason"), [
    ("", "the CSV is empty"),
    ("F0.0,B0.0\nF0.0,G0.0\n", "row 2, cell 2: cannot read 'G0.0'"),
    ("F0.0,,B0.0\n", "row 1, cell 2: cannot read ''"),
    ("F0.0,B0.0\n\nF0.0,B0.0\n", "row 2 is empty"),
    ("F0.0;B0.0\n", "row 1, cell 1: .*separate cells by commas"),
    ('"F0.0\n', "the CSV cannot be read"),
    ("F0.0,F2.0\n", "CSV row 1, cell 2: the CSV has micro-batch 2 but no micro-batch 1"),
    ("F0.1\n", "CSV row 1, cell 1: the CSV has micro-batch 0 slice 1 but no micro-batch 0 slice 0"),
    ("F0.0c1\n", "has chunk 1 but no chunk 0"),
    ("placement,0\n", "a placement but no stage"),
    ("placement,0\nF0.0,B0.0\nF0.0,B0.0\n", "row 1: the placement has 1 stages, 2 rows follow"),
    ("placement,0,x\nF0.0,B0.0\nF0.0,B0.0\n", "row 1, cell 3: cannot read 'x' as the parts"),
    ("placement,0,2\nF0.0,B0.0\nF0.0,B0.0\n", "number the parts from 0 without a gap"),
    ("placement,0/1\nF0.0c2,B0.0c2\n", "has chunk 2 but its placement 2 parts per stage"),
    ("F0.0,B0.0\nB0.0,F0.0\n", "B0.0 runs before F0.0"),
    ("F0.0,B0.0\nF0.0\n", "B0.0 of part 1 is missing"),
])  # fmt: skip
def test_csv_that_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        from_csv(text)


def test_a_schedule_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    schedule = build("chimera", 4, 4, 2)
    path.write_text(to_csv(schedule))
    assert load(path) == load(str(path)) == dataclasses.replace(schedule, name="mine")


@pytest.mark.parametrize(("content", "reason"), [
    (None, "No such file or directory; give the path of a CSV file"),
    (b"\xff\xfe", "codec can't decode byte 0xff .*; give the path of a CSV file in UTF-8"),
    (b"F0.0,x", "row 1, cell 2"),
])  # fmt: skip
def test_a_file_without_a_schedule(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "mine.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ScheduleError, match=f"mine.csv.*{reason}"):
        load(path)
    with pytest.raises(ScheduleError, match="give the path of a CSV file"):
        load("\0.csv")


@pytest.mark.parametrize(("num_stages", "num_slices", "problem"), [
    (2, [2, 3], None),
    (3, [2, 3], "has 2 stages (rows), the pipeline 3"),
    (2, [2], "has 2 micro-batches, a batch 1: set gradient_accumulation_steps to 2"),
    (2, [2, 2], "has 3 slices of micro-batch 1, the plan 2: cut it into 3"),
])  # fmt: skip
def test_whether_a_batch_fits(num_stages: int, num_slices: list[int], problem: str | None) -> None:
    found = fits(build("seq1f1b", 2, 2, [2, 3]), num_stages, num_slices)
    assert found is None if problem is None else problem in str(found)
