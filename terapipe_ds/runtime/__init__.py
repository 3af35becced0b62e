"""Hold everything that runs on the ranks of a job.

`register` makes DeepSpeed build the engine. The folders below are listed from the one that uses all others to the one
that uses none: engine, checkpoints, verify, planning, profiling, layers, links, batch, layout, failures. All of them
use `agreement` (values that ranks exchange) and `log`.
"""
