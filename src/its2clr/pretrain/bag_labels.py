"""A supervised start that needs no other data: every tile is trained with the label of its bag, right or wrong."""

from torch import nn

from its2clr.config import PretrainConfig
from its2clr.encoders.encoder import EmbeddingNetwork
from its2clr.losses.cross_entropy import cross_entropy_loss
from its2clr.pretrain.method import Method, register_pretraining


@register_pretraining("bag_labels")
def bag_labels(network: EmbeddingNetwork, config: PretrainConfig) -> Method:  # noqa: ARG001
    """A linear classifier of single tiles; its encoder is kept, with the fresh projector."""
    learner = EmbeddingNetwork(network.encoder, nn.Linear(network.encoder.feature_dim, 1))
    return Method(learner, cross_entropy_loss, network, labelled=True)
