"""Give the costs of layers: one source for the time, the memory and the messages of any cut of the layers."""
