"""Run `terapipe doctor`: find the faults of an installation, a machine or a config, and say how to fix them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import sys
import textwrap
from collections import Counter

from terapipe_ds.commands.options import (
    MAX_DEVICES,
    MAX_FORWARDS,
    MAX_STAGES,
    STDOUT,
    JsonOutput,
    Options,
    Text,
    json_option,
    option,
    switch,
    write_json,
)
from terapipe_ds.doctor import VERDICTS, Check, Line, deepspeed_json, installation, look, machine
from terapipe_ds.files.user_json import CommandError, DeepSpeedJson
from terapipe_ds.messages import colored
from terapipe_ds.version import __version__

HELP = "look at the installation, the machine and a DeepSpeed JSON: what is wrong, and how to fix it"
DESCRIPTION = (
    "Look at the installation and the machine, and at a DeepSpeed JSON if one is given: one line for each finding, "
    "failures first, with a verdict and the next step. Nothing is built, trained or written. The exit code is 1 where "
    "something will fail.\n"
    "`ds_report` and `python -m torch.utils.collect_env` print cards, drivers, libraries and built operators.\n"
    "  ok: as it should be   note: worth knowing   warning: may fail or be slow   fail: will not work"
)
EXAMPLES = """\
  terapipe doctor
  terapipe doctor --config ds.json                           # also keys, layout and conflicts
  terapipe doctor --config ds.json --stages 4 --data 2       # on 8 ranks
  terapipe doctor --config ds.json --sequence-length 8192    # do the slices fit that length?
  terapipe doctor --quiet                                    # failures and warnings alone
  terapipe doctor --json > doctor.json                       # to attach to a report
"""


class DoctorOptions(Options):
    config: Text | None = option("a DeepSpeed JSON to look at as well", "DS.json")
    stages: int | None = option("pipeline stages of the run", "K", ge=1, le=MAX_STAGES)
    data: int | None = option("replicas of the run (data parallelism)", "D", ge=1, le=MAX_DEVICES)
    sequence_length: int | None = option("tokens of a sequence of the run", "L", ge=1, le=MAX_FORWARDS * 100)
    quiet: bool = switch("print failures and warnings alone")
    as_json: JsonOutput | None = json_option("the findings")


def run(options: DoctorOptions) -> None:
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    if options.data is not None and options.stages is None:
        raise CommandError("--data goes with --stages: give both, or neither")
    options.refuse_without("config", "sequence_length")
    if options.quiet and options.as_json == STDOUT:
        raise CommandError(
            "--quiet is for the text, and --json prints all findings: leave one out, or give --json FILE"
        )
    ranks = None if options.stages is None else options.stages * (options.data or 1)
    file = None if options.config is None else deepspeed_json.read(options.config)
    with contextlib.suppress(CommandError):  # the findings on the config name its faults
        keys = DeepSpeedJson({} if file is None else file[1])
        inner = [keys.number(key, 0) or 1 for key in ("tensor_parallel.autotp_size", "sequence_parallel_size")]
        ranks = ranks and ranks * math.prod(inner)
    checks = {"installation": installation.CHECKS, "machine": machine.checks(ranks)}
    if file is not None:
        shape = options.stages, options.data, options.sequence_length
        checks["config"] = (Check("config", lambda: deepspeed_json.findings(file, *shape)),)
    found = [(group, line) for group, of_group in checks.items() for check in of_group for line in look(check)]
    counts = Counter(line.verdict for _, line in found)

    def as_json() -> str:
        listed = [{"group": group, **dataclasses.asdict(line)} for group, line in found]
        return json.dumps({"version": __version__, "counts": dict(counts), "checks": listed}, indent=1)

    if not write_json(as_json, options.as_json):
        words = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
        others = "ds_report and python -m torch.utils.collect_env print cards, drivers and libraries"
        text = [f"terapipe doctor, terapipe_ds {__version__}", *_report(found, options.quiet), "", words, others]
        print("\n".join(line for line in text if line or not options.quiet))
    if counts["fail"]:
        sys.stdout.flush()
        raise SystemExit(1)


def _report(found: list[tuple[str, Line]], quiet: bool) -> list[str]:
    """Return the findings as text: failures, then warnings, then each group's other lines."""
    parts: dict[str, list[str]] = {"failures": [], "warnings": []}
    titles = {"fail": "failures", "warning": "warnings"}
    for group, line in found:
        if line.verdict in titles or not quiet:
            parts.setdefault(titles.get(line.verdict, group), []).append(_text(line))
    return [row for title, lines in parts.items() if lines for row in ("", title, *lines)]


_INDENT = 32
_COLORS = {"ok": "green", "note": "cyan", "warning": "yellow", "fail": "red"}


def _text(line: Line) -> str:
    """Return a finding as text: verdict, name and finding, with the fix below."""
    width = max(min(shutil.get_terminal_size((120, 24)).columns, 140), _INDENT + 40)
    wrapped = textwrap.wrap(line.found, width - _INDENT, break_on_hyphens=False) or [""]
    if line.fix:
        fix = textwrap.wrap(line.fix, width - _INDENT - 3, break_on_hyphens=False)
        wrapped += [("   " if index else "-> ") + text for index, text in enumerate(fix)]
    head = f"  {colored(f'{line.verdict:<9}', _COLORS[line.verdict], sys.stdout)}{line.name:<{_INDENT - 13}}  "
    rest = [" " * _INDENT + text for text in wrapped[1:]]
    return "\n".join([head + wrapped[0], *rest])
