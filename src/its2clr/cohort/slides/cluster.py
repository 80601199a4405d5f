"""Spread work over processes of this machine, or over Dask workers elsewhere, few pieces in flight.

A piece of work whose worker dies is given to another worker. After several deaths it is given up, and the others go on.
"""

import multiprocessing.connection
import pickle
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from its2clr.cluster.place import Cluster
from its2clr.cluster.workers import WorkersDied, workers_of
from its2clr.cohort.parallel import processors
from its2clr.memory_limit import take_blas_memory
from its2clr.processes import Worker, WorkerLost
from its2clr.signals import interrupts_wait, leave_signals_to_parent

MOST_DEATHS = 3
"""Workers that may die over one piece, as with Dask; the next death gives it up."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def spread(
    function: Callable[[_Item], _Result],
    items: Mapping[str, _Item],
    cluster: Cluster = Cluster(),  # noqa: B008 (it cannot change)
) -> Generator[tuple[str, _Result | WorkersDied], None, None]:
    """Apply a function to each item in other processes and yield the results as they come.

    Args:
        function: What to do; an error it raises ends the work and is raised here.
        items: What to do it with, by name.
        cluster: Where; on this machine as many processes as there are processors at hand, if it does not say how many.

    Yields:
        The name and the result; `WorkersDied` for a piece that was given up.

    Raises:
        InputError: If there are no workers to be had.
    """
    if cluster.is_local:
        yield from _in_processes(function, items, min(cluster.workers or processors(), len(items)))
        return
    pieces = iter(items.items())
    with workers_of(cluster, len(items)) as workers:
        yield from workers.work(function, lambda: next(pieces, None), trains=False)


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
