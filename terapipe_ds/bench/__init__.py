"""Measure side by side: each benchmark takes turns with stock DeepSpeed in one process."""
