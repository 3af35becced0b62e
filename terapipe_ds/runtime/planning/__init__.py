"""Which slices and which schedule a batch runs with, and where the layers go for it."""
