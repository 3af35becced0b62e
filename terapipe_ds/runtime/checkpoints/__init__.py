"""Save checkpoints whole or not at all; load what fits, under another plan, schedule or layout, or by DeepSpeed alone.

`engine_methods` are what a user calls, and refuse what does not fit: `save` and `load` keep checkpoints whole, and
`optimizer_states` brings states to the stages that hold their parameters. The parameters themselves are in a file per
layer, which `layout.parted_module` reads.
"""
