"""The search against every strategy of 200 random small instances."""

from typing import Any

import pytest
from brute_force import LENGTH, Instance, least_s

import terapipe_ds
from terapipe_ds.planner import MemoryLimitError


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(200))
def test_the_search_is_exact_on_small_chains(seed: int) -> None:
    instance = Instance.drawn(seed)
    question: dict[str, Any] = {"memory_limit_gb": instance.limit_gb, "sequence_length": LENGTH}
    question["global_batch_size"] = instance.global_batch
    expected = least_s(instance)
    if expected is None:
        with pytest.raises(MemoryLimitError, match="no strategy fits"):
            terapipe_ds.plan_strategy(instance.chain, instance.cluster, **question)
        return
    found = terapipe_ds.plan_strategy(instance.chain, instance.cluster, **question)
    assert found.predicted_s == pytest.approx(expected, rel=1e-9)
    assert found.lower_bound_s == found.predicted_s
