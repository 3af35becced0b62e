"""Execute batches: the engine that DeepSpeed calls (`engine`), and its collaborators in the order of a batch.

`build` makes them. `incoming_batch` draws a batch, `open_batch` opens and closes it, `part_runner` runs the actions of
a part with what `stage` lets it ask, `batch_results` adds up the losses, `batch_end` closes the step.
"""
