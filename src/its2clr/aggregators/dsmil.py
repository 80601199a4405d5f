"""DS-MIL: a max-pooling stream finds the critical instance; a second stream attends to instances that resemble it."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from its2clr.aggregators.base import Aggregator, BagOutput, Dropout, cross_entropies, register

QUERY_DIM = 128

LossWeight = Annotated[float, Field(ge=0.0, description="weight of the max stream's loss")]
Prediction = Annotated[Literal["mean", "embedding"], Field(description="stream that predicts a bag; mean: both")]


@register("dsmil")
class DSMIL(Aggregator):
    r"""Dual-stream MIL (Li et al. 2021), the aggregator the paper uses.

    With instance logits $z_k = u^\top h_k + c$, critical instance $m = \arg\max_k z_k$, queries
    $q_k = Q(h_k)$ of 128 values and values $v_k = v(h_k)$:

    $$a_k = \mathrm{softmax}_k\big(q_k^\top q_m / \sqrt{128}\big), \qquad
      z^\mathrm{emb} = w^\top \sum_k a_k v_k + b$$

    $$\ell = \frac{\mathrm{BCE}(z^\mathrm{emb}) + \lambda\, \mathrm{BCE}(z_m)}{1 + \lambda}$$

    The bag logit is the mean $(z_m + z^\mathrm{emb}) / 2$, as in the paper of DS-MIL, or $z^\mathrm{emb}$ alone, as in
    the released code of ItS2CLR. The loss is the same for both.

    Args:
        feature_dim: number D of features of an instance.
        prediction: the bag logit: "mean" of both streams, or "embedding".
        nonlinear: make queries by Linear-ReLU-Linear-Tanh, as in the code of DS-MIL; False: by one linear map.
        passing_value: make values by Dropout-Linear-ReLU; False: the values are the features.
        value_dropout: the dropout of `passing_value`.
        dropout: dropout on the features in training.
        loss_weight: weight lambda of the max stream's loss; the paper searches [0.1, 5].
    """

    def __init__(
        self,
        feature_dim: int,
        *,
        prediction: Prediction = "mean",
        nonlinear: bool = True,
        passing_value: bool = False,
        value_dropout: Dropout = 0.0,
        dropout: Dropout = 0.0,
        loss_weight: LossWeight = 1.0,
    ) -> None:
        super().__init__(feature_dim)
        self.prediction = prediction
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
        hidden = mask.log().to(features.dtype)  # 0, and -inf on padding
        instance_logits = self.instance_classifier(features).squeeze(-1) + hidden  # (B, K)
        critical = instance_logits.argmax(dim=-1, keepdim=True)  # (B, 1)

        queries = self.query(features)  # (B, K, 128)
        critical_query = queries.gather(1, critical[..., None].expand(-1, 1, QUERY_DIM))  # (B, 1, 128)
        scores = (critical_query * QUERY_DIM**-0.5) @ queries.transpose(1, 2)  # (B, 1, K)
        attention = (scores.squeeze(1) + hidden).softmax(dim=-1)

        embedding = (attention.unsqueeze(1) @ self.value(features)).squeeze(1)  # (B, D)
        streams = torch.cat([self.bag_classifier(embedding), instance_logits.gather(1, critical)], dim=-1)  # (B, 2)
        bag_logit = streams.mean(dim=-1) if self.prediction == "mean" else streams[:, 0]
        return BagOutput(bag_logit, instance_logits, attention, streams=streams)

    def loss(self, output: BagOutput, labels: Tensor) -> Tensor:
        """Weighted mean of the two streams' binary cross-entropies; see `Aggregator.loss`."""
        assert output.streams is not None
        labels = labels.to(output.streams.dtype)
        embedding, largest = cross_entropies(output.streams, labels[:, None]).unbind(-1)
        return self.mean_over_bags(embedding.lerp(largest, self.loss_weight / (1 + self.loss_weight)), labels)
