"""Run the exact slice program: the cuts of a sequence with the least time in a fill-drain pipeline of equal stages.

`branch_and_bound.search_plans` is the entry. It bounds the time of a step and runs the programs of `least_sums`.
"""
