"""Where saved tensors of live slices are while no action needs them."""
