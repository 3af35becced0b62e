"""Give all trainers of a benchmark one interface: DeepSpeed's engines, ours, and torch's pipelines. Start at `base`."""
