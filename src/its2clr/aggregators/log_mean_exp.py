"""The plain reader: a linear score per instance, the mean of their odds per bag, strength of the penalty chosen.

Beyond the paper (docs/beyond.md). Attention overfits a few hundred bags; a penalised linear score does not, and it is
trained on all bags at once, for all strengths of the penalty and all folds together, in seconds.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from its2clr.aggregators.base import Aggregator, BagOutput, register
from its2clr.aggregators.folds import training_bags
from its2clr.aggregators.pooling import Sharpness
from its2clr.aggregators.trained import EpochRecord, TrainedAggregators, bag_aucs, balanced_weights
from its2clr.bag_features import BagFeatures
from its2clr.config import AggregatorTraining

PENALTIES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Strengths that are tried; features are standardised, so that they mean the same for every encoder."""
LOOK_EVERY = 25
"""Epochs between two looks at the validation bags; each waits for the device."""
Penalty = Annotated[
    float | None, Field(ge=0.0, description="strength of the L2 penalty; null: the best of six on the validation bags")
]


@register("log_mean_exp")
class LogMeanExp(Aggregator):
    r"""Instance-level pooling by the mean of the odds; not in the paper.

    $$z_k = u^\top \frac{h_k - m}{s} + c, \qquad
      z^\mathrm{bag} = \frac{1}{\beta} \log \frac{1}{K_b} \sum_k \exp(\beta z_k)$$

    $m$ and $s$ are mean and deviation of the training instances. It is `smooth_max` without its preference for large
    bags, and `train_log_mean_exp` trains it.

    Args:
        feature_dim: number D of features of an instance.
        sharpness: $\beta$.
        penalty: strength of the L2 penalty on $u$.
    """

    centre: Tensor
    scale: Tensor

    def __init__(self, feature_dim: int, *, sharpness: Sharpness = 1.0, penalty: Penalty = None) -> None:
        super().__init__(feature_dim)
        self.sharpness, self.penalty = sharpness, penalty
        self.register_buffer("centre", torch.zeros(feature_dim))
        self.register_buffer("scale", torch.ones(feature_dim))
        self.instance_classifier = nn.Linear(feature_dim, 1)

    def aggregate(self, features: Tensor, mask: Tensor) -> BagOutput:
        """See `Aggregator.aggregate`."""
        instance_logits = self.instance_classifier((features - self.centre) / self.scale).squeeze(-1)  # (B, K)
        pooled = torch.logsumexp(self.sharpness * instance_logits.masked_fill(~mask, -torch.inf), dim=1)
        count = mask.sum(dim=1).to(pooled.dtype)
        return BagOutput((pooled - count.log()) / self.sharpness, instance_logits, None)


def train_log_mean_exp(
    config: AggregatorTraining,
    template: LogMeanExp,
    train: BagFeatures,
    validation: BagFeatures,
    seeds: Sequence[int],
    progress: Callable[[EpochRecord], None] | None = None,
) -> TrainedAggregators:
    """Train one `LogMeanExp` per seed: every epoch is one step of Adam on all bags, from zero, along a cosine.

    Both classes weigh the same. There is nothing random in it, so seeds differ only by the fold they leave out
    (`config.folds`). The penalty is the one with the lowest validation loss, mean over the seeds. `template` has the
    options; see `train_aggregators` for the other arguments.
    """
    penalties = PENALTIES if template.penalty is None else (template.penalty,)
    use = training_bags(train, seeds, folds=config.folds).repeat_interleave(len(penalties), 0)  # (M, B)
    learning = _Part(train, use, template.sharpness)
    validating = _Part(validation, torch.ones(1, len(validation), dtype=torch.bool), template.sharpness)
    penalty = torch.tensor(penalties, device=train.device).repeat(len(seeds))  # (M,)
    heads = _Heads(train.features, len(penalty))
    # At the start the gradient of the offset is zero but for rounding, which a smaller eps would make a whole step.
    optimiser = torch.optim.Adam([heads.slope, heads.offset], lr=config.learning_rate, betas=(0.9, 0.99), eps=1e-6)
    validation_labels = validating.labels[:, 0].cpu().numpy().astype(np.int64)
    history: list[EpochRecord] = []
    for epoch in range(1, config.epochs + 1):
        rate = config.learning_rate * 0.5 * (1 + math.cos(math.pi * (epoch - 1) / config.epochs))
        for group in optimiser.param_groups:
            group["lr"] = rate
        bag_logits, shares = learning.pool(heads(train.features))
        heads.take_gradient(train.features, shares * learning.of_instances(learning.slopes(bag_logits)), penalty)
        optimiser.step()
        if epoch % LOOK_EVERY and epoch != config.epochs:
            continue
        on_validation, _ = validating.pool(heads(validation.features))
        record = EpochRecord(
            epoch=epoch,
            learning_rate=rate,
            train_loss=learning.losses(bag_logits).tolist(),
            validation_loss=validating.losses(on_validation).tolist(),
            validation_auc=bag_aucs(validation_labels, on_validation.T.cpu().numpy()).tolist(),
        )
        history.append(record)
        if progress is not None:
            progress(record)
    losses = np.array(history[-1]["validation_loss"]).reshape(len(seeds), -1)
    chosen = np.arange(len(seeds)) * len(penalties) + losses.mean(0).argmin()
    history = [_only(record, chosen) for record in history]
    return TrainedAggregators(
        name=config.name,
        options=dict(config.options),
        feature_dim=train.feature_dim,
        seeds=tuple(seeds),
        validation_auc=np.array(history[-1]["validation_auc"]),
        best_epoch=np.full(len(seeds), config.epochs, dtype=np.int64),
        history=history,
        state=heads.state(torch.from_numpy(chosen)),
    )


class _Heads:
    """M linear scores of standardised features, from zero; standardising is part of their weights, not of a copy."""

    def __init__(self, features: Tensor, count: int) -> None:
        self.centre = features.mean(0)
        self.scale = features.std(0, correction=0).clamp(min=1e-6)
        self.slope = torch.zeros(features.shape[1], count, device=features.device, requires_grad=True)
        self.offset = torch.zeros(count, device=features.device, requires_grad=True)

    @torch.no_grad()
    def __call__(self, features: Tensor) -> Tensor:
        """Logits (N, M)."""
        direction = self.slope / self.scale[:, None]
        return features @ direction + (self.offset - self.centre @ direction)

    @torch.no_grad()
    def take_gradient(self, features: Tensor, on_logits: Tensor, penalty: Tensor) -> None:
        """Set the gradients of a loss with these derivatives by the logits (N, M), and of the penalties (M,)."""
        total = on_logits.sum(0)
        along = (features.T @ on_logits - torch.outer(self.centre, total)) / self.scale[:, None]
        self.slope.grad, self.offset.grad = along + 2 * penalty * self.slope, total

    def state(self, columns: Tensor) -> dict[str, Tensor]:
        """The stacked state of the modules of some columns."""
        chosen = columns.to(self.slope.device)
        return {
            "centre": self.centre.expand(len(columns), -1).clone(),
            "scale": self.scale.expand(len(columns), -1).clone(),
            "instance_classifier.weight": self.slope.detach().T[chosen][:, None].contiguous(),
            "instance_classifier.bias": self.offset.detach()[chosen][:, None].contiguous(),
        }


class _Part:
    """Labelled bags: log-mean-exp over their instances, and the loss in which both classes weigh the same.

    Bags are segments of rows, so the reductions over them need no atomic additions and give the same bits every time.
    """

    def __init__(self, bags: BagFeatures, use: Tensor, sharpness: float) -> None:
        assert bags.labels is not None
        self._sharpness = sharpness
        self._sizes = torch.from_numpy(bags.sizes).to(bags.device)
        self._bag = torch.repeat_interleave(torch.arange(len(bags), device=bags.device), self._sizes)
        self.labels = bags.labels[:, None]
        self._weights = balanced_weights(bags.labels, use.to(bags.device)).T  # (B, M)

    def pool(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Bag logits (B, M) of instance logits (N, M), and each instance's share (N, M) in the odds of its bag."""
        scaled = self._sharpness * logits
        highest = torch.segment_reduce(scaled, "max", lengths=self._sizes, axis=0)
        exponentials = (scaled - self.of_instances(highest)).exp()
        total = torch.segment_reduce(exponentials, "sum", lengths=self._sizes, axis=0)
        mean = total / self._sizes[:, None]
        return (highest + mean.log()) / self._sharpness, exponentials / self.of_instances(total)

    def of_instances(self, values: Tensor) -> Tensor:
        """Values of bags (B, M), repeated for each of their instances (N, M)."""
        return values[self._bag]

    def losses(self, bag_logits: Tensor) -> Tensor:
        """(M,) balanced log loss."""
        each = F.binary_cross_entropy_with_logits(bag_logits, self.labels.expand_as(bag_logits), reduction="none")
        return (self._weights * each).sum(0)

    def slopes(self, bag_logits: Tensor) -> Tensor:
        """(B, M) derivatives of the losses by the bag logits."""
        return self._weights * (bag_logits.sigmoid() - self.labels)


def _only(record: EpochRecord, columns: NDArray[np.int64]) -> EpochRecord:
    """The record of some columns."""
    return EpochRecord(
        epoch=record["epoch"],
        learning_rate=record["learning_rate"],
        train_loss=[record["train_loss"][column] for column in columns],
        validation_loss=[record["validation_loss"][column] for column in columns],
        validation_auc=[record["validation_auc"][column] for column in columns],
    )
