"""Processes that train one run after the other, side by side: their engine, and locks between them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO

from its2clr.config import EngineConfig
from its2clr.engine.devices import Engine

LOCK = ".worker"
"""File in a run directory that a worker holds a lock on while it trains the run."""


@cache
def lasting_engine(settings: str) -> Engine:
    """One engine per process and settings (as JSON): its decoded tiles serve all runs on a cohort."""
    engine = Engine(EngineConfig.model_validate_json(settings))
    engine.memory = {}
    return engine


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process holds this lock file, and hold it in the block; a killed process lets go of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        _lock(file, wait=True)
        yield


def take_lock(path: Path) -> IO[str] | None:
    """Take this lock file without waiting.

    Returns:
        The open file, which holds the lock until it is closed; None if another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("w", encoding="utf-8")
    if _lock(file, wait=False):
        return file
    file.close()
    return None


def _lock(file: IO[str], *, wait: bool) -> bool:
    """Lock an open file; where the system has no such locks, every process gets it."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
