"""Aggregators: from the features of a bag's instances to a bag prediction, and their training."""

from its2clr.aggregators import (  # noqa: F401  (importing an aggregator registers its name)
    attention,
    dsmil,
    instance_attention,
    max_pooling,
    smooth_max,
    top_k,
    transformer,
)
from its2clr.aggregators.base import Aggregator, BagOutput, aggregator_names, create_aggregator, register

__all__ = ["Aggregator", "BagOutput", "aggregator_names", "create_aggregator", "register"]
