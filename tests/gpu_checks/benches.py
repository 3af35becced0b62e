"""Run `terapipe bench` on a device: rows must run and agree."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from tests.gpu_checks.checks import Check, Settings, not_run

SYSTEMS = "--systems deepspeed,terapipe"
ONE_STAGE = f"""--stages 1 --layers 4 --hidden 2048 --heads 16 --micro-batch 1 --sequence-length 8192 {SYSTEMS}
    --schedules 1f1b,seq1f1b --slices 1,8,plan --accumulation 1,4 --pairs 3 --device cuda"""
TWO_STAGES = f"""--stages 2 --layers 4 --hidden 1024 --heads 8 --micro-batch 1 --sequence-length 4096 {SYSTEMS}
    --slices 1,4,plan --accumulation 1,4 --pairs 3 --device cuda"""
TINY = f"""--stages 1 --layers 1 --hidden 32 --heads 2 --micro-batch 1 --sequence-length 128 {SYSTEMS}
    --schedules 1f1b,seq1f1b --slices 1,2 --accumulation 1 --pairs 1"""


def on_device(settings: Settings) -> Iterator[Check]:
    """Yield the checks of one stage, of two that share a device, and of two with a device each where there are two."""
    if settings.dry_run:
        yield from _bench(settings, "one-stage", TINY)
        return
    import torch

    yield from _bench(settings, "one-stage", ONE_STAGE)
    yield from _bench(settings, "share-device", f"{TWO_STAGES} --share-device")
    if torch.cuda.device_count() > 1:
        yield from _bench(settings, "two-devices", TWO_STAGES)


def _bench(settings: Settings, name: str, options: str) -> Iterator[Check]:
    path = settings.folder / f"bench-{name}.json"
    command = [sys.executable, "-m", "terapipe_ds", "bench", *options.split(), "--json", str(path)]
    path.unlink(missing_ok=True)
    limit_s = max(settings.ends_s - time.monotonic(), 1.0)
    with tempfile.TemporaryFile("w+") as said:  # no pipe: its ranks would hold it open after the time is over
        try:
            ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=said, timeout=limit_s)
        except subprocess.TimeoutExpired:
            yield not_run(f"bench {name}", "the part's time is over")
            return
        said.seek(0)
        words = said.read().strip()
    if ended.returncode or not path.exists():
        yield not_run(f"bench {name}", (words or "no word").splitlines()[-1])
        return
    result = json.loads(path.read_text())
    yield Check(f"bench {name}: attention", result["attention"])
    for row in result["runs"]:
        label = f"bench {name}: {row['label']}, m = {row['accumulation']}"
        if "error" in row:
            yield not_run(label, row["error"])
            continue
        yield Check(f"{label}, step ms", row["step_s"] * 1e3)
        if row["ratio_to_stock"] is not None:
            yield Check(f"{label}, stock over it", row["ratio_to_stock"])
