"""No hang, no silence: the watch-dog of each rank, the store through which ranks report, the end of a process."""
