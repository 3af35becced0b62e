"""Say what is wrong once, where the launcher starts a script once per rank."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from terapipe_ds.run import leave_word_to_first_rank


class Parser(argparse.ArgumentParser):
    """Says what is wrong once, not once per rank."""

    def error(self, message: str) -> NoReturn:
        end_with(f"{message} (--help lists all options)")


def end_with(message: str) -> NoReturn:
    """Print what is wrong and exit, with the first rank of each machine speaking for all."""
    leave_word_to_first_rank()
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)
