"""Apply a function to many items in threads: results in order, few items in flight (Pillow decodes without the GIL)."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from its2clr.errors import InputError

Progress = Callable[[int, int], None]
"""Called with how much is done and how much there is."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def processors() -> int:
    """The processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def default_workers() -> int:
    """The processors this process may use, at most 16."""
    return min(16, processors())


def map_in_threads(
    function: Callable[[_Item], _Result], items: Iterable[_Item], workers: int | None = None
) -> Iterator[_Result]:
    """Apply a function to each item in threads and yield the results in order.

    Args:
        function: What to do; its first error ends the work and is raised here.
        items: Read as the work goes on.
        workers: Number of threads; the processors at hand if None.
    """
    if workers is not None and workers < 1:
        raise InputError(f"workers must be at least 1, got {workers}")
    count = workers or default_workers()
    pool = ThreadPoolExecutor(count)
    pending: deque[Future[_Result]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > 4 * count:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
