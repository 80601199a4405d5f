"""How far a metric can be trusted: its deviation over retrainings, and its bootstrap interval over bags.

Groups of bags, such as patients, are resampled, never instances or single bags of a group: groups are independent, what
is in them is not. A resample is a row of weights, how often each bag was drawn, so metrics are functions of weights and
sort the scores once for all resamples.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from its2clr.errors import InputError

Weights = NDArray[np.float64]
"""(R, B): how often each of R resamples drew each of B bags."""

_ROUNDS = 20  # of replacing undefined resamples before giving up

_NO_SPREAD = 1e-9


class Summary(TypedDict):
    """One metric over retrainings; a single one has no deviation."""

    mean: float
    std: float | None
    values: list[float]


class Interval(NamedTuple):
    """Ends of an interval."""

    low: float
    high: float


def summarise(values: Sequence[Mapping[str, float]]) -> dict[str, Summary]:
    """Mean, standard deviation (ddof 1; None for one retraining) and values of each metric.

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


def bootstrap_interval(
    statistic: Callable[[Weights], NDArray[np.float64]],
    strata: ArrayLike,
    *,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    groups: ArrayLike | None = None,
) -> Interval:
    """Percentile interval of a statistic over resamples of bags, or of groups of bags.

    Args:
        statistic: Takes (R, bags) weights, how often each of R resamples drew each bag, and gives (R,) numbers. Where
            it gives nan (not defined, such as an AUC of one class), the resample is drawn again.
        strata: (bags,) usually the bag labels: every resample holds as many bags of each stratum as there are. With
            groups it holds as many groups of one stratum alone as there are, and as many of several strata.
        resamples: How many resamples.
        level: Share of resamples within the interval.
        seed: Seed of the draws.
        groups: (bags,) the bags of a group, such as a patient, are drawn together; None: each bag by itself.

    Raises:
        InputError: If a setting is out of range, or the statistic is undefined on nearly all resamples.
    """
    values = np.asarray(strata)
    if values.ndim != 1 or values.size == 0 or resamples < 1 or not 0 < level < 1:
        raise InputError(
            "bootstrap: expected one stratum per bag, resamples >= 1 and 0 < level < 1, "
            f"got strata of shape {values.shape}, resamples={resamples}, level={level}"
        )
    group_of_bag = np.arange(values.size) if groups is None else _numbered(groups, values.size)
    of_group = _strata_of_groups(values, group_of_bag)
    members = [np.flatnonzero(of_group == value) for value in np.unique(of_group)]
    generator = np.random.default_rng(seed)
    found = np.empty(0)
    for _ in range(_ROUNDS):
        fresh = statistic(_draw(generator, members, resamples - found.size)[:, group_of_bag])
        found = np.concatenate([found, fresh[~np.isnan(fresh)]])
        if found.size == resamples:
            low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
            return Interval(float(low), float(high))
    raise InputError(
        f"bootstrap: expected {resamples} resamples of {values.size} bags on which the statistic is defined, got "
        f"{found.size} in {_ROUNDS} rounds; are there bags of both classes?"
    )


def weighted_auc(
    labels: NDArray[np.int64], scores: NDArray[np.float64], bags: NDArray[np.int64], weights: Weights
) -> NDArray[np.float64]:
    """AUC of each resample, an instance counting as often as its bag was drawn (for the AUC of bags, each is a bag).

    The AUC is a count of pairs, and pairs group by bag. With U[i, j] the number of pairs (positive of bag i, negative
    of bag j) that are ranked right (ties count one half), P[i] and N[j] the positives and negatives of each bag,

        AUC(w) = sum_ij w_i w_j U_ij / (sum_i w_i P_i * sum_j w_j N_j).

    By hand, because scikit-learn sorts again for every resample. For 1000 resamples and 5 retrainings, on two busy
    cores, 129 bags take 0.05 s (scikit-learn 16 s), 250,000 instances in 400 bags 5 s (scikit-learn 8 minutes):
    `benchmarks/resampled_metrics.py`.

    Args:
        labels: (N,) 0 or 1.
        scores: (N,) higher is more positive.
        bags: (N,) which bag each belongs to, 0 to B - 1, in rising order.
        weights: (R, B) how often each resample drew each bag.

    Returns:
        (R,), nan where a resample holds only one class.
    """
    positive, negative = labels == 1, labels == 0
    positive_bags, row = np.unique(bags[positive], return_inverse=True)
    negative_bags, starts = np.unique(bags[negative], return_index=True)
    of_positives = scores[positive]
    pairs = np.empty((positive_bags.size, negative_bags.size))  # U
    for column, of_bag in enumerate(np.split(scores[negative], starts[1:])):
        ordered = np.sort(of_bag)
        below = np.searchsorted(ordered, of_positives, "left") + np.searchsorted(ordered, of_positives, "right")
        pairs[:, column] = np.bincount(row, weights=below / 2)
    right = ((weights[:, positive_bags] @ pairs) * weights[:, negative_bags]).sum(axis=1)
    n_bags = weights.shape[1]
    positives, negatives = (weights @ np.bincount(bags[one], minlength=n_bags) for one in (positive, negative))
    return divided(right, positives * negatives)


def divided(numbers: NDArray[np.float64], by: NDArray[np.float64]) -> NDArray[np.float64]:
    """`numbers / by`, nan where that divides by zero."""
    result = np.full(numbers.shape, np.nan)
    np.divide(numbers, by, out=result, where=by > 0)
    return result


def _numbered(groups: ArrayLike, n_bags: int) -> NDArray[np.int64]:
    """(bags,) the number of each bag's group, counted in the order of the bags."""
    given = np.asarray(groups)
    if given.shape != (n_bags,):
        raise InputError(f"bootstrap: expected a group for each of {n_bags} bags, got groups of shape {given.shape}")
    _, first, place = np.unique(given, return_index=True, return_inverse=True)
    number: NDArray[np.int64] = np.argsort(np.argsort(first))
    return number[place]


def _strata_of_groups(strata: NDArray[Any], group_of_bag: NDArray[np.int64]) -> NDArray[np.int64]:
    """(groups,) a number for each set of strata that a group's bags have, those of one stratum first."""
    values, of_bag = np.unique(strata, return_inverse=True)
    held = np.zeros((group_of_bag.max() + 1, values.size), dtype=bool)
    held[group_of_bag, of_bag] = True
    alone = held.sum(axis=1) == 1
    _, kind = np.unique(held, axis=0, return_inverse=True)
    found: NDArray[np.int64] = np.where(alone, held.argmax(axis=1), values.size + kind.reshape(-1))
    return found


def _draw(generator: np.random.Generator, strata: list[NDArray[np.int64]], count: int) -> Weights:
    """Weights of `count` resamples, drawn with replacement, as many from each stratum as it has."""
    chosen = [members[generator.integers(members.size, size=(count, members.size))] for members in strata]
    drawn = np.concatenate(chosen, axis=1)
    held = drawn.shape[1]
    cells = drawn + held * np.arange(count)[:, None]
    return np.bincount(cells.ravel(), minlength=count * held).reshape(count, held).astype(np.float64)


def _summary(values: list[float]) -> Summary:
    std = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Summary(mean=float(np.mean(values)), std=std, values=values)


def has_spread(interval: Sequence[float] | None) -> bool:
    """Whether an interval says anything: where all resamples give one value, as of two bags, it does not."""
    return interval is not None and interval[1] - interval[0] > _NO_SPREAD


def said_interval(interval: Sequence[float] | None) -> str:
    """An interval in brackets; nothing where there is none, or none that says anything."""
    return f"[{interval[0]:.3f}, {interval[1]:.3f}]" if interval is not None and has_spread(interval) else ""
