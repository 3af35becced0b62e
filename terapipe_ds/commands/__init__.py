"""Hold the commands of `terapipe`, one module per command.

A module has `HELP` (one line), `DESCRIPTION`, `EXAMPLES` and `run(options)`, whose annotation is the class of the
options. Imports of anything heavy are inside functions: `--help` loads neither torch nor numpy.
"""
