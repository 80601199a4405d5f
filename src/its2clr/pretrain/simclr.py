"""SimCLR: two views of a tile attract, all other tiles of the batch repel (equation 1 of the paper)."""

import torch
from lightly.utils import dist
from torch import Tensor

from its2clr.config import PretrainConfig
from its2clr.encoders.encoder import EmbeddingNetwork
from its2clr.pretrain.method import Method
from its2clr.refine.supcon import gathered_supervised_contrastive_loss
from its2clr.training import Objective


def simclr_objective(temperature: float) -> Objective:
    """NT-Xent over both views, contrasted with the tiles of all processes.

    It is the supervised contrastive loss in which every tile is a class of its own: the same-set of a view is the
    other view. Equal to lightly's `NTXentLoss`, which picks entries by a mask and so cannot be recorded.
    """

    def objective(embeddings: Tensor, labels: Tensor | None, anchors: Tensor | None) -> Tensor:  # noqa: ARG001
        count = len(embeddings) // 2
        tiles = torch.arange(count, device=embeddings.device) + dist.rank() * count
        return gathered_supervised_contrastive_loss(embeddings, tiles.repeat(2), None, temperature)

    return objective


def simclr(network: EmbeddingNetwork, config: PretrainConfig) -> Method:
    """SimCLR on the configured projector; both are kept."""
    return Method(network, simclr_objective(config.temperature), network)
