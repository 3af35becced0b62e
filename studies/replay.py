"""Compare replayed with measured step times of a kept benchmark, row by row.

    terapipe bench --accumulation 1 --json bench.json
    python -m studies.replay bench.json

It needs a machine with a core for each stage: with fewer, all times are replayed.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from terapipe_ds.bench.report import load_result

TOLERANCE = 0.05


def compare(result: dict[str, Any]) -> float:
    """Print a line for each measured row; return the largest relative error."""
    worst = 0.0
    for row in result["runs"]:
        if "error" not in row and not row["replayed"] and row["replayed_s"] is not None:
            error = row["replayed_s"] / row["step_s"] - 1
            worst = max(worst, abs(error))
            print(f"replay: m={row['accumulation']} {row['label']:<36}{row['replayed_s']:>9.3f} s{error:>+8.1%}")
    return worst


def main(argv: list[str] | None = None) -> int:
    """Compare, and return 1 where a row is further off than the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", help="a file of `terapipe bench --json`")
    worst = compare(load_result(parser.parse_args(argv).result))
    if worst > TOLERANCE:
        print(f"a replayed step is {worst:.1%} off the measured one, more than {TOLERANCE:.0%}", file=sys.stderr)
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
