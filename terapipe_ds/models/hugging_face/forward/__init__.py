"""Run the pieces of a model by its own forward, in token slices.

`outline` runs that forward for one piece, `probe` finds out how a layer can run in slices, `cache` stands for the cache
of transformers, and `attention` for its attention functions.
"""
