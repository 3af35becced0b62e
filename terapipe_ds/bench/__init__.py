"""Measure side by side: each benchmark takes turns with the stock way in one process."""
