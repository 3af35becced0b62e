"""Give the costs of a slice: measured and fitted, or counted for hardware that one does not have."""

from terapipe_ds.costs.analytic import AnalyticCosts as AnalyticCosts
from terapipe_ds.costs.analytic import analytic_costs as analytic_costs
from terapipe_ds.costs.devices import DeviceCard as DeviceCard
from terapipe_ds.costs.devices import LinkCard as LinkCard
from terapipe_ds.costs.devices import device_card as device_card
from terapipe_ds.costs.fitted import CostModel as CostModel
from terapipe_ds.costs.model_sizes import MODEL_SIZES as MODEL_SIZES
from terapipe_ds.costs.model_sizes import ModelSize as ModelSize
from terapipe_ds.costs.model_sizes import model_size as model_size
from terapipe_ds.costs.profile import Profile as Profile
