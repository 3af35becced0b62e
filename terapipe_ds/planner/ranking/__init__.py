"""Compare schedules side by side, each over the cut of the layers that it needs."""
