"""Errors written for the person at the keyboard; the command line prints them without a traceback."""


class Its2clrError(Exception):
    """Base of every error this package raises on purpose."""


class InputError(Its2clrError, ValueError):
    """The given files or settings are wrong; the message says what, where and what to do."""


class TrainingError(Its2clrError, RuntimeError):
    """Training cannot go on (not-a-number, collapse); the message carries advice."""


class DiskFullError(Its2clrError, OSError):
    """A file could not be written for want of room; the message says where, how much is needed and what to do."""
