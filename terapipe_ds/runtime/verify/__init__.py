"""Check that layers and the loss may be sliced, before the first step.

The reading order: `first_batch` (all ranks) -> `cut` (what is looked at) -> `stage` (the layers of one) -> `layer` (one
of them; `tokens` finds its tokens, `compare` knows how much rounding is) -> `loss` -> `report`.
"""

from terapipe_ds.runtime.verify.first_batch import FirstBatchCheck, StageToCheck
from terapipe_ds.runtime.verify.report import VerifyError
from terapipe_ds.runtime.verify.tokens import TensorRanks

__all__ = ["FirstBatchCheck", "StageToCheck", "TensorRanks", "VerifyError"]
