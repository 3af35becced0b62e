"""Draw and agree on batches, weigh their losses, and keep what is in flight.

`source` draws from the user's iterator, `batch_agreement` makes shapes and errors known to all ranks, `loss` weighs the
slices, and `in_flight` keeps tensors between F and B.
"""
