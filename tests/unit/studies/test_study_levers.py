"""The levers of long context: each row keeps the levers above it, and the table compares neighbouring rows."""

from studies.levers import LEVERS, setups, table


def test_each_row_adds_one_lever() -> None:
    rows = list(setups(8).values())
    sections = [dict(row.section) for row in rows]
    assert len(rows) == len(LEVERS)
    assert sections[:3] == [{"slices": 1}, {"slices": 1}, {"slices": 8}]
    assert sections[-1] == {"slices": 8, "recompute": "full", "keep_attention": True, "offload_activations": True}
    assert [row.keeps_logits for row in rows] == [True] + [False] * 7
    assert [row.sequence_ranks for row in rows] == [1] * 6 + [2] * 2
    assert [row.optimizer_on_host for row in rows] == [False] * 7 + [True]


def test_the_table_compares_the_largest_stages() -> None:
    lines = table({"none": [3_000_000, 8_000_000], "slices": [4_000_000, 1_000_000]}).splitlines()
    assert lines[2:] == ["| none | 3.0 | 8.0 | - |", "| slices | 4.0 | 1.0 | 0.50 |"]
