"""BYOL: from one view of a tile, predict what a momentum copy of the network gives for the other; no negatives."""

import torch
from lightly.loss import NegativeCosineSimilarity
from lightly.models.modules.heads import BYOLPredictionHead
from lightly.models.utils import update_momentum
from torch import Tensor, nn

from its2clr.config import PretrainConfig
from its2clr.encoders.encoder import EmbeddingNetwork
from its2clr.engine.guard import embedding_spread
from its2clr.pretrain.method import Method, frozen_copy, projector_dims, register_pretraining, rising_momentum

MOMENTUM = 0.99


class Byol(nn.Module):
    """Online network with its predictor, and the target network.

    Args:
        network: The online network: f and the projector psi. The predictor is as wide as psi and always has batch norm.
    """

    def __init__(self, network: EmbeddingNetwork) -> None:
        super().__init__()
        self.online = network
        self.target = frozen_copy(network)
        hidden_dim, output_dim = projector_dims(network)
        self.predictor = BYOLPredictionHead(output_dim, hidden_dim, output_dim)
        self._similarity = NegativeCosineSimilarity()

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features (2B, D); predictions (2B, D') over targets (2B, D')."""
        features, projected = self.online(images)
        with torch.no_grad():
            _, targets = self.target(images)
        return features, torch.cat([self.predictor(projected), targets])

    def loss(self, embeddings: Tensor, labels: Tensor | None, anchors: Tensor | None) -> Tensor:  # noqa: ARG002
        """Negative cosine between each view's prediction and the other view's target; the best value is -1."""
        first, second, first_target, second_target = embeddings.chunk(4)
        loss: Tensor = self._similarity(first, second_target.detach()) + self._similarity(second, first_target.detach())
        return loss / 2

    def spread(self, embeddings: Tensor) -> float:
        """Spread of the targets. Early in training, predictions hardly differ although the representations do."""
        return embedding_spread(embeddings.chunk(2)[1])


@register_pretraining("byol")
def byol(network: EmbeddingNetwork, config: PretrainConfig) -> Method:
    """BYOL on the configured projector; the online encoder is kept."""
    learner = Byol(network)
    momentum = MOMENTUM if config.momentum_encoder is None else config.momentum_encoder

    def update(step: int, steps: int) -> None:
        update_momentum(learner.online, learner.target, rising_momentum(momentum, step, steps))

    return Method(learner, learner.loss, network, update, spread=learner.spread, records=False)
