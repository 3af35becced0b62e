"""Check that layers and the loss may be sliced, before the first step.

The reading order: `first_batch` (all ranks) -> `cut` (the compared window) -> `stage` (the layers of one stage, and the
report) -> `layer` (one layer; `tokens` finds its tokens, `compare` knows the size of rounding) -> `loss`.
"""

from terapipe_ds.runtime.verify.first_batch import FirstBatchCheck
from terapipe_ds.runtime.verify.stage import VerifyError

__all__ = ["FirstBatchCheck", "VerifyError"]
