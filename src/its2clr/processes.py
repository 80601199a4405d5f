"""Processes that work for this one: they leave signals to it, end with it, and may die without harm to others.

They are reached by pipes that have no name and listen nowhere, so that no other user of the machine can give them work.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import ModuleType
from typing import Any

from its2clr.signals import interrupts_wait


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
            # Signals reach the whole group; a worker that is still starting would die of them.
            with interrupts_wait(), without_script(), _in_environment(self._environment):
                self.pipe, theirs = context.Pipe()
                process = context.Process(target=self._serve, args=(theirs, *self._arguments), daemon=True)
                process.start()
                theirs.close()
                self._process = process
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
            self._process.kill()  # it hears no SIGTERM
            self._process.join()
            self.pipe.close()
            self._process = None


@contextmanager
def without_script() -> Iterator[None]:
    """Processes that are started in the block do not run the script that started this one.

    multiprocessing has a new process import it. A script without `if __name__ == "__main__":` would there train again.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


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
