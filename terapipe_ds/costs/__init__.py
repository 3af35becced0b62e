"""Give the costs of a slice: measured and fitted, or counted for hardware that one does not have."""

from terapipe_ds.costs.analytic import AnalyticCosts, analytic_costs
from terapipe_ds.costs.devices import DeviceCard, LinkCard, device_card
from terapipe_ds.costs.fitted import CostModel
from terapipe_ds.costs.model_sizes import MODEL_SIZES, ModelSize, model_size
from terapipe_ds.costs.profile import Profile

__all__ = [
    "MODEL_SIZES",
    "AnalyticCosts",
    "CostModel",
    "DeviceCard",
    "LinkCard",
    "ModelSize",
    "Profile",
    "analytic_costs",
    "device_card",
    "model_size",
]
