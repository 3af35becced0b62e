"""TeraPipe's table: what is found is no slower than what was published, under the same costs."""

from __future__ import annotations

import json
import os

import pytest

from studies import terapipe_table
from terapipe_ds.costs import analytic_costs
from terapipe_ds.costs.devices import device_card
from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import build
from terapipe_ds.simulator import simulate

IS_FULL = bool(os.environ.get("TERAPIPE_TEST_FULL"))
BY_NUMBER = {setting.number: setting for setting in terapipe_table.settings()}
QUICK = (10,)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(n, marks=[] if n in QUICK or IS_FULL else pytest.mark.skip("only in the full run"))
        for n in BY_NUMBER
    ],
)
def test_no_slower_than_published(number: int) -> None:
    row = terapipe_table.compare(BY_NUMBER[number])
    assert row.best.predicted_s <= row.published_s * (1 + 1e-9)
    assert row.ranked is not None  # the published degrees are among those that are ranked
    assert row.ranked.grid == {
        "pipe": row.setting.grid.pipe,
        "data": row.setting.grid.data,
        "model": row.setting.grid.model,
    }
    assert row.ranked.predicted_s <= row.published_s * (1 + 1e-9)
    assert max(row.best.memory_bytes) <= device_card("v100").memory_bytes


def test_the_settings_are_the_published_ones() -> None:
    assert len(BY_NUMBER) == 10
    for setting in BY_NUMBER.values():
        assert setting.grid.pipe * setting.grid.data * setting.grid.model == setting.devices
        assert setting.cluster.num_devices == setting.devices
    assert {number for number, setting in BY_NUMBER.items() if setting.slices is not None} == {5, 8, 9}
    assert BY_NUMBER[5].slices == SlicePlan((704, 688, 656))


def test_a_published_setting_is_timed_as_the_whole_pipeline_is() -> None:
    """Setting 8 by `analytic_costs`, which counts whole parts: 48 stages in 48 nodes, the tensor ranks within each."""
    setting = BY_NUMBER[8]
    seconds, slices, _ = terapipe_table.published_time(setting)
    parts = analytic_costs("gpt3-44b", "v100", num_stages=48, tensor_parallel=8)
    assert setting.slices is not None
    makespan_s = simulate(build("terapipe", 48, 8, slices), setting.slices, parts).makespan_s
    assert makespan_s < seconds < 1.1 * makespan_s  # links are shared by eight devices, and the optimizer steps


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    row = terapipe_table.compare(BY_NUMBER[10])
    monkeypatch.setattr(terapipe_table, "compare", lambda setting: row)
    terapipe_table.main(["--setting", "10"])
    text = capsys.readouterr().out
    assert f"| {row.published_s:.3f} |" in text
    terapipe_table.main(["--setting", "10", "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    assert found["ranked"]["dims"] == row.ranked.dims if row.ranked else False
    with pytest.raises(SystemExit):
        terapipe_table.main(["--setting", "11"])
