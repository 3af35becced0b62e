"""Choose the slices and the schedule of a batch.

`plans` owns the choice for each length. For "auto" it asks `measure_and_share`, which measures costs and hands the
result to all ranks. `choose_plan` decides slices and schedule, and names other layouts that would be faster.
"""
