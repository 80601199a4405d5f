"""Pooling of instance scores: the maximum, the mean of the largest, and a smooth maximum."""

from fractions import Fraction
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from its2clr.aggregators.base import Aggregator, BagOutput, Dropout, logit_of_mean_probability, register

Ratio = Annotated[float, Field(gt=0.0, le=1.0, description="share of a bag's instances that is averaged")]
Sharpness = Annotated[
    float, Field(gt=0.0, description="1: the odds of instances add up; large: only the largest instance counts")
]


@register("max")
class MaxPooling(Aggregator):
    r"""Instance-level pooling by the maximum (appendix "MIL Aggregators").

    $$g_\phi(H) = \max_{k} \phi(h_k), \qquad \phi(h) = \sigma(u^\top h + c)$$

    The sigmoid is monotone, so the bag's logit is the largest instance logit.

    Args:
        feature_dim: number D of features of an instance.
    """

    def __init__(self, feature_dim: int) -> None:
        super().__init__(feature_dim)
        self.instance_classifier = nn.Linear(feature_dim, 1)

    def aggregate(self, features: Tensor, mask: Tensor) -> BagOutput:
        """See `Aggregator.aggregate`."""
        instance_logits = self.instance_classifier(features).squeeze(-1)  # (B, K)
        real_logits = instance_logits.masked_fill(~mask, -torch.inf)
        return BagOutput(real_logits.amax(dim=-1), instance_logits, None)


@register("top_k")
class TopKPooling(Aggregator):
    r"""Instance-level pooling by the mean of the M largest probabilities (Shen et al. 2021).

    $$g_\phi(H) = \frac{1}{M} \sum_{k \in \mathrm{top}M(\phi, H)} \phi(h_k), \qquad
      M = \max(1, \lceil \mathrm{ratio} \cdot K_b \rceil)$$

    with $\phi(h) = \sigma(u^\top h + c)$ and $K_b$ the bag's own number of instances.

    Args:
        feature_dim: number D of features of an instance.
        ratio: share of the instances that is averaged; the paper searches 0.1%, 1%, 3%, 10% and 20%.
    """

    def __init__(self, feature_dim: int, *, ratio: Ratio = 0.1) -> None:
        super().__init__(feature_dim)
        self.ratio = ratio
        # 0.1 * 30 must be 3 on every device; a ratio of integers has no rounding error that the ceiling would raise.
        self._fraction = Fraction(ratio).limit_denominator(1_000_000)
        self.instance_classifier = nn.Linear(feature_dim, 1)

    def aggregate(self, features: Tensor, mask: Tensor) -> BagOutput:
        """See `Aggregator.aggregate`."""
        instance_logits = self.instance_classifier(features).squeeze(-1)  # (B, K)
        largest = instance_logits.masked_fill(~mask, -torch.inf).topk(self._count(mask.shape[1]), dim=-1).values

        share, whole = self._fraction.numerator, self._fraction.denominator
        count = ((mask.sum(dim=-1) * share + whole - 1) // whole).clamp(min=1)  # (B,)
        chosen = torch.arange(largest.shape[-1], device=features.device) < count.unsqueeze(-1)  # (B, M of longest)
        log_weights = -count.to(largest.dtype).log().unsqueeze(-1).expand_as(largest)
        bag_logit = logit_of_mean_probability(
            largest.masked_fill(~chosen, 0.0), log_weights.masked_fill(~chosen, -torch.inf)
        )
        return BagOutput(bag_logit, instance_logits, None)

    def _count(self, instances: int) -> int:
        """M of a bag with that many instances."""
        return max(1, -(-instances * self._fraction.numerator // self._fraction.denominator))


@register("smooth_max")
class SmoothMax(Aggregator):
    r"""Instance-level pooling by log-sum-exp; not in the paper.

    $$z_k = u^\top h_k + c, \qquad z^\mathrm{bag} = \frac{1}{\beta} \log \sum_k \exp(\beta z_k)$$

    With $\beta = 1$ the odds of the bag are the sum of the odds of its instances, which fits rare, independent
    positives. Every instance gets a gradient in proportion to its share of the odds, so a threshold on instance scores
    makes sense. A maximum, in contrast, trains one instance per bag; attention and classifier may favour different
    instances.

    Args:
        feature_dim: number D of features of an instance.
        sharpness: $\beta$.
        dropout: dropout on the features in training.
    """

    def __init__(self, feature_dim: int, *, sharpness: Sharpness = 1.0, dropout: Dropout = 0.0) -> None:
        super().__init__(feature_dim)
        self.sharpness = sharpness
        self.dropout = nn.Dropout(dropout)
        self.instance_classifier = nn.Linear(feature_dim, 1)

    def aggregate(self, features: Tensor, mask: Tensor) -> BagOutput:
        """See `Aggregator.aggregate`."""
        instance_logits = self.instance_classifier(self.dropout(features)).squeeze(-1)  # (B, K)
        pooled = torch.logsumexp(self.sharpness * instance_logits.masked_fill(~mask, -torch.inf), dim=1)
        return BagOutput(pooled / self.sharpness, instance_logits, None)
