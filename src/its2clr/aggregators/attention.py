"""Attention-based MIL: a bag is the weighted mean of its instances' features, or of their probabilities."""

import itertools
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from its2clr.aggregators.base import Aggregator, BagOutput, Dropout, logit_of_mean_probability, register

HiddenDim = Annotated[int | None, Field(ge=1, description="width of the attention; None: the feature dimension")]
Widths = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...], Field(description="widths of layers before the attention; empty: none")
]


class AttentionScores(nn.Module):
    r"""Unnormalised attention of Ilse et al. 2018.

    $$s_k = w^\top \tanh(V h_k), \qquad \text{gated: } s_k = w^\top (\tanh(V h_k) \odot \sigma(U h_k))$$

    V and U have biases, as in the authors' code; a bias of w would cancel in the softmax.

    Args:
        feature_dim: number D of features of an instance.
        hidden_dim: width l of the hidden layer.
        gated: multiply by the sigmoid gate.
    """

    def __init__(self, feature_dim: int, hidden_dim: int, *, gated: bool = False) -> None:
        super().__init__()
        self.hidden = nn.Linear(feature_dim, hidden_dim)
        self.gate = nn.Linear(feature_dim, hidden_dim) if gated else None
        self.score = nn.Linear(hidden_dim, 1, bias=False)

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        """Scores (B, K) of features (B, K, D); -inf where the mask (B, K) is False."""
        hidden = torch.tanh(self.hidden(features))  # (B, K, l)
        if self.gate is not None:
            hidden = hidden * torch.sigmoid(self.gate(features))
        scores: Tensor = self.score(hidden).squeeze(-1)
        return scores.masked_fill(~mask, -torch.inf)


@register("attention")
class AttentionMIL(Aggregator):
    r"""Embedding-level aggregation with learned attention (Ilse et al. 2018).

    $$g_\varphi(H) = \varphi\Big(\sum_k a_k h_k\Big), \qquad
      a_k = \frac{\exp(w^\top \tanh(V h_k))}{\sum_j \exp(w^\top \tanh(V h_j))}$$

    with a logistic bag classifier $\varphi$; the logit of instance k is that of $\varphi$ on $h_k$ alone.

    Args:
        feature_dim: number D of features of an instance.
        hidden_dim: width l of the attention; None: D, as in the paper.
        gated: use the gated attention of Ilse et al.
        dropout: dropout on the features in training, and after each layer of the embedding.
        embedding: widths of ReLU layers that every instance passes first; for ready-made features, Ilse et al. use
            (256, 128, 64); empty: no layers.
    """

    def __init__(
        self,
        feature_dim: int,
        *,
        hidden_dim: HiddenDim = None,
        gated: bool = False,
        dropout: Dropout = 0.0,
        embedding: Widths = (),
    ) -> None:
        super().__init__(feature_dim)
        widths = (feature_dim, *embedding)
        layers: list[nn.Module] = [nn.Dropout(dropout)]
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
        self.embedding = nn.Sequential(*layers)
        self.scores = AttentionScores(widths[-1], hidden_dim or widths[-1], gated=gated)
        self.bag_classifier = nn.Linear(widths[-1], 1)

    def aggregate(self, features: Tensor, mask: Tensor) -> BagOutput:
        """See `Aggregator.aggregate`."""
        features = self.embedding(features)
        attention = self.scores(features, mask).softmax(dim=-1)  # (B, K)
        embedding = (attention.unsqueeze(1) @ features).squeeze(1)  # (B, D)
        return BagOutput(
            bag_logit=self.bag_classifier(embedding).squeeze(-1),
            instance_logits=self.bag_classifier(features).squeeze(-1),
            attention=attention,
        )


@register("instance_attention")
class InstanceAttentionMIL(Aggregator):
    r"""The aggregator of the paper's breast ultrasound experiments (appendix "Implementation Details").

    $$\hat y = \sum_k a_k \hat y_k, \qquad \hat y_k = \sigma(u^\top h_k + c), \qquad
      a = \mathrm{softmax}_k\big(w^\top \tanh(V h_k)\big)$$

    Args:
        feature_dim: number D of features of an instance.
        hidden_dim: width of the attention; None: D.
        gated: use the gated attention of Ilse et al.
        dropout: dropout on the features in training.
    """

    def __init__(
        self, feature_dim: int, *, hidden_dim: HiddenDim = None, gated: bool = False, dropout: Dropout = 0.0
    ) -> None:
        super().__init__(feature_dim)
        self.dropout = nn.Dropout(dropout)
        self.scores = AttentionScores(feature_dim, hidden_dim or feature_dim, gated=gated)
        self.instance_classifier = nn.Linear(feature_dim, 1)

    def aggregate(self, features: Tensor, mask: Tensor) -> BagOutput:
        """See `Aggregator.aggregate`."""
        features = self.dropout(features)
        log_attention = self.scores(features, mask).log_softmax(dim=-1)  # (B, K)
        instance_logits = self.instance_classifier(features).squeeze(-1)  # (B, K)
        bag_logit = logit_of_mean_probability(instance_logits, log_attention)
        return BagOutput(bag_logit, instance_logits, log_attention.exp())
