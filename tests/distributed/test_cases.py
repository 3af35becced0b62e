"""The covering set covers, and the comparison measures what the equality contract says."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from tests.distributed import cases, compare
from tests.distributed.cases import DIMENSIONS, Case
from tests.distributed.compare import RankRecord, Worst


class TestCoveringSet:
    def test_every_valid_pair_is_covered_and_no_other(self) -> None:
        covered: set[cases.Tuple] = set()
        for assignment in cases.default_assignments():
            assert set(assignment) == set(DIMENSIONS)
            covered |= cases.tuples_of(assignment, 2)
        for one, other in itertools.combinations(DIMENSIONS, 2):
            for value, other_value in itertools.product(DIMENSIONS[one], DIMENSIONS[other]):
                pair = {one: value, other: other_value}
                assert (frozenset(pair.items()) in covered) == cases.is_valid(pair), pair

    def test_in_fp64_every_triple_of_the_product_dimensions_is_covered(self) -> None:
        exact = {name: cases.TRIPLES_OF.get(name, DIMENSIONS[name]) for name in cases.PRODUCT}
        covered: set[cases.Tuple] = set()
        for assignment in cases.default_assignments():
            if assignment["precision"] == "fp64" and not assignment["clipping"]:
                covered |= cases.tuples_of({name: assignment[name] for name in exact}, 3)
        missing = cases.valid_tuples(exact, 3) - covered
        assert not missing

    def test_a_small_example_by_hand(self) -> None:
        dimensions = {"a": (0, 1), "b": (0, 1), "c": (0, 1)}
        chosen = cases.covering_set(dimensions, 2)
        covered = set().union(*(cases.tuples_of(assignment, 2) for assignment in chosen))
        assert len(covered) == 12
        assert 4 <= len(chosen) <= 6

    def test_the_set_is_the_same_in_every_process(self) -> None:
        assert cases.default_cases() == cases.default_cases()
        assert len(cases.default_cases()) < 150, "the default run should stay short"

    def test_what_has_no_reference_is_left_out(self) -> None:
        for case in cases.all_cases():
            assert case.data_parallel == 1 or not (case.clipping or case.mixed)
            assert case.plan == "equal" or not case.mixed

    def test_the_full_run_has_the_whole_product(self) -> None:
        size = sum(1 for _ in cases.product({name: DIMENSIONS[name] for name in cases.PRODUCT}))
        both_ways = [name for name in DIMENSIONS["schedule"] if name.startswith("chimera")]
        odd = [each for each in DIMENSIONS["parallel"] if each[0] % 2]
        everything = math.prod(len(DIMENSIONS[name]) for name in cases.PRODUCT)
        share = len(both_ways) * len(odd) / len(DIMENSIONS["schedule"]) / len(DIMENSIONS["parallel"])
        assert size == pytest.approx(everything * (1 - share)), "all but pipelines of an odd length that go both ways"
        full = cases.all_cases()
        assert len(full) >= size
        assert set(cases.default_cases()) <= set(full)
        plain = {"gqa": False, "learned": False, "mixed": False}
        assert len({replace(case, **plain) for case in full if case.precision == "fp64" and not case.mixed}) >= size


class TestCase:
    def test_ids_are_readable_and_unique(self) -> None:
        case = Case(stages=2, micro_batches=4, plan="uneven", tied=True, checkpointing="reentrant", masked=True)
        assert str(case) == "K2-m4-uneven-seq1f1b-tied-ckpt_reentrant-masked"
        assert str(Case(stages=2, data_parallel=2, precision="fp32_zero1")) == "K2xDP2-m1-equal-seq1f1b-fp32_zero1"
        assert len({str(case) for case in cases.all_cases()}) == len(cases.all_cases())

    def test_one_stock_run_serves_all_plans_and_schedules(self) -> None:
        runs = {
            Case(stages=2, plan=plan, schedule=schedule).stock()
            for plan in cases.PLANS
            for schedule in ("1f1b", "gpipe")
        }
        assert len(runs) == 1

    def test_clipping_and_mixed_lengths_are_compared_with_one_stage(self) -> None:
        assert Case(stages=3, clipping=True).stock().stages == 1
        assert Case(stages=3, mixed=True).stock().stages == 1
        assert Case(stages=3).stock().stages == 3

    def test_plans_fill_the_sequence(self) -> None:
        for lengths in cases.PLANS.values():
            if isinstance(lengths, list):
                assert sum(lengths) == cases.SEQUENCE_LENGTH
        assert cases.PLANS["single_last"][-1] == 1  # type: ignore[index]


def record(rank: int = 0, **parameters: list[float]) -> RankRecord:
    values = {name: np.array(value) for name, value in parameters.items()}
    return RankRecord(rank, rank, 0, "", losses=[2.0], parameters=values)


class TestErrors:
    def test_equal_runs_have_no_error(self) -> None:
        found = compare.errors([record(a=[1.0, 2.0])], [record(a=[1.0, 2.0])])
        assert found == dict.fromkeys(compare.KINDS, Worst())

    def test_relative_to_the_norm_of_the_reference(self) -> None:
        found = compare.errors([record(a=[3.0, 4.5])], [record(a=[3.0, 4.0])])
        assert found["parameter"] == Worst(0.1, "rank 0, a")
        assert found["loss"].error == 0.0

    def test_small_tensors_are_measured_by_a_thousandth_of_the_largest(self) -> None:
        found = compare.errors([record(a=[100.0], b=[2e-3])], [record(a=[100.0], b=[1e-3])])
        assert found["parameter"].error == pytest.approx(1e-3 / (1e-3 * 100.0))

    def test_the_largest_is_found_over_all_ranks_of_the_reference(self) -> None:
        reference = [record(0, a=[100.0]), record(1, b=[1e-3])]
        found = compare.errors([record(0, a=[100.0]), record(1, b=[2e-3])], reference)
        assert found["parameter"] == Worst(pytest.approx(1e-3 / 0.1), "rank 1, b")

    def test_every_replica_is_compared(self) -> None:
        found = compare.errors([record(0, a=[1.0]), record(1, a=[1.5])], [record(0, a=[1.0])])
        assert found["parameter"] == Worst(0.5, "rank 1, a")

    def test_what_is_missing_or_new_or_misshapen_is_infinitely_wrong(self) -> None:
        full, part = [record(a=[1.0], b=[1.0])], [record(a=[1.0])]
        assert compare.errors(part, full)["parameter"] == Worst(math.inf, "no rank has b")
        assert compare.errors(full, part)["parameter"] == Worst(math.inf, "rank 0, b")
        assert compare.errors([record(a=[1.0, 1.0])], part)["parameter"].error == math.inf

    @pytest.mark.parametrize("wrong", [math.nan, math.inf])
    def test_what_is_not_finite_is_infinitely_wrong(self, wrong: float) -> None:
        found = compare.errors([record(a=[wrong])], [record(a=[1.0])])
        assert found["parameter"].error == math.inf
        assert compare.violations(found, compare.contract(Case()))

    def test_violations_name_the_tensor(self) -> None:
        found = compare.errors([record(a=[1.0 + 1e-9])], [record(a=[1.0])])
        [line] = compare.violations(found, compare.contract(Case()))
        assert line.startswith("parameter: 1.00e-09 (rank 0, a) > 1e-10")
        assert not compare.violations(found, compare.contract(Case(precision="fp32")))
        assert not compare.violations(found, compare.contract(Case(clipping=True)))
