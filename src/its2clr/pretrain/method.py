"""The contract of a pretraining method: a network with everything it keeps, a loss, and the encoder that remains.

A method is one file with one function under `@register_pretraining("name")`, and one line in `BUILT_IN`.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lightly.models.utils import deactivate_requires_grad
from lightly.utils.scheduler import cosine_schedule
from torch import Tensor, nn

from its2clr.config import PretrainConfig
from its2clr.encoders.encoder import EmbeddingNetwork
from its2clr.engine.guard import embedding_spread
from its2clr.pretrain.titles import BUILT_IN
from its2clr.registry import Registry
from its2clr.training import LocalCrops, Objective

T = TypeVar("T", bound=nn.Module)


@dataclass(frozen=True)
class Method:
    """A method ready for training.

    Attributes:
        network: Everything that is trained or kept between steps: encoder, heads, momentum copies, queue, centre. Its
            state is saved, so a stopped run can continue. It is called with two views of each tile, first views first,
            and with the local crops if there are any. It returns features, and the embeddings that the loss needs.
        loss: Embeddings, tile labels or None -> scalar; processes that share a batch average its gradient.
        kept: The encoder that remains after pretraining, with a projector for the refinement.
        update: Called after every step with its number from 0 and the total number of steps.
        crops: Local crops the method needs.
        contrasted: Number of tiles in a batch -> number of rows the loss contrasts; None if it contrasts none.
        spread: How far the embeddings of a step are spread; 0 if all tiles give the same.
        records: Whether its step can be recorded as a CUDA graph.
        labelled: Whether the loss needs the labels of the tiles' bags; such a method cannot collapse.
        begin_epoch: Called before every epoch with its number from 0.
        edit_gradients: Called in every step before the optimiser uses the gradients. In a recorded step it only does
            what it did at the recording.
    """

    network: nn.Module
    loss: Objective
    kept: EmbeddingNetwork
    update: Callable[[int, int], None] | None = None
    crops: LocalCrops | None = None
    contrasted: Callable[[int], int] | None = None
    spread: Callable[[Tensor], float] = embedding_spread
    records: bool = True
    labelled: bool = False
    begin_epoch: Callable[[int], None] | None = None
    edit_gradients: Callable[[], None] | None = None


Prepare = Callable[[EmbeddingNetwork, PretrainConfig], Method]
"""Fresh encoder and projector, settings of the pretraining -> the method; may draw from the global random state."""

METHODS: Registry[Prepare] = Registry("pretraining method", {name: module for name, (module, _) in BUILT_IN.items()})
register_pretraining = METHODS.register


def frozen_copy(module: T) -> T:
    """A copy without gradients: the first state of a momentum copy."""
    copied = copy.deepcopy(module)
    deactivate_requires_grad(copied)
    return copied


def rising_momentum(start: float, step: int, steps: int) -> float:
    """Momentum that rises to one along a cosine, so that the copy no longer changes when the training ends."""
    return float(cosine_schedule(step, steps, start, 1.0))


def projector_dims(network: EmbeddingNetwork) -> tuple[int, int]:
    """Width of the projector's hidden layer, and of its output."""
    layers = [module for module in network.head.modules() if isinstance(module, nn.Linear)]
    return layers[0].out_features, layers[-1].out_features
