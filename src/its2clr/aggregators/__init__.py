"""Aggregators predict a bag from the features of its instances; this package holds them and their training."""

from its2clr.aggregators.base import Aggregator, BagOutput, aggregator_names, create_aggregator, register

__all__ = ["Aggregator", "BagOutput", "aggregator_names", "create_aggregator", "register"]
