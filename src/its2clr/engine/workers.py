"""Processes that train side by side: their share of the machine, and locks between them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from its2clr.memory_limit import take_blas_memory
from its2clr.signals import leave_signals_to_parent


def become_worker(number: int, count: int) -> None:
    """Make this process one of several workers: it ends with its parent and takes a share of cores and GPUs.

    Args:
        number: Which worker it is, from 0.
        count: How many there are.
    """
    leave_signals_to_parent()
    take_blas_memory()
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))


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
