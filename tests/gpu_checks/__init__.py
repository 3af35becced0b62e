"""Check on a device what CPUs cannot show, in parts of less than ten minutes each: `make gpu-checks`.

    python -m tests.gpu_checks --out out/gpu-checks                    every part
    python -m tests.gpu_checks --out out/gpu-checks attention ranks    two of them, merged with what is there
    python -m tests.gpu_checks --out out/dry --dry-run                 every part on the CPU, with tiny sizes

Each part writes `PART.json` to the folder after every check; `gpu-checks.json` has all parts that the folder has.
"""
