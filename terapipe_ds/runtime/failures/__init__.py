"""End a failed or hanging job with a report: a watch-dog on each rank, a store to share states, a timer in C."""
