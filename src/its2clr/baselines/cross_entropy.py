"""Cross-entropy finetuning on pseudo labels (section 4.3): the objective that ItS2CLR is compared with."""

import torch.nn.functional as F
from torch import Tensor, nn

from its2clr.config import RefineConfig
from its2clr.encoders.encoder import EmbeddingNetwork
from its2clr.refine.objectives import Prepared, register_objective
from its2clr.seeds import torch_generator


@register_objective("cross_entropy")
def cross_entropy(network: EmbeddingNetwork, config: RefineConfig, seed: int) -> Prepared:  # noqa: ARG001
    """A linear classifier in place of the projector, trained with the pseudo labels as they are."""
    classifier = nn.Linear(network.encoder.feature_dim, 1)
    nn.init.normal_(
        classifier.weight, std=0.01, generator=torch_generator(classifier.weight.device, seed, "classifier")
    )
    nn.init.zeros_(classifier.bias)
    return Prepared(EmbeddingNetwork(network.encoder, classifier), cross_entropy_loss)


def cross_entropy_loss(logits: Tensor, labels: Tensor | None, anchors: Tensor | None) -> Tensor:  # noqa: ARG001
    """Binary cross-entropy of every view; processes hold equal shares, so the mean of their means is the batch's."""
    assert labels is not None
    return F.binary_cross_entropy_with_logits(logits.squeeze(1), labels.float())
