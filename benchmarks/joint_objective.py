"""A plugin: the supervised contrastive loss of ItS2CLR and cross-entropy, added up (docs/results-real.md)."""

import torch
from its2clr.baselines.cross_entropy import cross_entropy_loss
from torch import Tensor, nn

from its2clr.config import RefineConfig
from its2clr.encoders.encoder import EmbeddingNetwork
from its2clr.losses.supcon import gathered_supervised_contrastive_loss
from its2clr.refine.objectives import Prepared, register_objective


class TwoHeads(nn.Module):
    """Projections, and in the last column a logit; the classifier begins at zero."""

    def __init__(self, projector: nn.Module, feature_dim: int) -> None:
        super().__init__()
        self.projector, self.classifier = projector, nn.Linear(feature_dim, 1)
        nn.init.zeros_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, features: Tensor) -> Tensor:
        return torch.cat([self.projector(features), self.classifier(features)], dim=1)


@register_objective("joint")
def joint(network: EmbeddingNetwork, config: RefineConfig, seed: int) -> Prepared:  # noqa: ARG001
    """Both losses on the same rows, with equal weight; collapse is not watched for."""

    def loss(outputs: Tensor, labels: Tensor, anchors: Tensor) -> Tensor:
        projections, logits = outputs[:, :-1].contiguous(), outputs[:, -1:]
        contrast = gathered_supervised_contrastive_loss(projections, labels, anchors, config.temperature)
        return contrast + cross_entropy_loss(logits, labels, anchors)

    return Prepared(EmbeddingNetwork(network.encoder, TwoHeads(network.head, network.encoder.feature_dim)), loss)
