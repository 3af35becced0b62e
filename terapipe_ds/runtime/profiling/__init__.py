"""What slices of a part cost on this machine: seconds, messages and bytes, measured for the planner.

`all_parts` measures a running pipeline, `one_device` a model without one; both run `rounds` of the `slice_timer`.
"""
