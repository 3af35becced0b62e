"""What the planner refuses."""

from __future__ import annotations


class PlannerError(ValueError):
    """A question that the planner cannot answer; the text names the value and what to change."""
