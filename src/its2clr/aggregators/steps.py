"""One optimiser step of the stacked aggregators; on a GPU recorded once and replayed, so that launching costs nothing.

A step of an aggregator is some hundred tiny kernels: launching them takes far longer than running them. A CUDA graph
launches them all at once. It needs fixed shapes, so bags are padded to the next power of two: a padded bag gives the
same answer (the contract of `Aggregator`), and there are only a few shapes, each recorded when it first comes.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from its2clr.aggregators.base import Aggregator
from its2clr.aggregators.data import BagFeatures
from its2clr.aggregators.stacked import stacked_loss

EAGER_STEPS = 3
"""Steps of a shape that are done one kernel at a time before it is recorded: libraries set themselves up in them."""
SHORTEST = 16
"""Bags are not padded to less than this."""


class TrainingStep:
    """Forward, backward and optimiser step for some bags of each seed.

    Args:
        template: Aggregator of the kind.
        state: Stacked parameters and buffers.
        optimiser: Of the parameters; must be capturable on a GPU.
        bags: Labelled training bags.
    """

    def __init__(
        self, template: Aggregator, state: Mapping[str, Tensor], optimiser: torch.optim.Optimizer, bags: BagFeatures
    ) -> None:
        self._template, self._state, self._optimiser, self._bags = template, state, optimiser, bags
        self._recorded = bags.device.type == "cuda"
        self._graphs: dict[tuple[int, int, int], _Graph] = {}
        self._seen: dict[tuple[int, int, int], int] = {}

    def __call__(self, chosen: Tensor, length: int) -> Tensor:
        """Train on bags (S, B), of at most `length` instances; gives the losses (S,), valid until the next step."""
        if not self._recorded:
            return self._step(chosen, length)
        length = max(SHORTEST, 1 << (length - 1).bit_length())
        shape = (*chosen.shape, length)
        if shape in self._graphs:
            return self._graphs[shape].replay(chosen)
        count = self._seen[shape] = self._seen.get(shape, 0) + 1
        if count <= EAGER_STEPS:
            return _on_side_stream(lambda: self._step(chosen, length))
        self._graphs[shape] = _Graph(chosen, lambda static: self._step(static, length))
        return self._graphs[shape].replay(chosen)

    def _step(self, chosen: Tensor, length: int) -> Tensor:
        assert self._bags.labels is not None
        features, mask = self._bags.batch(chosen, length)
        losses = stacked_loss(self._template, self._state, features, mask, self._bags.labels[chosen])
        self._optimiser.zero_grad(set_to_none=True)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        self._optimiser.step()
        return losses.detach()


class _Graph:
    """A recorded step: writes its input into the recorded place, and replays."""

    def __init__(self, example: Tensor, step: Callable[[Tensor], Tensor]) -> None:
        self._input = example.clone()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = step(self._input)

    def replay(self, chosen: Tensor) -> Tensor:
        self._input.copy_(chosen)
        self._graph.replay()
        return self._output


def _on_side_stream(work: Callable[[], Tensor]) -> Tensor:
    """Work on another stream, as recording wants the steps before it to be."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        result = work()
    torch.cuda.current_stream().wait_stream(side)
    return result
