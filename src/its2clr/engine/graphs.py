"""GPU work recorded once as a CUDA graph and then replayed, which saves launching its many small kernels."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from its2clr.errors import TrainingError

T = TypeVar("T")

PLAIN_RUNS = 3
"""Normal runs before the recording, in which libraries and optimisers set themselves up."""


class Recorded(Generic[T]):
    """Work on tensors of fixed shapes: a few normal runs, then a recording, then replays of it.

    Tensors that the work uses besides its inputs must stay at the same place in memory. What it returns is valid until
    the next run.

    Args:
        work: A method of the object that keeps this recording; takes the inputs. It must neither wait for the device
            nor look at values. It is held by a weak reference, so that the object and its recordings are freed with the
            last reference to the object, not when Python next collects cycles.
        generators: Random generators it draws from, besides the global one.
        fixed: More arguments, the same in every run.
    """

    def __init__(self, work: Callable[..., T], generators: Sequence[torch.Generator] = (), **fixed: Any) -> None:
        self._method, self._generators, self._fixed = weakref.WeakMethod(work), generators, fixed
        self._plain_runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor | None]
        self._result: T

    def __call__(self, *inputs: Tensor | None) -> T:
        """Run on these inputs; None stays None."""
        if self._graph is None:
            if self._plain_runs < PLAIN_RUNS:
                self._plain_runs += 1
                return self._on_side_stream(*inputs)
            self._record(*inputs)
            assert self._graph is not None
        for place, value in zip(self._inputs, inputs, strict=True):
            if place is not None and value is not None:
                place.copy_(value)
        self._graph.replay()
        return self._result

    def _record(self, *inputs: Tensor | None) -> None:
        self._inputs = [None if value is None else value.clone() for value in inputs]
        self._graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            self._graph.register_generator_state(generator)
        try:
            with _nothing_collected(), torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._result = self._work(*self._inputs)
        except RuntimeError as error:
            self._graph = None
            for generator in (torch.cuda.default_generators[torch.cuda.current_device()], *self._generators):
                _end_recording(generator)
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise TrainingError(
                "a step could not be recorded as a CUDA graph; perhaps its network or objective looks at values "
                "(.item(), boolean indexing). Train it with engine.record_steps=false. "
                f"CUDA says: {str(error).partition(chr(10))[0]}"
            ) from error

    def _work(self, *inputs: Tensor | None) -> T:
        method = self._method()
        assert method is not None
        return method(*inputs, **self._fixed)

    def _on_side_stream(self, *inputs: Tensor | None) -> T:
        """Run on another stream, as recording requires for the runs before it."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            result = self._work(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        return result


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """No garbage collection: freeing something on the device, such as another graph, would break a recording."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _end_recording(generator: torch.Generator) -> None:
    """Reset a generator after a failed recording: it still waits for the end, and the next draw would fail."""
    fresh = torch.Generator(generator.device)
    fresh.manual_seed(generator.initial_seed())
    generator.graphsafe_set_state(fresh)
