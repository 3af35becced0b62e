"""Draw and agree on batches, weigh their losses, and keep what is in flight."""
