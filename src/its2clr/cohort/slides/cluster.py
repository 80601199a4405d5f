"""Spread work over processes of this machine, or over the workers of a Dask scheduler, few pieces in flight.

A piece of work whose worker dies is given to another worker. After several deaths it is given up, and the others go on.
"""

import multiprocessing.connection
import pickle
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from its2clr.cohort.parallel import processors
from its2clr.errors import InputError, extra_needed
from its2clr.memory_limit import take_blas_memory
from its2clr.processes import Worker, WorkerLost
from its2clr.signals import interrupts_wait, leave_signals_to_parent

MOST_DEATHS = 3
"""Workers that may die over one piece, as with Dask; the next death gives it up."""
_CONNECT_SECONDS = 30
_WORKERS_SECONDS = 120
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class WorkersDied(Exception):  # noqa: N818 - an outcome, not an error of the program
    """Every worker that was given this piece died."""

    def __init__(self) -> None:
        super().__init__("its worker died each time it was tried")


def spread(
    function: Callable[[_Item], _Result],
    items: Mapping[str, _Item],
    *,
    scheduler: str | None = None,
    workers: int | None = None,
) -> Generator[tuple[str, _Result | WorkersDied], None, None]:
    """Apply a function to each item in other processes and yield the results as they come.

    Args:
        function: What to do; an error it raises ends the work and is raised here.
        items: What to do it with, by name.
        scheduler: Address of a Dask scheduler such as `tcp://node:8786`; processes of this machine if None.
        workers: Processes of this machine; the processors at hand if None.

    Yields:
        The name and the result; `WorkersDied` for a piece that was given up.

    Raises:
        InputError: If no scheduler answers, or it has no workers.
    """
    if workers is not None and workers < 1:
        raise InputError(f"workers must be at least 1, got {workers}")
    if scheduler is None:
        yield from _in_processes(function, items, min(workers or processors(), len(items)))
        return
    if workers is not None:
        raise InputError("workers says how many to start on this machine; with a scheduler, start them there")
    with _connect_to(scheduler) as client:
        yield from _on_scheduler(client, function, items)


def _in_processes(
    function: Callable[[_Item], _Result], items: Mapping[str, _Item], count: int
) -> Iterator[tuple[str, _Result | WorkersDied]]:
    waiting, deaths = deque(items), Counter[str]()
    pool = [Worker(_serve, environment=_ONE_THREAD) for _ in range(count)]
    busy: dict[Worker, str] = {}

    def give() -> None:
        for worker in pool:
            if worker not in busy and waiting:
                busy[worker] = waiting.popleft()
                worker.give((function, items[busy[worker]]))

    try:
        give()
        while busy:
            by_pipe = {worker.pipe: worker for worker in busy}
            for pipe in multiprocessing.connection.wait(list(by_pipe)):
                worker = by_pipe[pipe]  # type: ignore[index]
                name = busy.pop(worker)
                try:
                    result, error = worker.take()
                except WorkerLost:
                    deaths[name] += 1
                    if deaths[name] <= MOST_DEATHS:
                        waiting.appendleft(name)
                        give()
                        continue
                    result, error = WorkersDied(), None
                if error is not None:
                    raise error
                give()
                yield name, result
    finally:
        with interrupts_wait():
            for worker in pool:
                worker.stop()


def _serve(pipe: Connection) -> None:
    """Do pieces of work until the pipe closes; an answer is a result, or the error that was raised."""
    leave_signals_to_parent()
    take_blas_memory()
    while True:
        try:
            function, item = pipe.recv()
        except EOFError:
            return
        try:
            answer: tuple[Any, Exception | None] = function(item), None
        except Exception as error:  # noqa: BLE001 - raised by the parent
            error.add_note(traceback.format_exc())
            answer = None, error
        try:
            pipe.send(answer)
        except (pickle.PicklingError, TypeError, AttributeError):  # an error that cannot be sent is sent in words
            pipe.send((None, RuntimeError("".join(traceback.format_exception(answer[1])))))


@contextmanager
def _connect_to(scheduler: str) -> Iterator[Any]:
    with extra_needed("--scheduler", "cluster"):
        from distributed import Client

    try:
        client = Client(scheduler, timeout=_CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise InputError(f"no Dask scheduler answers at {scheduler} ({error})") from error
    with client:
        try:
            client.wait_for_workers(1, timeout=_WORKERS_SECONDS)
        except TimeoutError as error:
            raise InputError(f"the Dask scheduler at {scheduler} has no workers; start some") from error
        yield client


def _on_scheduler(
    client: Any, function: Callable[[_Item], _Result], items: Mapping[str, _Item]
) -> Iterator[tuple[str, _Result | WorkersDied]]:
    """The same on Dask workers; as many pieces are in flight as there are threads."""
    from distributed import KilledWorker, as_completed

    names = iter(items)
    running: dict[Any, str] = {}
    done = as_completed()

    def submit(count: int) -> None:
        for name in islice(names, max(count, 0)):
            future = client.submit(function, items[name], pure=False)
            running[future] = name
            done.add(future)

    try:
        submit(_threads(client))
        while running:
            future = next(done)
            name = running.pop(future)
            submit(_threads(client) - len(running))
            error = future.exception() if future.status != "finished" else None
            if isinstance(error, KilledWorker):
                yield name, WorkersDied()
            elif error is not None:
                raise error
            else:
                yield name, future.result()
            del future  # frees the result on the workers
    finally:
        client.cancel(list(running))


def _threads(client: Any) -> int:
    """How many pieces run at once; at least one, also in the moment when every worker is being started anew."""
    return max(1, int(sum(client.nthreads().values())))
