"""Choose the slices and the schedule of a batch, and where the layers go for it.

`batch_plans` answers for each batch; for "auto" it asks `auto_planner`, which has costs measured and plans with them.
`schedule_choice` compares schedules, and says before the engine is built where layers go.
"""
