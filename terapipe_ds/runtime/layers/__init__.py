"""Act around the user's layers while they run: separate weight gradients, checkpointing, checks, counts."""
