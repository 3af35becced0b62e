"""Hold the commands of `terapipe`, one module per command.

A module has `HELP` (one line), `DESCRIPTION`, `EXAMPLES`, `add_arguments(parser)` and `run(arguments)`. Its options are
a class of `commands.options`. Imports of anything heavy are inside functions: `--help` loads neither torch nor numpy.
"""
