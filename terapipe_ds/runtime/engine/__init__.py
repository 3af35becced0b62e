"""Who executes a batch: the engine that DeepSpeed calls, the runner of each part, results, traces."""
