"""Give the costs of a slice: measured and fitted, or counted for hardware that one does not have."""
