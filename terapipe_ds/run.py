"""Run an unmodified DeepSpeed training script with token slices.

`deepspeed --module terapipe_ds.run train.py ARGS` registers the plugin and then runs `train.py` as `__main__`.
DeepSpeed's launcher starts `python -m terapipe_ds.run --local_rank=N train.py ARGS`: its own option stands in front of
the script. This module hands it on to the script, exactly where the launcher would have put it.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from pathlib import Path

_USAGE = (
    "usage: deepspeed [LAUNCHER OPTIONS] --module terapipe_ds.run [--verify] SCRIPT.py [SCRIPT OPTIONS]\n"
    "Runs SCRIPT.py unchanged; a PipelineModule trains with token slices when the DeepSpeed config has an enabled\n"
    "'terapipe' section.\n"
    "  --verify  run up to the first training batch only: compare the layers on slices with the layers on whole\n"
    "            sequences, print the report, and exit with 0, or with 1 where they differ\n"
    "example: deepspeed --num_gpus 2 --module terapipe_ds.run --verify train.py --config ds.json"
)


def split_arguments(arguments: list[str]) -> tuple[bool, str, list[str]]:
    """Return whether `--verify` is in front of the script, the script, and its arguments, or raise ValueError.

    The launcher's `--local_rank=N` in front of the script becomes the script's own.
    """
    verify_only = False
    forwarded: list[str] = []
    rest = list(arguments)
    while rest and (rest[0] == "--verify" or rest[0].startswith("--local")):
        option = rest.pop(0)
        if option == "--verify":
            verify_only = True
            continue
        forwarded.append(option)  # --local_rank=N, --local-rank=N, or the two-word form
        if "=" not in option and rest:
            forwarded.append(rest.pop(0))
    if not rest or rest[0].startswith("-"):
        raise ValueError("no script given")
    return verify_only, rest[0], forwarded + rest[1:]


def main(arguments: list[str] | None = None) -> None:
    """Register the plugin, then run the script named in `arguments` (default: `sys.argv[1:]`) as `__main__`."""
    given = sys.argv[1:] if arguments is None else arguments
    if any(option in given[:1] for option in ("-h", "--help")):
        print(_USAGE)
        return
    try:
        verify_only, script, script_arguments = split_arguments(given)
    except ValueError as error:
        leave_word_to_first_rank()
        raise SystemExit(f"terapipe_ds.run: {error}\n{_USAGE}") from None
    if not Path(script).is_file():
        leave_word_to_first_rank()
        raise SystemExit(f"terapipe_ds.run: script {script!r} not found; give the path of the training script")

    # streams that share a queue wait for one another; CUDA reads it when it starts, and a user's number stays
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    from terapipe_ds.config import TeraPipeConfigError
    from terapipe_ds.costs.profile import ProfileError
    from terapipe_ds.dict_batch import BatchError
    from terapipe_ds.planner.errors import PlannerError
    from terapipe_ds.runtime.register import register
    from terapipe_ds.runtime.verify import VerifyError

    register(verify_only=verify_only)
    sys.argv = [script, *script_arguments]
    if not sys.flags.safe_path:  # else there is no folder of the script in front
        sys.path[0] = str(Path(script).resolve().parent)  # as `python script.py` has it
    try:
        runpy.run_path(script, run_name="__main__")
    except (TeraPipeConfigError, BatchError, PlannerError, ProfileError) as error:  # every rank raises them
        leave_word_to_first_rank()
        raise SystemExit(f"terapipe_ds.run: {error}") from None
    except VerifyError as error:  # no wait: rank 0 alone has the report, and each other rank has one line of its own
        raise SystemExit(f"terapipe_ds.run: {error}\n") from None  # ranks write at once: the line ends in this write


def leave_word_to_first_rank() -> None:
    """Wait on all ranks of a machine but its first, which prints the error for all of them and ends.

    All ranks find a mistake at the same place, and the launcher ends the other ranks when one has ended. A rank that
    still runs after 15 seconds is alone with its mistake, and prints it too. Meanwhile it prints nothing: torch would
    write pages about the store that the first rank has closed.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher ends ranks by this signal: no report of ours
        stderr = os.dup(2)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        time.sleep(15)
        os.dup2(stderr, 2)


if __name__ == "__main__":
    main()
