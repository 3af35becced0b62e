"""Save checkpoints whole or not at all; load what fits, under another plan, schedule or layout, or by DeepSpeed alone.

`engine_methods` are what a user calls: `save` and `load` keep checkpoints whole (`manifest`), `compatibility` refuses
what does not fit, and `optimizer_states` brings states to the stages that hold their parameters.
"""
