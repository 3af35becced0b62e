"""Work around the user's layers while they run: weight gradients apart, checkpointing, checks, counts."""
