"""Run `terapipe doctor`: find the faults of an installation, a machine or a config, and say how to fix them."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from terapipe_ds.commands.options import MAX_DEVICES, MAX_STAGES, Options, Text, option, switch
from terapipe_ds.files.user_json import CommandError

if TYPE_CHECKING:
    from terapipe_ds.doctor import Check, Line

HELP = "look at the installation, the machine and a DeepSpeed JSON: what is wrong, and how to mend it"
DESCRIPTION = (
    "Look at the installation and the machine, and at a DeepSpeed JSON if one is given: one line for each finding,\n"
    "with a verdict and the next step. Nothing is built, trained or written. Exit code 1 where something will fail.\n"
    "`ds_report` and `python -m torch.utils.collect_env` print cards, drivers, libraries and built operators.\n"
    "  ok: as it should be    note: worth knowing    warning: may fail or be slow    fail: will not work"
)
EXAMPLES = """\
  terapipe doctor
  terapipe doctor --config ds.json                           (what will run, what is refused and why)
  terapipe doctor --config ds.json --stages 4 --data 2       (on 8 ranks)
  terapipe doctor --json > doctor.json                       (to attach to a report)
"""


class DoctorOptions(Options):
    """Choose what to check in addition to the installation and the machine."""

    config: Text | None = option("a DeepSpeed JSON to look at as well", "DS.json")
    stages: int | None = option("pipeline stages of the run", "K", ge=1, le=MAX_STAGES)
    data: int | None = option("replicas of the run (data parallelism)", "D", ge=1, le=MAX_DEVICES)
    as_json: bool = switch("print as JSON", "--json")


add_arguments = DoctorOptions.add_to


def run(arguments: argparse.Namespace) -> None:
    """Run the checks, print them, and end with exit code 1 where something will fail."""
    options = DoctorOptions.read(arguments)
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    from terapipe_ds.doctor import VERDICTS, look
    from terapipe_ds.version import __version__

    if options.data is not None and options.stages is None:
        raise CommandError("--data goes with --stages: give both, or neither")
    show: Callable[[str], None] = (lambda text: None) if options.as_json else functools.partial(print, flush=True)
    show(f"terapipe doctor, terapipe_ds {__version__}")
    found: list[tuple[str, Line]] = []
    for group, checks in _groups(options):
        show(f"\n{group}")
        for check in checks:
            lines = look(check)
            found += [(group, line) for line in lines]
            show("\n".join(map(_text, lines)))
    counts = Counter(line.verdict for _, line in found)
    if options.as_json:
        listed = [{"group": group, **dataclasses.asdict(line)} for group, line in found]
        print(json.dumps({"version": __version__, "counts": dict(counts), "checks": listed}, indent=1))
    else:
        words = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
        show(f"\n{words}\nds_report and python -m torch.utils.collect_env print cards, drivers and libraries")
    if counts["fail"]:
        sys.stdout.flush()
        raise SystemExit(1)


def _groups(options: DoctorOptions) -> list[tuple[str, tuple[Check, ...]]]:
    from terapipe_ds.doctor import deepspeed_json, environment, installation, machine

    ranks = None if options.stages is None else options.stages * (options.data or 1)
    groups = [("installation", installation.CHECKS), ("machine", (*machine.checks(ranks), *environment.checks()))]
    if options.config is not None:
        groups.append(("config", deepspeed_json.checks(options.config, options.stages, options.data)))
    return groups


_INDENT = 32


def _text(line: Line) -> str:
    """Return a finding as text: verdict, name and finding, with the fix below."""
    width = max(min(shutil.get_terminal_size((120, 24)).columns, 140), _INDENT + 40)
    wrapped = textwrap.wrap(line.found, width - _INDENT, break_on_hyphens=False) or [""]
    if line.fix:
        fix = textwrap.wrap(line.fix, width - _INDENT - 3, break_on_hyphens=False)
        wrapped += [("   " if index else "-> ") + text for index, text in enumerate(fix)]
    head = f"  {line.verdict:<9}{line.name:<{_INDENT - 13}}  "
    rest = [" " * _INDENT + text for text in wrapped[1:]]
    return "\n".join([head + wrapped[0], *rest])
