"""Divide the layers of a model of transformers over tensor-parallel ranks."""
