"""Instance attention: the bag's probability is an attention-weighted mean of its instances' probabilities."""

from torch import Tensor, nn

from its2clr.aggregators.attention import AttentionScores
from its2clr.aggregators.base import Aggregator, BagOutput, register
from its2clr.aggregators.options import Dropout, HiddenDim
from its2clr.aggregators.probability import logit_of_mean_probability


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
