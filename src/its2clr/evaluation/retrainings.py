"""Metrics of several retrainings brought together, as the paper's mean with standard deviation."""

from collections.abc import Mapping, Sequence
from typing import TypedDict

import numpy as np

from its2clr.errors import InputError


class Summary(TypedDict):
    """One metric over retrainings."""

    mean: float
    std: float
    values: list[float]


def summarise(values: Sequence[Mapping[str, float]]) -> dict[str, Summary]:
    """Gives mean, standard deviation (ddof 1; 0.0 for one retraining) and values of each metric.

    Args:
        values: The metrics of each retraining, with the same names in each.

    Raises:
        InputError: If there is no retraining, or the names differ.
    """
    if not values:
        raise InputError("retrainings: expected the metrics of at least one retraining, got none")
    names = list(values[0])
    for place, metrics in enumerate(values):
        if set(metrics) != set(names):
            raise InputError(
                f"retrainings: expected the metrics {sorted(names)} in each, got {sorted(metrics)} in number {place}"
            )
    return {name: _summary([float(metrics[name]) for metrics in values]) for name in names}


def _summary(values: list[float]) -> Summary:
    std = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return Summary(mean=float(np.mean(values)), std=std, values=values)
