"""Run the exact slice program: the cuts of a sequence with the least time in a fill-drain pipeline of equal stages."""
