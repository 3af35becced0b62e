"""Test random models as users write them: equal to a plain loop, or refused before the first step."""

import pytest

from tests.distributed.random_models import draw, verdict_of


@pytest.mark.sample(12)
@pytest.mark.parametrize("seed", range(200))
def test_a_model_trains_as_in_a_plain_loop_or_is_refused(seed: int) -> None:
    assert verdict_of(seed) == ("refused" if draw(seed).is_refused else "equal")


def test_a_sparse_embedding_at_both_ends_of_chimera_with_one_micro_batch() -> None:
    """The other direction has no micro-batch, and no gradient: a sparse one waited for a dense one without end."""
    case = draw(118)
    assert (case.sparse, case.schedule, case.micro_batches) == (True, "chimera-seq", 1)
    assert verdict_of(118) == "equal"
