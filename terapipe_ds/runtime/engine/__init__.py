"""Execute batches: the engine that DeepSpeed calls (`engine`), and its components, which `build` makes.

`engine` has the loop over the actions of a batch. `batches` draws a batch, opens, ends and closes it.
`part_runner` runs F, B and W of a part, with everything that they use. `batch_results` adds up the losses.
"""
