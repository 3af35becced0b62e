"""Execute batches: the engine that DeepSpeed calls (`engine`), and its collaborators, which `build` makes.

`incoming_batch` draws a batch, `open_batch` opens, ends and closes it, `part_runner` runs the actions of a part with
what `collaborators` lets it ask, `batch_results` adds up the losses.
"""
