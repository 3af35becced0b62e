"""What checksums cost: a file of states is saved with and without one, in turns, and the disk is waited for.

python -m studies.checksums --gigabytes 1 --pairs 9
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from terapipe_ds.files.atomic import sync
from terapipe_ds.runtime.checkpoints.save import flush


def saved_in_s(states: dict[str, torch.Tensor], path: Path, finish: Callable[[Path], object]) -> float:
    path.unlink(missing_ok=True)
    sync(path.parent)
    start_s = time.perf_counter()
    torch.save(states, path)
    finish(path)
    return time.perf_counter() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--folder", help="on the disk to measure (a temporary folder)")
    options = parser.parse_args()
    states = {f"{k}": torch.rand(int(options.gigabytes * 10**9 / 4 / 16)) for k in range(16)}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path, pairs = Path(folder, "states.pt"), []
        saved_in_s(states, path, sync)
        for pair in range(options.pairs):
            order: list[Callable[[Path], object]] = [sync, flush]
            times_s = {finish: saved_in_s(states, path, finish) for finish in order[:: 1 - 2 * (pair % 2)]}
            pairs.append((times_s[sync], times_s[flush]))
            print(f"without {pairs[-1][0]:.3f} s, with {pairs[-1][1]:.3f} s", flush=True)
    ratios = sorted(with_s / without_s for without_s, with_s in pairs)
    print(f"with / without: median {statistics.median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}")


if __name__ == "__main__":
    main()
