"""Processes that work for this one: they do not hear Ctrl-C, end with their parent, and may die without harm to others.

They are reached by pipes that have no name and listen nowhere, so that no other user of the machine can give them work.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any


class WorkerLost(Exception):  # noqa: N818 - an outcome, not an error of the program
    """A worker died over a piece of work."""


class Worker:
    """A process that does one piece of work after the other; it is started with its first piece, and again if it died.

    Args:
        serve: What the process runs: takes its end of a pipe and the arguments; gives back an answer for each piece.
        arguments: Of `serve`.
        environment: Variables that the process gets besides those of this one.
    """

    def __init__(
        self, serve: Callable[..., None], arguments: Sequence[Any] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self._serve, self._arguments, self._environment = serve, arguments, environment or {}
        self._process: SpawnProcess | None = None
        self.pipe: Connection

    def give(self, piece: Any) -> None:
        """Hand over a piece of work; the pipe is ready when there is an answer, or when the process has died."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self._process = context.Process(target=self._serve, args=(theirs, *self._arguments), daemon=True)
            # Ctrl-C reaches the whole group; a worker that is still starting would die of it.
            with interrupts_wait(), _in_environment(self._environment):
                self._process.start()
            theirs.close()
        with suppress(BrokenPipeError):  # it died meanwhile, which `take` will notice
            self.pipe.send(piece)

    def take(self) -> Any:
        """The answer to the piece that was given last.

        Raises:
            WorkerLost: The process died.
        """
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            self.stop()
            raise WorkerLost from error

    def stop(self) -> None:
        """End the process, if it runs."""
        if self._process is not None:
            self._process.terminate()
            self._process.join()
            self.pipe.close()
            self._process = None


def serve_under_parent() -> None:
    """Called first by a worker process: it leaves Ctrl-C to its parent, and ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker if its parent was killed: it would go on, and hold the locks of its runs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Hold Ctrl-C back until the block ends; a process that is started in the block never hears it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _in_environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
