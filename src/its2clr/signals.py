"""Ctrl-C and SIGTERM: held back where they would do harm, left to the parent by workers, and one way out for both."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

TERMINATED = 143
"""Exit code of a command stopped by SIGTERM."""
SECONDS_TO_END = 5.0
"""How long a command may take to tidy up after SIGTERM; Slurm kills it after 30."""
_STOPS: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)


class Termination:
    """Makes SIGTERM, with which Slurm stops a job, end this process like Ctrl-C, but within seconds.

    Attributes:
        heard: Whether the signal came.
    """

    def __init__(self, said: str) -> None:
        self._said = said
        self.heard = False

    def __enter__(self) -> "Termination":
        self._before = signal.signal(signal.SIGTERM, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _stop(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.heard:
            return
        self.heard = True
        os.write(2, self._said.encode())  # not through a buffer, which may be just being written to
        last = threading.Timer(SECONDS_TO_END, os._exit, (TERMINATED,))
        last.daemon = True
        last.start()
        raise KeyboardInterrupt


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back until the block ends; a process that is started in the block never hears them."""
    if threading.current_thread() is not threading.main_thread():  # which alone hears them
        yield
        return
    heard: list[int] = []
    before: dict[int, Any] = {}
    mask = signal.pthread_sigmask if hasattr(signal, "pthread_sigmask") else None
    blocked = mask(signal.SIG_BLOCK, ()) if mask else set()
    try:
        for number in _STOPS:
            before[number] = signal.signal(number, lambda number, _: heard.append(number))
        if mask:
            mask(signal.SIG_BLOCK, _STOPS)
        yield
    finally:
        if mask:
            mask(signal.SIG_SETMASK, blocked)
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        for number in heard:
            signal.raise_signal(number)


def leave_signals_to_parent() -> None:
    """Make this process a worker that ends with its parent: the parent hears Ctrl-C and SIGTERM and kills it."""
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker if its parent was killed: it would go on, and hold the locks of its runs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
