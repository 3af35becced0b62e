"""Import once, in the server of ranks, what ranks need: new ranks start after each failure."""

import importlib

# The first engine, and the first one with ZeRO, would import torch's compiler; any job its test module's imports.
_NAMES = """
    torch torch._dynamo torch._inductor.compile_fx torch.profiler._cupti_monitor
    deepspeed deepspeed.module_inject deepspeed.module_inject.auto_ep_layer numpy.typing pytest
    terapipe_ds.models.megatron terapipe_ds.models.gpt terapipe_ds.bench.ranks terapipe_ds.runtime.engine.engine
    terapipe_ds.runtime.register terapipe_ds.cli tests.small_models.tuples
    terapipe_ds.models.hugging_face peft terapipe_ds.integrations.trainer.mixin hypothesis
"""
for _name in _NAMES.split():
    try:
        importlib.import_module(_name)
    except (
        ImportError
    ):  # megatron-core, transformers and peft are optional, and torch's own modules come and go: the rank will tell
        continue
