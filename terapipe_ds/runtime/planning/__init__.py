"""Choose the slices and the schedule of a batch.

`plans` owns the choice for each length. For "auto" it asks `auto_planner`, which plans with measured costs.
`schedule_choice` compares schedules, and names other layouts that would be faster.
"""
