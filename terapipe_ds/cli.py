"""Run the `terapipe` command; its subcommands are in `terapipe_ds.commands`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from terapipe_ds.compat import CompatError
from terapipe_ds.version import __version__

COMMANDS = ("profile", "plan", "strategy", "simulate", "show", "timeline", "bench", "verify", "doctor")


_REMEDIES: dict[type[OSError], str] = {
    FileNotFoundError: "give a path that exists",
    PermissionError: "give a path that you may use",
    IsADirectoryError: "give a file",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2, without the usage that would bury it."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 2 after an error, 130 after Ctrl-C. One line on stderr says why."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["plan"] and any(word.partition("=")[0] == "--devices" for word in words):
        print("terapipe: note: `terapipe plan --devices` is now `terapipe strategy`, which runs", file=sys.stderr)
        words[0] = "strategy"
    arguments = _parser().parse_args(words, argparse.Namespace(words=words))
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print(f"terapipe {arguments.command}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, CompatError) as error:
        print(f"terapipe {arguments.command}: error: {_one_line(error)}", file=sys.stderr)
        return 2
    return 0


def _one_line(error: Exception) -> str:
    from terapipe_ds.schedule import ScheduleError

    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}; {_REMEDIES.get(type(error), 'give another path')}"
    return " ".join((error.reason if isinstance(error, ScheduleError) else str(error)).split())


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="terapipe",
        description="Token-level pipeline parallelism for DeepSpeed: schedules and timelines.",
        epilog="Each command has examples: terapipe show --help",
    )
    parser.add_argument("--version", action="version", version=f"terapipe {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"terapipe_ds.commands.{name}")
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.DESCRIPTION,
            epilog=f"examples:\n{module.EXAMPLES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=module.run)
        module.add_arguments(command)
    return parser
