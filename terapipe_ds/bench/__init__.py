"""Side-by-side measurements: each compares with the stock way in one process, in turns."""
