"""Measure for maintainers: run a study from a checkout as `python -m studies.NAME`. Studies are not installed.

- `predict`: predicted against measured step times.
- `memory`: predicted against measured peaks of memory.
- `attention`: sliced attention against one unsliced fused call, in one process.
- `gpu`: sliced attention and single layers on one accelerator, against the unsliced call.
- `planner`: how long the slice program takes.
- `schedules`: every schedule next to the others, simulated.
- `dapple`: plans under the costs of DAPPLE, published ones and ones from our search.
- `published`: step times, rates and ratios of published runs against predicted ones.
- `paper`: the step times that the TeraPipe paper published against simulated ones.
"""
