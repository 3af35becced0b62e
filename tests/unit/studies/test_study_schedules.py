import json
from pathlib import Path

import pytest

from studies import schedules
from studies.schedules import COLUMNS, Cell, markdown
from terapipe_ds.schedule import SCHEDULE_NAMES

PAGE = (Path(__file__).parents[3] / "docs" / "schedules.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("k", "m", "s"), [(4, 1, 1), (4, 4, 2), (8, 2, 4), (8, 8, 1)])
def test_the_formulas_of_the_page(k: int, m: int, s: int) -> None:
    cells = {name: Cell.of(name, k, m, s) for name in COLUMNS}
    for name in ("gpipe", "1f1b", "seq1f1b"):
        assert cells[name].makespan_s == pytest.approx(3 * m + 3 * (k - 1) / s)
        assert cells[name].bubble_fraction == pytest.approx((k - 1) / (m * s + k - 1))
    assert cells["seq1f1b"].peak_live_slices == min(k + s - 1, m * s)
    if m >= k:
        assert cells["zb-h1"].makespan_s == pytest.approx(3 * m + (k - 1) / s)
        assert cells["seq1f1b-zb"].makespan_s == pytest.approx(3 * m + (k - 1) / s)
    if m % k == 0 and k % s == 0:
        assert cells["seq1f1b-interleaved"].makespan_s == pytest.approx(3 * m + 3 * (k - 1) / (2 * s))
    if m == k and s == 1:
        assert cells["zbv"].makespan_s == pytest.approx(3 * m + (k - 1) / 2)
        assert cells["zbv"].live == k  # 2K half slices


def test_live_compares_across_slices_and_chunks() -> None:
    for name, num_slices in (("gpipe", 4), ("interleaved", 1), ("chimera", 2)):
        assert Cell.of(name, 4, 4, num_slices).live == 4
    assert Cell.of("seq1f1b", 4, 4, 4).live == 7 / 4


def test_the_page_has_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = [(4, 4, 4), (8, 2, 2)]
    lines = markdown([[Cell.of(name, *shape) for name in COLUMNS] for shape in shapes]).splitlines()
    assert all(line in PAGE.splitlines() for line in lines)
    schedules.main(["--stages", "2", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 25 * len(COLUMNS)
    assert {cell["num_stages"] for cell in found} == {2}


def test_every_schedule_has_its_picture_and_its_paragraph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SCHEDULE_NAMES:
        assert f"### {name}\n" in PAGE and f"(pictures/schedule-{name}.svg)" in PAGE
    monkeypatch.setattr(schedules, "SCHEDULE_NAMES", ("zbv",))
    (path,) = schedules.draw(tmp_path)
    kept = Path(__file__).parents[3] / "docs" / "pictures" / path.name
    assert path.read_text().count("<path") == kept.read_text().count("<path")
