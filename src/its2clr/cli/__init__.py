"""The command line: parse, call, print."""

from its2clr.cli.program import app, main

__all__ = ["app", "main"]
