"""What the encoder learns from labelled instances: the contract of an objective, and the registry of their names.

An objective is one file with one function under `@register_objective("name")`; it is then a value of the setting
`refine.objective`. Loop, sampling, refresh and selection are the same for all of them.
"""

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass

from its2clr.config import RefineConfig
from its2clr.encoders.encoder import EmbeddingNetwork
from its2clr.errors import InputError
from its2clr.training import Objective

BUILT_IN = ("its2clr.refine.supcon", "its2clr.baselines.cross_entropy")
"""Modules of the package that register an objective."""


@dataclass(frozen=True)
class Prepared:
    """An objective ready for training.

    Attributes:
        network: The encoder with the head the loss needs; what is trained.
        loss: Head outputs of both views, labels and anchors of the batch -> scalar.
        contrastive: Whether a loss of log(2B - 1) without spread means collapse, which the loop then watches for.
    """

    network: EmbeddingNetwork
    loss: Objective
    contrastive: bool = False


Prepare = Callable[[EmbeddingNetwork, RefineConfig, int], Prepared]
"""Network with SimCLR's projector as head, settings of the refinement, seed -> what is trained, and with which loss."""

_REGISTRY: dict[str, Prepare] = {}


def register_objective(name: str) -> Callable[[Prepare], Prepare]:
    """Decorator that makes an objective available under a name."""

    def add(prepare: Prepare) -> Prepare:
        known = _REGISTRY.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (prepare.__module__, prepare.__qualname__):
            raise InputError(f"an objective named {name!r} is registered already: {known.__module__}")
        _REGISTRY[name] = prepare
        return prepare

    return add


def objective_names() -> list[str]:
    """Names that `refine.objective` may have, sorted."""
    for module in BUILT_IN:
        importlib.import_module(module)
    return sorted(_REGISTRY)


def find_objective(name: str) -> Prepare:
    """The objective of a name.

    Raises:
        InputError: There is none; the closest is named.
    """
    known = objective_names()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f", did you mean {close[0]!r}?" if close else ""
        raise InputError(f"refine.objective: no objective named {name!r}{hint} (known: {', '.join(known)})")
    return _REGISTRY[name]
