"""Draw and agree on batches, weigh their losses, and keep what is in flight.

`source` draws from the user's iterator, `batch_agreement` makes shapes and errors known to all ranks, `cut_tensors`
cuts tensors, and `loss_weights` weighs the slices. `in_flight` keeps tensors between F and B, and `handed_inputs` hands
them to layers.
"""
