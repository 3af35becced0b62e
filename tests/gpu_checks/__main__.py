"""Run parts, each in a process of its own, merge what they found, and say what failed."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

from tests.gpu_checks.checks import (
    PART_LIMIT_S,
    RESULT,
    Check,
    PartResult,
    Settings,
    merged,
    not_run,
    parts_in,
    require_alike,
    table,
)

NO_DEVICE = (
    "gpu-checks: torch sees no CUDA device here. Run it where one is; or try every part on the CPU, with tiny sizes, "
    "by --dry-run (make gpu-checks DRY_RUN=1)"
)


PARTS = {  # module, function that yields its checks
    "attention": ("attention", "checks"),
    "options": ("attention", "options"),
    "ranks": ("ranks", "checks"),
    "watched": ("ranks", "watched"),
    "speed": ("speed", "checks"),
    "actions": ("actions", "checks"),
    "layers": ("layers", "checks"),
    "bench": ("benches", "on_device"),
    "messages": ("messages", "checks"),
}


def checks_of(part: str) -> Callable[[Settings], Iterator[Check]]:
    """Return the function that yields the checks of a part. Its module is imported only in the part's own process."""
    module, function = PARTS[part]
    found: Callable[[Settings], Iterator[Check]] = getattr(import_module(f"tests.gpu_checks.{module}"), function)
    return found


def run_part(part: str, settings: Settings) -> PartResult:
    """Run all checks of a part and write the result after each; an exception becomes a failed check."""
    result = PartResult(part, settings.dry_run, machine(settings.device))
    result.save(settings.folder)
    begin_s = time.monotonic()
    checks = checks_of(part)(settings)
    while True:
        try:
            check = next(checks, None)
        except Exception as error:
            check = not_run(f"{part}, after {len(result.checks)} checks", f"{type(error).__name__}: {error}")
        if check is None:
            return result
        now_s = time.monotonic()
        result.add(check, now_s - begin_s)
        result.save(settings.folder)
        begin_s = now_s


def machine(device: str) -> dict[str, object]:
    """Return what describes the machine on which figures are measured."""
    import torch

    from terapipe_ds.bench.ranks import machine as host
    from terapipe_ds.runtime.profiling.key import device_name

    found = {**host(), "device": device_name(torch.device(device))}
    if device == "cuda":
        found["versions"]["cuda"] = str(torch.version.cuda)
        found["devices"] = torch.cuda.device_count()
    return found


def _in_a_process(part: str, arguments: argparse.Namespace, device: str) -> None:
    """Run a part in a process of its own, so that one that hangs or dies costs its own checks only."""
    command = [sys.executable, "-m", "tests.gpu_checks", "--out", str(arguments.out), "--inside", part]
    command += ["--dry-run"] * arguments.dry_run + ["--limit-s", str(arguments.limit_s)]
    path = arguments.out / f"{part}.json"
    path.unlink(missing_ok=True)
    problem = problem_of(command, arguments.limit_s)
    if problem is not None:
        known = json.loads(path.read_text()) if path.exists() else None
        result = PartResult(**known) if known else PartResult(part, arguments.dry_run, machine(device))
        result.add(not_run(f"{part}, after {len(result.checks)} checks", problem), 0.0)
        result.save(arguments.out)


def problem_of(command: list[str], limit_s: float) -> str | None:
    """Run a command and return why it failed, or None. All processes that it started end with it."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(limit_s)
        return f"it ended with exit code {code}" if code else None
    except subprocess.TimeoutExpired:
        return f"it took longer than {limit_s:g} s and was ended"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_checks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all, in this order)")
    parser.add_argument("--out", type=Path, help="folder (default: out/gpu-checks, of dry runs out/gpu-checks-dry-run)")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny sizes: no time is judged")
    parser.add_argument(
        "--limit-s", type=float, default=PART_LIMIT_S, help="seconds after which a part is ended (default: %(default)g)"
    )
    parser.add_argument("--inside", metavar="PART", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    for part in (*arguments.parts, *([arguments.inside] if arguments.inside else [])):
        if part not in PARTS:
            parser.error(f"part {part!r}: known are {', '.join(PARTS)}")
    arguments.out = arguments.out or Path("out", "gpu-checks-dry-run" if arguments.dry_run else "gpu-checks")
    return arguments


def main(words: list[str] | None = None) -> int:
    """Return 0 where every check of the parts that ran is right, 1 where one is not, 2 where nothing could be run."""
    arguments = parse_arguments(words)
    parts = [arguments.inside] if arguments.inside else arguments.parts or list(PARTS)
    device = "cpu" if arguments.dry_run else "cuda"
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print(NO_DEVICE, file=sys.stderr)
            return 2
    os.environ["DS_ACCELERATOR"] = device
    if arguments.inside:
        run_part(arguments.inside, Settings(device, arguments.dry_run, arguments.out, arguments.limit_s))
        return 0
    try:
        return _run_all(parts, arguments, device)
    except ValueError as error:
        print(f"gpu-checks: {error}", file=sys.stderr)
        return 2


def _run_all(parts: Sequence[str], arguments: argparse.Namespace, device: str) -> int:
    coming = {"dry_run": arguments.dry_run, "machine": machine(device)}
    require_alike(arguments.out, [*parts_in(arguments.out, PARTS), coming])  # before the first part runs
    arguments.out.mkdir(parents=True, exist_ok=True)
    for part in parts:
        _in_a_process(part, arguments, device)
        result = merged(arguments.out, PARTS)
        print(table(result, [part]), flush=True)
    print(f"all of it is in {arguments.out / RESULT}")
    return int(any(not check["ok"] for part in parts for check in result["parts"][part]["checks"]))


if __name__ == "__main__":
    sys.exit(main())
