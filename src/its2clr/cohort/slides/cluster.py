"""Spread work over Dask workers, few pieces in flight: on this machine, or on a scheduler by address.

A piece of work whose worker dies is given to another worker. After several deaths it is given up, and the others go on.
"""

import logging
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

from its2clr.cohort.parallel import processors
from its2clr.errors import InputError

_CONNECT_SECONDS = 30
_WORKERS_SECONDS = 120
_LOCAL = {
    # By default workers give back every freed page at once: of many small buffers, as tiles are, that costs a quarter.
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": 128 * 2**20,
    "distributed.nanny.pre-spawn-environ.MALLOC_MMAP_THRESHOLD_": 16 * 2**20,
    "distributed.worker.profile.enabled": False,
}

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class WorkersDied(Exception):  # noqa: N818 - an outcome, not an error of the program
    """Every worker that was given this piece died."""


@contextmanager
def connect(scheduler: str | None = None, workers: int | None = None) -> Iterator[Any]:
    """A Dask client: of a new cluster of processes on this machine, or of a scheduler that runs already.

    Args:
        scheduler: Address such as `tcp://node:8786`; a local cluster if None.
        workers: Processes of the local cluster; the processors at hand if None.

    Raises:
        InputError: If no scheduler answers, or it has no workers.
    """
    import dask
    from distributed import Client, LocalCluster

    if workers is not None and workers < 1:
        raise InputError(f"workers must be at least 1, got {workers}")
    if scheduler is not None:
        if workers is not None:
            raise InputError("workers says how many to start on this machine; with a scheduler, start them there")
        with _connect_to(scheduler) as client:
            yield client
        return
    with (
        dask.config.set(_LOCAL),
        LocalCluster(
            n_workers=workers or processors(),
            threads_per_worker=1,
            processes=True,
            dashboard_address="127.0.0.1:0",
            silence_logs=logging.CRITICAL,
        ) as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(_quiet_plugin())
        yield client


def _quiet_plugin() -> Any:
    """Has workers, also those started later, leave Ctrl-C to the command, which ends them."""
    from distributed import WorkerPlugin

    class IgnoreInterrupts(WorkerPlugin):  # type: ignore[misc]
        name = "ignore-interrupts"

        def setup(self, worker: Any) -> None:  # noqa: ARG002
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    return IgnoreInterrupts()


@contextmanager
def _connect_to(scheduler: str) -> Iterator[Any]:
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


def map_on_workers(
    client: Any, function: Callable[[_Item], _Result], items: Mapping[str, _Item]
) -> Iterator[tuple[str, _Result | WorkersDied]]:
    """Apply a function to each item on the workers and yield the results as they come.

    As many pieces are in flight as there are threads, so a dying worker costs only the piece it had.

    Args:
        client: A Dask client.
        function: What to do; an error it raises ends the work and is raised here.
        items: What to do it with, by name.

    Yields:
        The name and the result; `WorkersDied` for a piece that was given up.
    """
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
                yield name, WorkersDied("its worker died each time it was tried")
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
