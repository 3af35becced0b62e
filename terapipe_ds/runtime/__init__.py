"""Who executes: registration with DeepSpeed, the engine, links between stages, batches, and the watch-dog."""
