"""What a pretraining method is: a network with all it keeps, a loss, and what is left of it as the encoder's start.

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
        network: All that is trained or kept between steps: encoder, heads, momentum copies, queue, centre. Its state
            is the training's, so a run that goes on has everything. Called with two views of each tile, first views
            first, and with the local crops where there are any; gives features, and the embeddings the loss wants.
        loss: Embeddings, tile labels or None -> scalar; processes that share a batch average its gradient.
        kept: The encoder that the pretraining leaves, with a projector for the refinement.
        update: Called after every step with its number from 0 and the number of all steps.
        crops: Local crops it wants.
        contrasted: Rows that the loss contrasts when a batch holds so many tiles; None where it contrasts none.
        spread: How far the embeddings of a step are spread; 0 where all tiles give the same.
        records: Whether its step can be recorded as a CUDA graph.
        labelled: Whether the loss needs the tiles' bag labels; such a method cannot collapse.
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


Prepare = Callable[[EmbeddingNetwork, PretrainConfig], Method]
"""Fresh encoder and projector, settings of the pretraining -> the method; draws from the global random state."""

METHODS: Registry[Prepare] = Registry("pretraining method", {name: module for name, (module, _) in BUILT_IN.items()})
register_pretraining = METHODS.register


def frozen_copy(module: T) -> T:
    """A copy that no gradient reaches: where a momentum copy starts."""
    copied = copy.deepcopy(module)
    deactivate_requires_grad(copied)
    return copied


def rising_momentum(start: float, step: int, steps: int) -> float:
    """Momentum that rises to one as a cosine: the copy stands still when the training ends."""
    return float(cosine_schedule(step, steps, start, 1.0))


def projector_dims(network: EmbeddingNetwork) -> tuple[int, int]:
    """Width of the projector's hidden layer, and of its output."""
    layers = [module for module in network.head.modules() if isinstance(module, nn.Linear)]
    return layers[0].out_features, layers[-1].out_features
