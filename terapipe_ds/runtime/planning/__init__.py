"""Choose the slices and the schedule of a batch, and where the layers go for it."""
