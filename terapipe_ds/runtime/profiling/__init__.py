"""Measure the costs of a part's slices on this machine, for the planner: seconds, messages and bytes.

`all_parts` measures a running pipeline, `one_device` a model without one; both run `rounds` of the `slice_timer`.
"""
