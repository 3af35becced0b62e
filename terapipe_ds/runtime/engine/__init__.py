"""Execute batches: the engine that DeepSpeed calls (`engine`), and its components, which `build` makes.

`batches` draws a batch, opens, ends and closes it. `part_runner` runs the actions of a part, with everything that they
use. `batch_results` adds up the losses.
"""
