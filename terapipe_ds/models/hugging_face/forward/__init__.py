"""Run the pieces of a model by its own forward, in token slices."""
