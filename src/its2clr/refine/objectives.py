"""How the encoder learns from labelled instances: the contract of an objective, the registry, and the built-in ones.

An objective is one function under `@register_objective("name")`; the setting `refine.objective` can then name it.
Loop, sampling, rounds and selection are the same for all objectives.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from its2clr.config import RefineConfig
from its2clr.encoders.encoder import EmbeddingNetwork
from its2clr.losses.cross_entropy import cross_entropy_loss
from its2clr.losses.supcon import gathered_supervised_contrastive_loss
from its2clr.registry import Registry
from its2clr.seeds import torch_generator
from its2clr.training import Objective


@dataclass(frozen=True)
class Prepared:
    """An objective ready for training.

    Attributes:
        network: The encoder with the head that the loss needs; both are trained.
        loss: Head outputs of both views, labels and anchors of the batch -> scalar.
        contrastive: Whether a loss of log(2B - 1) without spread means collapse; the loop then watches for it.
    """

    network: EmbeddingNetwork
    loss: Objective
    contrastive: bool = False


Prepare = Callable[[EmbeddingNetwork, RefineConfig, int], Prepared]
"""Network with the start's projector as head, settings of the refinement, seed -> network to train, and the loss."""

OBJECTIVES: Registry[Prepare] = Registry("objective", {})
register_objective = OBJECTIVES.register


@register_objective("supervised_contrastive")
def supervised_contrastive(network: EmbeddingNetwork, config: RefineConfig, seed: int) -> Prepared:  # noqa: ARG001
    """Equation 2 over both views of the batch and over all processes, on the start's projector."""

    def loss(embeddings: Tensor, labels: Tensor | None, anchors: Tensor | None) -> Tensor:
        assert labels is not None
        return gathered_supervised_contrastive_loss(embeddings, labels, anchors, config.temperature)

    return Prepared(network, loss, contrastive=True)


@register_objective("cross_entropy")
def cross_entropy(network: EmbeddingNetwork, config: RefineConfig, seed: int) -> Prepared:  # noqa: ARG001
    """A linear classifier instead of the projector, trained with the pseudo labels."""
    classifier = nn.Linear(network.encoder.feature_dim, 1)
    nn.init.normal_(
        classifier.weight, std=0.01, generator=torch_generator(classifier.weight.device, seed, "classifier")
    )
    nn.init.zeros_(classifier.bias)
    return Prepared(EmbeddingNetwork(network.encoder, classifier), cross_entropy_loss)
