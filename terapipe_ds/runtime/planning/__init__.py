"""Choose the slices and the schedule of a batch.

`plans` owns what runs for each length. For "auto" it asks `auto_planner`, which plans with measured costs.
`schedule_choice` compares schedules, and says which other layout would be faster.
"""
