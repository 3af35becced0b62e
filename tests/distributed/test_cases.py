"""The covering set covers, and the comparison measures what the equality contract says."""

import itertools
import math

import numpy as np
import pytest

from tests.distributed import cases
from tests.distributed.cases import DIMENSIONS, RankRecord, Worst


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

    def test_in_fp64_every_pair_of_the_product_dimensions_is_covered(self) -> None:
        exact = {name: DIMENSIONS[name] for name in cases.PRODUCT}
        covered: set[cases.Tuple] = set()
        for assignment in cases.default_assignments():
            if assignment["precision"] == "fp64" and not assignment["clipping"]:
                covered |= cases.tuples_of({name: assignment[name] for name in exact}, 2)
        missing = cases.valid_tuples(exact, 2) - covered
        assert not missing

    def test_the_set_is_the_same_in_every_process(self) -> None:
        assert cases.default_cases() == cases.default_cases()
        assert len(cases.default_cases()) <= 100, "the default run should stay short"


def record(rank: int = 0, **parameters: list[float]) -> RankRecord:
    values = {name: np.array(value) for name, value in parameters.items()}
    return RankRecord(rank, rank, 0, "", losses=[2.0], parameters=values)


class TestErrors:
    def test_relative_to_the_norm_of_the_reference(self) -> None:
        found = cases.errors([record(a=[3.0, 4.5])], [record(a=[3.0, 4.0])])
        assert found["parameter"] == Worst(0.1, "rank 0, a")
        assert found["loss"].error == 0.0

    def test_small_tensors_are_measured_by_a_thousandth_of_the_largest(self) -> None:
        found = cases.errors([record(a=[100.0], b=[2e-3])], [record(a=[100.0], b=[1e-3])])
        assert found["parameter"].error == pytest.approx(1e-3 / (1e-3 * 100.0))

    def test_what_is_missing_or_new_or_misshapen_is_infinitely_wrong(self) -> None:
        full, part = [record(a=[1.0], b=[1.0])], [record(a=[1.0])]
        assert cases.errors(part, full)["parameter"] == Worst(math.inf, "no rank has b")
        assert cases.errors(full, part)["parameter"] == Worst(math.inf, "rank 0, b")
        assert cases.errors([record(a=[1.0, 1.0])], part)["parameter"].error == math.inf

    @pytest.mark.parametrize("wrong", [math.nan, math.inf])
    def test_what_is_not_finite_is_infinitely_wrong(self, wrong: float) -> None:
        found = cases.errors([record(a=[wrong])], [record(a=[1.0])])
        assert found["parameter"].error == math.inf
        assert cases.violations(found, cases.contract(cases.Case()))
