"""Train GPT models of megatron-core layers in a DeepSpeed `PipelineModule`, in token slices over TP x PP x DP.

`MegatronGPT` is the module to build; it takes megatron-core's `TransformerConfig`. Needs the extra `megatron`:
importing this package without megatron-core raises an error that says how to install it.
"""

from __future__ import annotations

import warnings

from terapipe_ds import compat

compat.require_megatron("terapipe_ds.models.megatron")

with warnings.catch_warnings():
    # drops seven lines about missing packages; the kernels are chosen here, and the log names them
    warnings.filterwarnings("ignore", message=r".*([Aa]pex|Transformer Engine).* not installed", module="megatron")
    from terapipe_ds.models.megatron.loss import VocabParallelLoss
    from terapipe_ds.models.megatron.module import MegatronGPT
    from terapipe_ds.models.megatron.refusals import MegatronConfigError

__all__ = ["MegatronConfigError", "MegatronGPT", "VocabParallelLoss"]
