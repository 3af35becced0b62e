"""Where to cut a sequence: the slice program, memory and the search over schedules."""
