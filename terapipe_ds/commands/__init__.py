"""The commands of `terapipe`, a module each.

A module has `HELP` (one line), `DESCRIPTION`, `EXAMPLES`, `add_arguments(parser)` and `run(arguments)`. Its options are
a class of `commands.options`. Imports of anything heavy are inside functions: `--help` loads neither torch nor numpy.
"""
