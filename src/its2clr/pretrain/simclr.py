"""SimCLR: two views of a tile attract, all other tiles of the batch repel (equation 1 of the paper)."""

from torch import Tensor

from its2clr.config import PretrainConfig
from its2clr.encoders.encoder import EmbeddingNetwork
from its2clr.losses.nt_xent import nt_xent_loss
from its2clr.pretrain.method import Method, register_pretraining
from its2clr.training import Objective


def simclr_objective(temperature: float) -> Objective:
    """NT-Xent of both views, against the tiles of all processes."""

    def objective(embeddings: Tensor, labels: Tensor | None, anchors: Tensor | None) -> Tensor:  # noqa: ARG001
        return nt_xent_loss(embeddings, temperature)

    return objective


@register_pretraining("simclr")
def simclr(network: EmbeddingNetwork, config: PretrainConfig) -> Method:
    """SimCLR on the configured projector; encoder and projector are kept."""
    return Method(network, simclr_objective(config.temperature), network, contrasted=lambda tiles: 2 * tiles)
