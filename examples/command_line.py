"""Say what is wrong once, where the launcher starts a script once per rank."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Says what is wrong once, not once per rank."""

    def error(self, message: str) -> NoReturn:
        end_with(f"{message} (--help lists all options)")


def end_with(message: str) -> NoReturn:
    """Print what is wrong and exit, with the first rank of each machine speaking for all.

    The launcher ends the other ranks when one has gone; one that is still there after a while failed alone.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which the launcher ends ranks: without a report of ours
        time.sleep(30)
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)
