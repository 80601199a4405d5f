"""Smooth maximum: the odds of a bag are the sum of its instances' odds."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from its2clr.aggregators.base import Aggregator, BagOutput, register
from its2clr.aggregators.options import Dropout

Sharpness = Annotated[float, Field(gt=0.0, description="1: odds add up; large: the largest instance alone counts")]


@register("smooth_max")
class SmoothMax(Aggregator):
    r"""Instance-level pooling by log-sum-exp; not in the paper.

    $$z_k = u^\top h_k + c, \qquad z^\mathrm{bag} = \frac{1}{\beta} \log \sum_k \exp(\beta z_k)$$

    With $\beta = 1$ the odds of the bag are the sum of the odds of its instances, which is what rare, independent
    positives amount to. Every instance gets a gradient in proportion to its share of the odds, where a maximum trains
    on one instance per bag and attention may put its weight elsewhere than its classifier: the instance scores are
    worth thresholding.

    Args:
        feature_dim: number D of features of an instance.
        sharpness: $\beta$.
        dropout: dropout on the features in training.
        instance_dropout: share of a bag's instances left out at random in each training step.
    """

    def __init__(
        self,
        feature_dim: int,
        *,
        sharpness: Sharpness = 1.0,
        dropout: Dropout = 0.0,
        instance_dropout: Dropout = 0.0,
    ) -> None:
        super().__init__(feature_dim)
        self.sharpness = sharpness
        self.dropout, self.instance_dropout = nn.Dropout(dropout), nn.Dropout(instance_dropout)
        self.instance_classifier = nn.Linear(feature_dim, 1)

    def aggregate(self, features: Tensor, mask: Tensor) -> BagOutput:
        """See `Aggregator.aggregate`."""
        instance_logits = self.instance_classifier(self.dropout(features)).squeeze(-1)  # (B, K)
        kept = (self.instance_dropout(torch.ones_like(instance_logits)) > 0) & mask
        kept = torch.where(kept.any(dim=1, keepdim=True), kept, mask)  # a bag is never emptied
        pooled = torch.logsumexp(self.sharpness * instance_logits.masked_fill(~kept, -torch.inf), dim=1)
        return BagOutput(pooled / self.sharpness, instance_logits, None)
