"""The slice-safety check: layers on whole sequences against the same layers on slices, before the first step.

The reading order: ``pipeline`` (all ranks) -> ``stage`` (the layers of one) -> ``check`` (one layer; ``runner`` runs
it, ``layout`` finds its tokens, ``compare`` knows how much rounding is) -> ``causes`` (what is likely wrong, with the
evidence of ``operations``); ``losses`` is the check of the loss.
"""

from terapipe_ds.runtime.verify.pipeline import verify_first_batch
from terapipe_ds.runtime.verify.report import Report, VerifyError

__all__ = ["Report", "VerifyError", "verify_first_batch"]
