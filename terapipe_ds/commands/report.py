"""``terapipe report``: the HTML report of a benchmark from its JSON."""

from __future__ import annotations

import argparse
from pathlib import Path

from terapipe_ds.commands import check_output

HELP = "make the HTML report of a benchmark from its JSON"
DESCRIPTION = "Write one self-contained HTML page (tables, plots, data) from what `terapipe bench --json` wrote."
EXAMPLES = """\
  terapipe report result.json --out report.html
  terapipe report bench.json.gz --out again.html

Takes the JSON file of `terapipe bench --json`, or the bench.json.gz that a report holds.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("result", metavar="RESULT", help="a JSON file of `terapipe bench --json`, gzipped or not")
    parser.add_argument("--out", required=True, metavar="FILE", help="the HTML file to write")


def run(arguments: argparse.Namespace) -> None:
    """Read, draw, write."""
    from terapipe_ds.bench.report import ReportError, load_result, write_report

    check_output(arguments.out, "--out")
    result = load_result(arguments.result)
    out = Path(arguments.out)
    if out.resolve() == Path(arguments.result).resolve():
        raise ReportError(f"{out} is the result itself: give another name to --out")
    write_report(result, out)
    print(f"{out}: {out.stat().st_size / 1024:.0f} KiB")
