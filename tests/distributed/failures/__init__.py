"""Provide a small training job, and the faults that strike it."""
