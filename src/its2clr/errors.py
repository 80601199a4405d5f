"""Errors written for the person at the keyboard; the command line prints them without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager


class Its2clrError(Exception):
    """Base of every error this package raises on purpose."""


class InputError(Its2clrError, ValueError):
    """The given files or settings are wrong; the message says what, where and what to do."""


class TrainingError(Its2clrError, RuntimeError):
    """Training cannot go on (not-a-number, collapse); the message carries advice."""


class DiskFullError(Its2clrError, OSError):
    """A file could not be written for want of room; the message says where, how much is needed and what to do."""


@contextmanager
def extra_needed(what: str, extra: str) -> Iterator[None]:
    """Say how to install what an import inside finds missing.

    Args:
        what: What needs it.
        extra: The extra of its2clr that brings it.

    Raises:
        InputError: A package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("its2clr"):
            raise
        raise InputError(f"{what} needs {error.name}, not installed here: pip install 'its2clr[{extra}]'") from error
