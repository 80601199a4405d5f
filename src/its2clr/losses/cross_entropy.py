"""Binary cross-entropy of single instances (section 4.3): what ItS2CLR is compared with."""

import torch.nn.functional as F
from torch import Tensor


def cross_entropy_loss(logits: Tensor, labels: Tensor | None, anchors: Tensor | None) -> Tensor:  # noqa: ARG001
    """Mean over all views; processes hold equal shares of a batch, so the mean of their means is the batch's.

    Args:
        logits: (2B, 1) of both views.
        labels: (2B,) 0 or 1.
        anchors: Not looked at: every row counts.
    """
    assert labels is not None
    return F.binary_cross_entropy_with_logits(logits.squeeze(1), labels.float())
