"""GPU work recorded once as a CUDA graph and replayed, so that launching its many small kernels costs nothing."""

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
"""Runs done one kernel at a time before one is recorded: libraries and optimisers set themselves up in them."""


class Recorded(Generic[T]):
    """Work on tensors of fixed shapes: a few plain runs, then a recording, from then on replays of it.

    What the work uses besides its inputs must stay where it is. What it returns is valid until the next run.

    Args:
        work: A method of the object this is kept in; takes the inputs; must neither wait for the device nor look at
            values. It is held weakly: the object and its recordings go when the last user of the object goes, not
            when Python next looks for cycles.
        generators: Random generators it draws from besides the global one.
        fixed: Further arguments, the same in every run.
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
                "a step could not be recorded as a CUDA graph, because its network or objective looks at values on the "
                "way (.item(), boolean indexing)? Train it with engine.record_steps=false. "
                f"CUDA says: {str(error).partition(chr(10))[0]}"
            ) from error

    def _work(self, *inputs: Tensor | None) -> T:
        method = self._method()
        assert method is not None
        return method(*inputs, **self._fixed)

    def _on_side_stream(self, *inputs: Tensor | None) -> T:
        """Run on another stream, as recording wants the runs before it to be."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            result = self._work(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        return result


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """No search for cyclic garbage: what it frees on the device (other graphs, say) would spoil a recording."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _end_recording(generator: torch.Generator) -> None:
    """A recording that failed leaves its generators waiting for its end; whoever draws next would fail."""
    fresh = torch.Generator(generator.device)
    fresh.manual_seed(generator.initial_seed())
    generator.graphsafe_set_state(fresh)
