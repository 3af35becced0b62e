"""Data of megatron-core: text to ``.bin`` and ``.idx`` files, ``GPTDataset`` over them, micro-batches of its samples.

Needs the extra ``megatron``, but nothing of ``models.megatron``: other models can train from these files too. Start at
:mod:`~terapipe_ds.models.megatron_data.datasets` and :mod:`~terapipe_ds.models.megatron_data.micro_batches`.
"""
