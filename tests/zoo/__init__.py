"""Collect small models and losses that are right in the stock engine: most cannot be trained in slices, some can."""

# Each adds its members; `long` takes some of them again.
from tests.zoo import attentions, backwards, healthy, healthy_data, losses, mixing, shapes, training  # noqa: F401, I001
from tests.zoo import long  # noqa: F401
from tests.zoo.members import ZOO, Member

__all__ = ["ZOO", "Member"]
