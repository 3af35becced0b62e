"""Small models and losses, each right in the stock engine: most of them cannot be trained in slices, some can."""

from tests.zoo import (  # noqa: F401  # each adds its members
    attentions,
    backwards,
    convolutions,
    healthy,
    long,
    losses,
    norms,
    positions,
    recurrences,
    routers,
    shapes,
)
from tests.zoo.members import ZOO, Member

long.add_all()

__all__ = ["ZOO", "Member"]
