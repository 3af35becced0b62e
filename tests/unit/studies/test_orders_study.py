"""The study of orders found: its figures are those of the simulator, and no order is slower than the named ones."""

import pytest

from studies import orders
from terapipe_ds import simulate
from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import build


def test_the_rows_of_a_table() -> None:
    table = orders.Table(orders.EQUAL, 2, 4, 2, budget=0.02).rows()
    by_name = {row.name: row for row in table}
    zb_s = simulate(build("seq1f1b-zb", 2, 4, 2), SlicePlan.equal(1024, 2), orders.EQUAL).makespan_s
    assert by_name["seq1f1b-zb"].ratio == pytest.approx(zb_s / (4 * 0.304))
    assert by_name["seq1f1b-zb"].live == 3 / 2, "K + s - 1 slices of a half"
    same, three = (by_name[f"search, {times} x"] for times in (1, 3))
    assert three.ratio <= same.ratio <= by_name["seq1f1b-zb"].ratio and same.live <= 3 / 2 and three.live <= 9 / 2
    for row in table[6:]:
        assert row.bound is not None and row.bound <= row.ratio * (1 + 1e-12) and row.found_in_s is not None
        assert len(str(row).split("|")) == 8
    # the bound by hand: all work of the last stage, after the first slice has come (F and its message)
    assert same.bound == pytest.approx((4 * (0.3 + 2 * 0.004) + 0.05 + 0.004 / 3 + 0.0015) / 1.216)
    gained, most = orders.gain(table, "search, 3 x")
    assert gained == pytest.approx(1 - three.ratio * 1.216 / zb_s) and gained <= most + 1e-12


@pytest.mark.parametrize("seed", [0, 7])
def test_random_models(seed: int) -> None:
    model = orders.random_model(seed)
    assert 1 <= model.micro_batches <= 4 * len(model.costs) and sum(model.plan.lengths) == orders.LENGTH
    named_s, found_s = orders.compared(model, evaluations=12)
    assert found_s <= named_s * (1 + 1e-12)
