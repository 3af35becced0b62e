"""Measure what slices of a part cost on this machine, for the planner: seconds, messages and bytes.

`all_parts` measures a running pipeline, `one_device` a model without one; both run `rounds` of the `slice_timer`.
"""
