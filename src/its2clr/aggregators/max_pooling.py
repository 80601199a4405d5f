"""Max pooling: a bag is as positive as its most positive instance."""

from torch import Tensor, nn

from its2clr.aggregators.base import Aggregator, BagOutput, register


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
        real_logits = instance_logits.masked_fill(~mask, -float("inf"))
        return BagOutput(real_logits.amax(dim=-1), instance_logits, None)
