"""Binary cross-entropy of single instances (section 4.3): the baseline that ItS2CLR is compared with."""

import torch.nn.functional as F
from torch import Tensor


def cross_entropy_loss(logits: Tensor, labels: Tensor | None, anchors: Tensor | None) -> Tensor:  # noqa: ARG001
    """Mean over all views. Processes hold equal shares of a batch, so the mean of their means is the batch's mean.

    Args:
        logits: (2B, 1) logits of both views.
        labels: (2B,) 0 or 1.
        anchors: Ignored: every row counts.
    """
    assert labels is not None
    return F.binary_cross_entropy_with_logits(logits.squeeze(1), labels.float())
