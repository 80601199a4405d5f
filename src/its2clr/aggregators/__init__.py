"""Aggregators: from the features of a bag's instances to a bag prediction, and their training."""

from its2clr.aggregators.base import Aggregator, BagOutput, aggregator_names, create_aggregator, register

__all__ = ["Aggregator", "BagOutput", "aggregator_names", "create_aggregator", "register"]
