"""Save checkpoints whole or not at all; load what fits, under another plan, schedule or layout, or by DeepSpeed alone.

Users call `engine_methods`, which refuse a checkpoint that does not fit. `save` publishes a checkpoint when it is
whole, and `choose` finds a whole one to load. `other_layouts` loads a checkpoint of another number of chunks or another
schedule: it brings optimizer states to the stages that hold their parameters. The parameters themselves are in a file
per layer, which `layout.parted_module` reads.
"""
