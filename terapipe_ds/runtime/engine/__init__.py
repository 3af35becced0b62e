"""Execute batches: the engine that DeepSpeed calls (`engine`), and what it is composed of, which `build` makes.

`batches` draws a batch, opens, ends and closes it. `part_runner` runs the actions of a part, with all that these may
ask. `batch_results` adds up the losses.
"""
