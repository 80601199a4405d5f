"""NT-Xent, the loss of SimCLR (equation 1 of the paper)."""

import torch
from lightly.utils import dist
from torch import Tensor

from its2clr.losses.supcon import gathered_supervised_contrastive_loss


def nt_xent_loss(embeddings: Tensor, temperature: float) -> Tensor:
    """Two views of a tile attract, all other tiles of all processes repel.

    This is the supervised contrastive loss with every tile as its own class: the same-set of a view is the other view.
    It equals lightly's `NTXentLoss`, which selects entries by a mask and so cannot be recorded as a CUDA graph.

    Args:
        embeddings: (2B, D) embeddings of both views, first views first.
        temperature: tau > 0.
    """
    count = len(embeddings) // 2
    tiles = torch.arange(count, device=embeddings.device) + dist.rank() * count
    return gathered_supervised_contrastive_loss(embeddings, tiles.repeat(2), None, temperature)
