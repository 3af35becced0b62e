"""Test that the comparison with the stock engine fails for an implementation that is broken in one place, and the
script that tries all faults (`make mutations`), with a few of them: it says what caught each, or fails.
"""

import functools
from dataclasses import replace

import pytest

from tests import mutation_check
from tests.distributed import cases
from tests.distributed.cases import Case, RankRecord
from tests.distributed.faults import EQUAL, FAULTS, train_broken
from tests.distributed.harness import rank_pool
from tests.distributed.training import train_case

TWO_STAGES = Case(stages=2, micro_batches=2, slices=(5, 10, 2, 7))


@functools.cache
def stock_run(case: Case) -> list[RankRecord]:
    return rank_pool(case.world_size).run(train_case, case=case, system="stock")


def broken_run(case: Case, fault: str | None) -> list[RankRecord]:
    return rank_pool(case.world_size).run(train_broken, case=case, fault=fault)


@pytest.mark.parametrize("fault", ["rotary_positions_not_offset", "dropped_kv_gradient", "unweighted_losses"])
def test_bf16_excuses_none_of_these(fault: str) -> None:
    exact = stock_run(replace(TWO_STAGES, precision="fp32_zero1").stock())
    run = broken_run(replace(TWO_STAGES, precision="bf16"), fault)
    assert cases.errors(run, exact)["gradient"].error > 2 * cases.BF16_GRADIENT_CAP


# -- the script ------------------------------------------------------------------------------------------------


FEW = ["doubled_kv_gradient", "backward_in_forward_order", "norm_over_tokens"]


def test_what_caught_a_fault_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutation_check.main(FEW) == 0
    table = capsys.readouterr().out.splitlines()
    lines = [line for line in table if line.startswith(tuple(FEW))]
    caught = {(line.split()[0], line.split(":")[0].split(maxsplit=2)[2]) for line in lines}
    expected = {
        ("doubled_kv_gradient", "same training"), ("backward_in_forward_order", "SliceStoreError"),
        ("norm_over_tokens", "same training"), ("norm_over_tokens", "verify"),
    }  # fmt: skip
    assert caught == expected
    assert any(line.startswith("doubled_kv_gradient ") and " gradient " in line for line in table)
    assert table[-1].startswith("3 faults in ") and table[-1].endswith("all caught, and nothing else")


def test_a_fault_that_nothing_catches_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "tied_gradients_not_reduced"
    monkeypatch.setitem(FAULTS, name, replace(FAULTS[name], configuration=EQUAL))  # nothing is tied there
    assert mutation_check.main([name]) == 1
    said = capsys.readouterr().out
    assert mutation_check.SURVIVED in said and said.rstrip().endswith(f"NOT RIGHT: {name}")


def test_a_fault_that_does_not_work_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks look the fault up by its name: this one is not in their table, as if what it patches were gone."""
    monkeypatch.setitem(FAULTS, "gone", replace(FAULTS["span_off_by_one"], name="gone"))
    assert mutation_check.main(["gone"]) == 1
    said = capsys.readouterr().out
    assert "not a refusal of ours (KeyError" in said and said.rstrip().endswith("NOT RIGHT: gone")


def test_an_unknown_fault_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mutation_check.main(["no_such_fault"])
    assert "unknown no_such_fault; there are prefix_without" in capsys.readouterr().err


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_fault_replaces_is_there(name: str) -> None:
    """A fault whose target is gone breaks nothing: the block does not begin. Nothing is trained here."""
    with FAULTS[name].broken():
        pass
