"""Steps and validation of the stacked aggregators; on a GPU recorded once and replayed, so launching costs nothing.

A step of an aggregator is some hundred tiny kernels: launching them takes far longer than running them. A CUDA graph
launches them all at once. It needs fixed shapes, so bags are padded to one of a few lengths: a padded bag gives the
same answer (the contract of `Aggregator`), and each shape is recorded when it first comes.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from its2clr.aggregators.base import Aggregator
from its2clr.aggregators.data import BagFeatures
from its2clr.aggregators.stacked import bag_outputs, bag_passes, stacked_loss
from its2clr.engine.graphs import Recorded

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
        self._records = bags.device.type == "cuda" and template.stackable
        self._recorded: dict[tuple[int, ...], Recorded[Tensor]] = {}

    def __call__(self, chosen: Tensor, length: int) -> Tensor:
        """Train on bags (S, B), of at most `length` instances; gives the losses (S,), valid until the next step."""
        if not self._records:
            return self._step(chosen, length=length)
        length = padded_length(length)
        shape = (*chosen.shape, length)
        if shape not in self._recorded:
            self._recorded[shape] = Recorded(self._step, length=length)
        return self._recorded[shape](chosen)

    def _step(self, chosen: Tensor, *, length: int) -> Tensor:
        assert self._bags.labels is not None
        self._template.train()
        features, mask = self._bags.batch(chosen, length)
        losses = stacked_loss(self._template, self._state, features, mask, self._bags.labels[chosen])
        self._optimiser.zero_grad(set_to_none=True)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        self._optimiser.step()
        return losses.detach()


def padded_length(length: int) -> int:
    """The next of 16, 24, 32, 48, 64, ...: two lengths per power of two, so at most a third is padding."""
    power = max(SHORTEST, 1 << (length - 1).bit_length())
    shorter = 3 * power // 4
    return shorter if SHORTEST <= length <= shorter else power


class ValidationPass:
    """Bag logits and loss of all validation bags, without dropout.

    Args:
        template: Aggregator of the kind.
        state: Stacked parameters and buffers; looked at anew in every pass.
        bags: Labelled validation bags.
    """

    def __init__(self, template: Aggregator, state: Mapping[str, Tensor], bags: BagFeatures) -> None:
        self._template, self._state, self._bags = template, state, bags
        self._passes = bag_passes(bags)
        records = bags.device.type == "cuda" and template.stackable
        self._run = Recorded(self._validate) if records else self._validate

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Bag logits (S, bags) and losses (S,), valid until the next pass."""
        return self._run()

    def _validate(self) -> tuple[Tensor, Tensor]:
        self._template.eval()
        found = [bag_outputs(self._template, self._state, self._bags, part, instances=False) for part in self._passes]
        logits = found[0][1].new_empty(len(found[0][1]), len(self._bags))
        loss = torch.zeros_like(found[0][0])
        for part, outputs in zip(self._passes, found, strict=True):
            logits[:, part.indices] = outputs[1]
            loss += outputs[0] * (len(part.indices) / len(self._bags))
        return logits, loss
