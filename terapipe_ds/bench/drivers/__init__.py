"""What trains in a benchmark, behind one face: DeepSpeed's engines, ours, and torch's pipelines. Start at `base`."""
