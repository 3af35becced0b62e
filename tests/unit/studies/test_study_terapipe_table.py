"""TeraPipe's settings are ranked among the strategies, and what is found is no slower."""

import json
from pathlib import Path

import pytest

from studies import terapipe_table
from studies.terapipe_table import KNOWN, UNKNOWN, PublishedSetting, Row, compare, published_settings, table

PAGE = (Path(__file__).parents[3] / "docs" / "strategy.md").read_text(encoding="utf-8")


def check(row: Row) -> None:
    """The row is of its setting, and something else was found that takes no longer."""
    setting, published = row.setting, row.published
    grid = published.candidate.grid
    assert (grid.pipe, grid.data, grid.model) == (setting.stages, setting.data, setting.tensor)
    assert published.candidate.micro_batch == 1
    assert published.candidate.accumulation * setting.data == setting.global_batch
    assert row.found.predicted_s <= published.seconds
    assert 1 <= row.rank <= row.ranked


def test_the_settings_are_those_of_table_1() -> None:
    settings = {setting.setting: setting for setting in published_settings()}
    assert sorted(settings) == list(range(1, 11))
    for setting in settings.values():
        assert setting.stages * setting.tensor * setting.data == setting.devices
    counts = {number: len(setting.slices) for number, setting in settings.items()}
    assert counts == {1: 6, 2: 1, 3: 1, 4: 6, 5: 1, 6: 6, 7: 6, 8: 1, 9: 1, 10: 1}
    assert settings[8].slices == ((384, 384, 368, 320, 296, 296),)
    assert settings[10].slices == KNOWN[10] and settings[6].slices == UNKNOWN
    assert len({setting.question for setting in settings.values()}) == 5


@pytest.mark.full
def test_a_small_setting_is_ranked_and_what_is_found_is_no_slower() -> None:
    small = PublishedSetting(0, "gpt3-1b", 16, 8, 2048, 8, 2, 1, ((704, 688, 656),), None)
    unknown = PublishedSetting(1, "gpt3-1b", 16, 8, 2048, 4, 1, 4, (1, 4), 9.0)
    rows = list(compare([small, unknown]))
    for row in rows:
        check(row)
    assert rows[0].published.plan.lengths == (704, 688, 656)
    assert rows[1].published.plan.num_slices in (1, 4)
    lines = table(rows).splitlines()
    assert "| 8 x 1 x 2, 1 row, 3 sl., planned |" in lines[2] and lines[3].endswith("| 9.000 |")


@pytest.mark.full
def test_all_ten_settings(capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(compare(published_settings()))
    assert len(rows) == 10
    for row in rows:
        check(row)
    assert all(line in PAGE.splitlines() for line in table(rows).splitlines())


@pytest.mark.full
def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    terapipe_table.main(["--setting", "9", "--json"])
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["ratio"] >= 1 and row["published"]["slices"] == [120] * 4 + [112] * 6 + [104] * 8 + [64]
