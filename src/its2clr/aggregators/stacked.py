"""Aggregators of several seeds run as one: their parameters are stacked, and `torch.func.vmap` runs over the seeds.

A step of an aggregator is many tiny kernels (65 of DS-MIL). On a GPU, launching them takes far longer than running
them, so a step is recorded as a CUDA graph, which launches them all at once. A graph needs fixed shapes, so bags are
padded to one of a few lengths; a padded bag gives the same answer (the contract of `Aggregator`). Each shape is
recorded when it first occurs.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from its2clr.aggregators.base import Aggregator, BagOutput, create_aggregator
from its2clr.bag_features import BagFeatures
from its2clr.engine.graphs import Recorded
from its2clr.seeds import derive_seed

# Limits of one forward pass without gradients: number of feature values gathered, and that number times seeds.
BATCH_VALUES = 2**22
PASS_VALUES = 2**26


class StackedOutput(NamedTuple):
    """What S aggregators say about all bags: bag_logit (S, n_bags); per instance (S, N); loss (S,)."""

    bag_logit: Tensor
    instance_logits: Tensor
    attention: Tensor | None
    loss: Tensor | None


def build(name: str, options: Mapping[str, Any], feature_dim: int, seed: int = 0) -> Aggregator:
    """Create an aggregator on the CPU, initialised from its own seed; the global random state does not change."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would reseed the accelerators too.
        torch.default_generator.manual_seed(derive_seed(seed, "aggregator"))
        return create_aggregator(name, feature_dim, **options)


def stack(modules: Sequence[Aggregator], device: torch.device) -> tuple[dict[str, Tensor], list[str]]:
    """Stack the states of modules of one kind along a new first dimension.

    Returns:
        The stacked state on the device, and which of its names are parameters (the rest are buffers).
    """
    parameters, buffers = stack_module_state(list(modules))
    state = {name: tensor.detach().to(device) for name, tensor in {**parameters, **buffers}.items()}
    return state, list(parameters)


def stacked_loss(
    template: Aggregator, state: Mapping[str, Tensor], features: Tensor, mask: Tensor, labels: Tensor
) -> Tensor:
    """Losses (S,) of S aggregators, each on its own bags.

    Args:
        template: an aggregator of this kind; its own parameters are not used.
        state: its parameters and buffers, stacked (S, ...).
        features: (S, B, K, D).
        mask: (S, B, K).
        labels: (S, B).
    """

    def single(state: dict[str, Tensor], features: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        more = (labels,) if template.takes_labels else ()
        output: BagOutput = functional_call(template, state, (features, mask, *more))
        return template.loss(output, labels)

    if len(features) == 1:  # one seed needs no stacking and is faster without it
        alone = {name: tensor.squeeze(0) for name, tensor in state.items()}  # a view, forward and backward
        return single(alone, features[0], mask[0], labels[0])[None]
    if not template.stackable:
        seeds = zip(unstack(state), features, mask, labels, strict=True)
        return torch.stack([single(*one) for one in seeds])
    losses: Tensor = vmap(single, randomness="different")(dict(state), features, mask, labels)
    return losses


def unstack(state: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The states of the seeds one after the other, as views of the stacked one."""
    for seed in range(len(next(iter(state.values())))):
        yield {name: tensor[seed] for name, tensor in state.items()}


class BagPass(NamedTuple):
    """Some bags that go through the aggregators together: indices (B,), rows and mask (B, K), labels (B,) or None."""

    indices: Tensor
    rows: Tensor
    mask: Tensor
    labels: Tensor | None


def bag_passes(bags: BagFeatures, bags_per_batch: int = 64) -> list[BagPass]:
    """All bags, in passes of similar size that fit into memory."""
    passes = []
    for indices in bags.batches(bags_per_batch, BATCH_VALUES // bags.feature_dim):
        on_device = indices.to(bags.device)
        rows, mask = bags.rows(on_device, int(bags.sizes[indices].max()))
        passes.append(BagPass(on_device, rows, mask, None if bags.labels is None else bags.labels[on_device]))
    return passes


@torch.no_grad()
def bag_outputs(
    template: Aggregator,
    state: Mapping[str, Tensor],
    bags: BagFeatures,
    part: BagPass,
    *,
    instances: bool = True,
) -> tuple[Tensor, ...]:
    """What S aggregators say about the bags of a pass.

    Args:
        template: an aggregator of this kind.
        state: its parameters and buffers, stacked.
        bags: the bags.
        part: which of them.
        instances: whether instance logits are needed; if not, they may be zeros.

    Returns:
        Loss (S,), zero without labels; bag logits (S, B); instance logits (S, B, K); attention (S, B, K) if there is
        one.
    """
    features = bags.at(part.rows)  # (B, K, D)

    def single(state: dict[str, Tensor]) -> tuple[Tensor, ...]:
        more = (part.labels,) if template.takes_labels and not instances else ()
        output: BagOutput = functional_call(template, state, (features, part.mask, *more))
        loss = output.bag_logit.new_zeros(()) if part.labels is None else template.loss(output, part.labels)
        # vmap returns tensors only, so an attention that is None is left out
        return (loss, *(tensor for tensor in output[:3] if tensor is not None))

    if not template.stackable:
        # Copies, because the last bits of a result depend on where in memory a view begins.
        alone = ({name: tensor.clone() for name, tensor in one.items()} for one in unstack(state))
        return tuple(torch.stack(parts) for parts in zip(*map(single, alone), strict=True))
    seeds = len(next(iter(state.values())))
    seeds_per_pass = max(1, PASS_VALUES // features.numel())
    found = [
        vmap(single)({name: tensor[start : start + seeds_per_pass] for name, tensor in state.items()})
        for start in range(0, seeds, seeds_per_pass)
    ]
    return found[0] if len(found) == 1 else tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def evaluate(
    template: Aggregator, state: Mapping[str, Tensor], bags: BagFeatures, bags_per_batch: int = 64
) -> StackedOutput:
    """Outputs of S aggregators, without dropout, for all bags; with the loss if the bags have labels."""
    template.eval()
    seeds = len(next(iter(state.values())))
    bag_logit = bags.features.new_empty(seeds, len(bags))
    instance_logits = bags.features.new_empty(seeds, len(bags.features))
    attention: Tensor | None = None
    loss = None if bags.labels is None else bags.features.new_zeros(seeds)
    for part in bag_passes(bags, bags_per_batch):
        outputs = bag_outputs(template, state, bags, part)
        flat_rows = part.rows[part.mask]
        bag_logit[:, part.indices] = outputs[1]
        instance_logits[:, flat_rows] = outputs[2][:, part.mask]
        if loss is not None:
            loss += outputs[0] * (len(part.indices) / len(bags))
        if len(outputs) == 4:
            attention = torch.empty_like(instance_logits) if attention is None else attention
            attention[:, flat_rows] = outputs[3][:, part.mask]
    return StackedOutput(bag_logit, instance_logits, attention, loss)


SHORTEST = 16
"""Bags are not padded to less than this."""


class TrainingStep:
    """Forward pass, backward pass and optimiser step for some bags of each seed.

    Args:
        template: An aggregator of this kind.
        state: Stacked parameters and buffers.
        optimiser: Optimiser of the parameters; must be capturable on a GPU.
        bags: Labelled training bags.
    """

    def __init__(
        self, template: Aggregator, state: Mapping[str, Tensor], optimiser: torch.optim.Optimizer, bags: BagFeatures
    ) -> None:
        self._template, self._state, self._optimiser, self._bags = template, state, optimiser, bags
        self._records = bags.device.type == "cuda" and template.stackable
        self._recorded: dict[tuple[int, ...], Recorded[Tensor]] = {}
        self._ones = torch.ones(len(next(iter(state.values()))), device=bags.device)

    def __call__(self, chosen: Tensor, length: int) -> Tensor:
        """Train on bags (S, B) of at most `length` instances; returns the losses (S,), valid until the next step."""
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
        losses.backward(self._ones)  # type: ignore[no-untyped-call]
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
        template: An aggregator of this kind.
        state: Stacked parameters and buffers; every pass uses their current values.
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
