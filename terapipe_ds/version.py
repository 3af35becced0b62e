"""The version, in a module that imports nothing: every part of the package may name it."""

__version__ = "0.1.0"
