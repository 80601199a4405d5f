"""What the encoder learns from labelled instances: the paper's loss, and the baseline it is compared with."""

import torch.nn.functional as F
from torch import Tensor, nn

from its2clr.config import RefineConfig
from its2clr.encoders.encoder import EmbeddingNetwork
from its2clr.engine.seeds import torch_generator
from its2clr.refine.supcon import gathered_supervised_contrastive_loss
from its2clr.training import Objective


def prepare_objective(network: EmbeddingNetwork, config: RefineConfig, seed: int) -> tuple[EmbeddingNetwork, Objective]:
    """The network with the head an objective needs, and the objective.

    The supervised contrastive loss keeps the projector; cross-entropy puts a linear classifier in its place.
    """
    if config.objective == "supervised_contrastive":
        return network, supcon_objective(config.temperature)
    classifier = nn.Linear(network.encoder.feature_dim, 1)
    generator = torch_generator(classifier.weight.device, seed, "classifier")
    nn.init.normal_(classifier.weight, std=0.01, generator=generator)
    nn.init.zeros_(classifier.bias)
    return EmbeddingNetwork(network.encoder, classifier), cross_entropy_objective


def supcon_objective(temperature: float) -> Objective:
    """Equation 2 over both views of the batch and over all processes."""

    def objective(embeddings: Tensor, labels: Tensor | None, anchors: Tensor | None) -> Tensor:
        assert labels is not None
        return gathered_supervised_contrastive_loss(embeddings, labels, anchors, temperature)

    return objective


def cross_entropy_objective(logits: Tensor, labels: Tensor | None, anchors: Tensor | None) -> Tensor:  # noqa: ARG001
    """Binary cross-entropy of every view; processes hold equal shares, so the mean of their means is the batch's."""
    assert labels is not None
    return F.binary_cross_entropy_with_logits(logits.squeeze(1), labels.float())
