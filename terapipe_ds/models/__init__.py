"""Provide models that plug into a DeepSpeed `PipelineModule` and train in token slices."""

from terapipe_ds.compat.unread_section import guard_unregistered

guard_unregistered()
