"""Hold the version in a module that imports nothing, so that every part of the package may name it."""

__version__ = "0.1.0"
