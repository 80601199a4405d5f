"""MoCo v2: match a view to the other view of its tile, by a momentum encoder, among a queue of earlier tiles."""

import torch
from lightly.loss import NTXentLoss
from lightly.models.utils import update_momentum
from torch import Tensor, nn

from its2clr.config import PretrainConfig
from its2clr.encoders.encoder import EmbeddingNetwork
from its2clr.engine.guard import embedding_spread
from its2clr.pretrain.method import Method, frozen_copy, projector_dims, register_pretraining

MOMENTUM = 0.999


class Moco(nn.Module):
    """Query network, key network and queue.

    The paper shuffles batches between GPUs because of batch norm. That is not needed here: batch norm is synchronised.

    Args:
        network: The query network: f, and psi as MoCo v2's MLP head.
        config: Temperature and size of the queue.
    """

    def __init__(self, network: EmbeddingNetwork, config: PretrainConfig) -> None:
        super().__init__()
        self.queries = network
        self.keys = frozen_copy(network)
        size = (config.queue_size, projector_dims(network)[1])
        self.contrast = NTXentLoss(config.temperature, memory_bank_size=size, gather_distributed=True)
        bank = self.contrast.memory_bank  # lightly does not save the queue; a resumed run needs it
        for name in ("bank", "bank_ptr"):
            bank.register_buffer(name, getattr(bank, name), persistent=True)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features (B, D) of first views; queries (B, D') of first views over keys (B, D') of second ones."""
        first, second = images.chunk(2)
        features, queries = self.queries(first)
        with torch.no_grad():
            _, keys = self.keys(second)
        return features, torch.cat([queries, keys])

    def loss(self, embeddings: Tensor, labels: Tensor | None, anchors: Tensor | None) -> Tensor:  # noqa: ARG002
        """InfoNCE against the queue; then the keys of all processes join the queue."""
        queries, keys = embeddings.chunk(2)
        loss: Tensor = self.contrast(queries, keys.detach())
        return loss

    def spread(self, embeddings: Tensor) -> float:
        """Spread of the queries only: collapsed keys may lie at another point."""
        return embedding_spread(embeddings.chunk(2)[0])


@register_pretraining("moco")
def moco(network: EmbeddingNetwork, config: PretrainConfig) -> Method:
    """MoCo v2 on the configured projector; the query encoder is kept."""
    learner = Moco(network, config)
    momentum = MOMENTUM if config.momentum_encoder is None else config.momentum_encoder

    def update(step: int, steps: int) -> None:  # noqa: ARG001
        update_momentum(learner.queries, learner.keys, momentum)

    # Every step looks up its place in the queue on the host, which a CUDA graph cannot do.
    return Method(
        learner,
        learner.loss,
        network,
        update,
        contrasted=lambda _: config.queue_size + 2,  # the queue, the query and its key
        spread=learner.spread,
        records=False,
    )
