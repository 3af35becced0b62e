"""Search the best plan under one schedule: scores by replay, proven bounds, local improvement."""
