"""Who executes: everything that runs on the ranks of a job.

`register` makes DeepSpeed build the engine. The folders below are listed from the one that uses all others to the one
that uses none: engine, checkpoints, verify, planning, profiling, layers, links, batch, layout, failures. `agreement`
(what ranks tell one another), `refusals` (what cannot be trained) and `log` serve all of them.
"""
