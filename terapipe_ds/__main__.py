"""Run `python -m terapipe_ds` as the `terapipe` command."""

from __future__ import annotations

import sys

from terapipe_ds.cli import main

if __name__ == "__main__":
    sys.exit(main())
