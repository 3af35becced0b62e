"""Run the `terapipe` command; its subcommands are in `terapipe_ds.commands`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn

from terapipe_ds.compat import CompatError
from terapipe_ds.messages import colored, nearest, unknown
from terapipe_ds.version import __version__

COMMANDS = ("profile", "plan", "strategy", "simulate", "show", "timeline", "bench", "verify", "doctor", "convert")

_REMEDIES: dict[type[OSError], str] = {
    FileNotFoundError: "give a path that exists",
    PermissionError: "give a path that you may use",
    IsADirectoryError: "give a file",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2, without the usage that would bury it."""
        self.exit(2, f"{self.prog}: {colored('error:', 'red', sys.stderr)} {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 2 after an error, 130 after Ctrl-C. One line on stderr says why."""
    words = sys.argv[1:] if argv is None else list(argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the shell closed it (`>&-`), and code asks it whether it is a terminal
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (as long as the process)
    try:
        return _run(words)
    except KeyboardInterrupt:  # also while a command is imported
        print(f"{' '.join(['terapipe', *words[:1]])}: interrupted", file=sys.stderr)
        return 130


def _run(words: list[str]) -> int:
    if words[:1] == ["plan"] and any(word.partition("=")[0] == "--devices" for word in words):
        print("terapipe: note: `terapipe plan --devices` is now `terapipe strategy`, which runs", file=sys.stderr)
        words[0] = "strategy"
    if words[:1] == ["convert"] and "--megatron-args" in words[:-1]:
        at = words.index("--megatron-args")  # argparse takes a value like "--bf16" for an option
        words[at : at + 2] = [f"{words[at]}={words[at + 1]}"]
    parser = _parser([name for name in COMMANDS if name in words[:1]] or COMMANDS)
    _complete(parser)
    if not words:
        parser.print_help()
        return 0
    arguments = _parse(parser, words)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # an encoding may lack a letter of a file's name
    try:
        arguments.run(arguments.options.read(arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, CompatError) as error:
        label = colored("error:", "red", sys.stderr)
        with contextlib.suppress(OSError):  # stderr may be what is full
            print(f"terapipe {arguments.command}: {label} {_one_line(error, arguments)}", file=sys.stderr)
        return 2
    return 0


def _one_line(error: Exception, arguments: argparse.Namespace) -> str:
    from terapipe_ds.costs.analytic import AnalyticCostError
    from terapipe_ds.planner import PlannerError
    from terapipe_ds.schedule import ScheduleError

    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}; {_REMEDIES.get(type(error), 'give another path')}"
    text = " ".join((error.reason if isinstance(error, ScheduleError) else str(error)).split())
    names_arguments = isinstance(error, PlannerError | ScheduleError | AnalyticCostError)
    return arguments.options.in_options(text) if names_arguments else text


def _complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that asks which words may follow, and end the process; argcomplete is an optional package."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    with contextlib.suppress(ImportError):
        import argcomplete

        argcomplete.autocomplete(parser)


def _parse(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Return the parsed words; refuse an unknown command or option and name the nearest known one."""
    if not words[0].startswith("-") and words[0] not in COMMANDS:
        parser.error(unknown("command", words[0], COMMANDS, COMMANDS))
    arguments, rest = parser.parse_known_args(words, argparse.Namespace(words=words))
    if rest:
        options = re.findall(r"--[a-z][a-z-]*", arguments.parser.format_help())
        hint = nearest(rest[0].partition("=")[0], options)
        if not hint and arguments.command == "convert":
            hint = "; put all of Megatron's arguments in one pair of quotes"
        arguments.parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    return arguments


def _parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser; of a command line that names its command, no other command is imported."""
    from terapipe_ds.commands.options import options_of

    parser = _Parser(
        prog="terapipe",
        description="Token-level pipeline parallelism for DeepSpeed: plans, schedules, checks and measurements.",
        epilog="Each command has examples: terapipe show --help. The shell completes words after "
        '`pip install argcomplete` and `eval "$(register-python-argcomplete terapipe)"`.',
    )
    parser.add_argument("--version", action="version", version=f"terapipe {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    width = max(20, min(shutil.get_terminal_size((100, 24)).columns, 120)) - 2
    for name in names:
        module = importlib.import_module(f"terapipe_ds.commands.{name}")
        lines = [textwrap.fill(line, width) for line in module.DESCRIPTION.splitlines()]
        command = commands.add_parser(
            name,
            help=module.HELP,
            usage=f"terapipe {name}{_OPERANDS.get(name, '')} [OPTIONS]",
            description="\n".join([*lines, "", "examples:", module.EXAMPLES.rstrip()]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=module.run, parser=command)
        options_of(module).add_to(command)
    return parser


_OPERANDS = {"show": " [FILE]", "timeline": " TRACE_DIR_OR_FILE ...", "bench": " [PRESET]"}
