"""Models that can be trained in slices: nobody may refuse them."""

from tests.zoo.healthy import (  # noqa: F401  # each adds its members
    attention,
    inputs,
    layouts,
    losses,
    others,
    tokens,
    weights,
)
