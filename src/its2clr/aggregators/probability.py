"""Logits of weighted means of probabilities, without leaving log space."""

import torch
import torch.nn.functional as F
from torch import Tensor


def logit_of_mean_probability(logits: Tensor, log_weights: Tensor) -> Tensor:
    r"""Logit of $p = \sum_k w_k \sigma(z_k)$ for weights that sum to one.

    Both $\log p$ and $\log(1 - p)$ are sums of positive terms in log space, so nothing cancels or saturates
    however large the logits are.

    Args:
        logits: (..., K) finite logits z.
        log_weights: (..., K) log w, -inf for what does not count.

    Returns:
        (...,) $\log p - \log(1 - p)$.
    """
    log_positive = torch.logsumexp(log_weights + F.logsigmoid(logits), dim=-1)
    log_negative = torch.logsumexp(log_weights + F.logsigmoid(-logits), dim=-1)
    return log_positive - log_negative
