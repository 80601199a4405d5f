"""DS-MIL: a max-pooling stream finds the critical instance; a second stream attends to instances that resemble it."""

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from its2clr.aggregators.base import Aggregator, BagOutput, Dropout, register

QUERY_DIM = 128

LossWeight = Annotated[float, Field(ge=0.0, description="weight of the max stream's loss")]


@register("dsmil")
class DSMIL(Aggregator):
    r"""Dual-stream MIL (Li et al. 2021), the aggregator the paper uses.

    With instance logits $z_k = u^\top h_k + c$, critical instance $m = \arg\max_k z_k$, queries
    $q_k = Q(h_k)$ of 128 values and values $v_k = v(h_k)$:

    $$a_k = \mathrm{softmax}_k\big(q_k^\top q_m / \sqrt{128}\big), \qquad
      z^\mathrm{emb} = w^\top \sum_k a_k v_k + b, \qquad z^\mathrm{bag} = (z_m + z^\mathrm{emb}) / 2$$

    $$\ell = \frac{\mathrm{BCE}(z^\mathrm{emb}) + \lambda\, \mathrm{BCE}(z_m)}{1 + \lambda}$$

    Args:
        feature_dim: number D of features of an instance.
        nonlinear: make queries by Linear-ReLU-Linear-Tanh, as in the authors' code; False: by one linear map.
        passing_value: make values by Dropout-Linear-ReLU; False: the values are the features.
        value_dropout: the dropout of `passing_value`.
        dropout: dropout on the features in training.
        loss_weight: weight lambda of the max stream's loss; the paper searches [0.1, 5].
    """

    def __init__(
        self,
        feature_dim: int,
        *,
        nonlinear: bool = True,
        passing_value: bool = False,
        value_dropout: Dropout = 0.0,
        dropout: Dropout = 0.0,
        loss_weight: LossWeight = 1.0,
    ) -> None:
        super().__init__(feature_dim)
        self.loss_weight = loss_weight
        self.dropout = nn.Dropout(dropout)
        self.instance_classifier = nn.Linear(feature_dim, 1)
        self.query: nn.Module = nn.Linear(feature_dim, QUERY_DIM)
        if nonlinear:
            self.query = nn.Sequential(self.query, nn.ReLU(), nn.Linear(QUERY_DIM, QUERY_DIM), nn.Tanh())
        self.value: nn.Module = nn.Identity()
        if passing_value:
            self.value = nn.Sequential(nn.Dropout(value_dropout), nn.Linear(feature_dim, feature_dim), nn.ReLU())
        self.bag_classifier = nn.Linear(feature_dim, 1)

    def aggregate(self, features: Tensor, mask: Tensor) -> BagOutput:
        """See `Aggregator.aggregate`."""
        features = self.dropout(features)
        instance_logits = self.instance_classifier(features).squeeze(-1).masked_fill(~mask, -torch.inf)  # (B, K)
        critical = instance_logits.argmax(dim=-1)[:, None, None]  # (B, 1, 1)

        queries = self.query(features)  # (B, K, 128)
        critical_query = queries.gather(1, critical.expand(-1, 1, QUERY_DIM))  # (B, 1, 128)
        scores = (queries * critical_query).sum(dim=-1) / QUERY_DIM**0.5  # (B, K)
        attention = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)

        embedding = (attention.unsqueeze(1) @ self.value(features)).squeeze(1)  # (B, D)
        embedding_logit = self.bag_classifier(embedding).squeeze(-1)
        return BagOutput((embedding_logit + instance_logits.amax(dim=-1)) / 2, instance_logits, attention)

    def loss(self, output: BagOutput, labels: Tensor) -> Tensor:
        """Weighted mean of the two streams' binary cross-entropies; see `Aggregator.loss`."""
        max_logit = output.instance_logits.amax(dim=-1)
        embedding_logit = 2 * output.bag_logit - max_logit
        labels = labels.to(max_logit.dtype)
        embedding_loss = F.binary_cross_entropy_with_logits(embedding_logit, labels)
        max_loss = F.binary_cross_entropy_with_logits(max_logit, labels)
        return (embedding_loss + self.loss_weight * max_loss) / (1 + self.loss_weight)
