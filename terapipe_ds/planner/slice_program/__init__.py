"""The exact slice program: where to cut a sequence so that a fill-drain pipeline of equal stages takes least time."""
