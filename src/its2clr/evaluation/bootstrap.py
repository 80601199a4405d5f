"""Percentile bootstrap intervals over bags: bags are independent, the instances of one bag are not."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from its2clr.errors import InputError
from its2clr.evaluation.arrays import UNKNOWN, bag_offsets, label_vector, labels_and_scores, rows, vector
from its2clr.evaluation.weighted_auc import resampled_auc
from its2clr.evaluation.weighted_metrics import resampled_average_precision, resampled_decisions

_REDRAWS = 20  # rounds of replacing undefined resamples before giving up


class Interval(NamedTuple):
    """Ends of an interval."""

    low: float
    high: float


def bootstrap_interval(
    statistic: Callable[[NDArray[np.int64]], float],
    n_bags: int,
    *,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    labels: ArrayLike | None = None,
) -> Interval:
    """Gives the percentile interval of a statistic of bags.

    Args:
        statistic: Takes (n_bags,) indices of bags, with repeats, and gives a number; nan says that it is not
            defined there (one class only), and that resample is drawn again.
        n_bags: How many bags there are.
        resamples: How many resamples.
        level: Share of resamples within the interval.
        seed: Seed of the draws.
        labels: (n_bags,) strata, usually bag labels: each resample holds as many bags of each as there are.

    Raises:
        InputError: If a setting is out of range, or the statistic is undefined on nearly all resamples.
    """
    return _interval(
        lambda drawn: np.array([statistic(indices) for indices in drawn], dtype=np.float64),
        n_bags,
        labels,
        resamples=resamples,
        level=level,
        seed=seed,
    )


def bag_auc_interval(
    labels: ArrayLike, scores: ArrayLike, *, resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> Interval:
    """Gives the interval of the bag AUC, averaged over retrainings; resamples are stratified by bag label.

    Args:
        labels: (n,) bag labels, 0 or 1.
        scores: (n,), or (S, n) for S retrainings on the same bags.
        resamples: How many resamples.
        level: Share of resamples within the interval.
        seed: Seed of the draws.
    """
    bag_labels = label_vector(labels, "labels of bags")
    retrainings = rows(scores, "scores of bags", bag_labels.size)
    labels_and_scores(bag_labels, retrainings[0], "bags")
    bags = np.arange(bag_labels.size)
    return _interval(
        lambda drawn: resampled_auc(bag_labels, retrainings, bags, _weights(drawn)),
        bag_labels.size,
        bag_labels,
        resamples=resamples,
        level=level,
        seed=seed,
    )


def bag_metric_intervals(
    labels: ArrayLike,
    scores: ArrayLike,
    thresholds: ArrayLike,
    *,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    """Gives the intervals of what `bag_metrics` gives, each averaged over retrainings, on the same resamples.

    Thresholds stay as they were chosen on validation.

    Args:
        labels: (n,) bag labels, 0 or 1.
        scores: (S, n) for S retrainings on the same bags.
        thresholds: (S,) of each retraining; a bag is called positive when its score >= threshold.
        resamples: How many resamples.
        level: Share of resamples within the interval.
        seed: Seed of the draws.

    Returns:
        Of `auc`, `auprc`, `balanced_accuracy` and `f1`.
    """
    bag_labels = label_vector(labels, "labels of bags")
    retrainings = rows(scores, "scores of bags", bag_labels.size)
    called = retrainings >= vector(thresholds, "thresholds", len(retrainings))[:, None]

    def interval(statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> Interval:
        return _interval(
            lambda drawn: statistic(_weights(drawn)),
            bag_labels.size,
            bag_labels,
            resamples=resamples,
            level=level,
            seed=seed,
        )

    return {
        "auc": bag_auc_interval(bag_labels, retrainings, resamples=resamples, level=level, seed=seed),
        "auprc": interval(lambda weights: resampled_average_precision(bag_labels, retrainings, weights)),
        "balanced_accuracy": interval(lambda weights: resampled_decisions(bag_labels, called, weights)[0]),
        "f1": interval(lambda weights: resampled_decisions(bag_labels, called, weights)[1]),
    }


def bag_auc_difference_interval(
    labels: ArrayLike,
    scores: ArrayLike,
    others: ArrayLike,
    *,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Gives the interval of the bag AUC of one model less that of another, on the same resamples of bags.

    Intervals of the two alone may overlap where this one, being paired, shows a difference.

    Args:
        labels: (n,) bag labels, 0 or 1.
        scores: (n,), or (S, n) for S retrainings.
        others: The other model's, of as many retrainings as it has.
        resamples: How many resamples.
        level: Share of resamples within the interval.
        seed: Seed of the draws.
    """
    bag_labels = label_vector(labels, "labels of bags")
    models = [rows(one, "scores of bags", bag_labels.size) for one in (scores, others)]
    labels_and_scores(bag_labels, models[0][0], "bags")
    bags = np.arange(bag_labels.size)

    def difference(drawn: NDArray[np.int64]) -> NDArray[np.float64]:
        one, other = (resampled_auc(bag_labels, model, bags, _weights(drawn)) for model in models)
        return one - other

    return _interval(difference, bag_labels.size, bag_labels, resamples=resamples, level=level, seed=seed)


def instance_auc_interval(
    instance_labels: ArrayLike,
    instance_scores: ArrayLike,
    offsets: ArrayLike,
    *,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Gives the interval of the instance AUC, averaged over retrainings: bags are drawn with all instances.

    Resamples are stratified by whether a bag holds a known positive.

    Args:
        instance_labels: (N,) ground truth, 0 or 1, or -1 for unknown (left out).
        instance_scores: (N,), or (S, N) for S retrainings on the same instances.
        offsets: (bags + 1,): bag b holds instances offsets[b] to offsets[b + 1].
        resamples: How many resamples.
        level: Share of resamples within the interval.
        seed: Seed of the draws.
    """
    labels = label_vector(instance_labels, "labels of instances", unknown=True)
    retrainings = rows(instance_scores, "scores of instances", labels.size)
    labels_and_scores(labels, retrainings[0], "instances", unknown=True)
    starts = bag_offsets(offsets, labels.size)
    n_bags = starts.size - 1
    bags = np.repeat(np.arange(n_bags), np.diff(starts))
    known = labels != UNKNOWN
    labels, retrainings, bags = labels[known], retrainings[:, known], bags[known]
    return _interval(
        lambda drawn: resampled_auc(labels, retrainings, bags, _weights(drawn)),
        n_bags,
        np.bincount(bags, weights=labels, minlength=n_bags) > 0,
        resamples=resamples,
        level=level,
        seed=seed,
    )


def _interval(
    statistics: Callable[[NDArray[np.int64]], NDArray[np.float64]],
    n_bags: int,
    strata: ArrayLike | None,
    *,
    resamples: int,
    level: float,
    seed: int,
) -> Interval:
    """Draws until `resamples` statistics are defined; `statistics` takes (R, n_bags) indices, gives (R,)."""
    if n_bags < 1 or resamples < 1 or not 0 < level < 1:
        raise InputError(
            "bootstrap: expected n_bags >= 1, resamples >= 1 and 0 < level < 1, "
            f"got n_bags={n_bags}, resamples={resamples}, level={level}"
        )
    groups = _groups(n_bags, strata)
    generator = np.random.default_rng(seed)
    values = np.empty(0)
    for _ in range(_REDRAWS):
        drawn = _draw(generator, groups, resamples - values.size)
        fresh = statistics(drawn)
        values = np.concatenate([values, fresh[~np.isnan(fresh)]])
        if values.size == resamples:
            low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
            return Interval(float(low), float(high))
    raise InputError(
        f"bootstrap: expected {resamples} resamples of {n_bags} bags on which the statistic is defined, got "
        f"{values.size} in {_REDRAWS} rounds; are there bags of both classes?"
    )


def _groups(n_bags: int, strata: ArrayLike | None) -> list[NDArray[np.int64]]:
    """Gives the bags of each stratum; all bags where there are none."""
    if strata is None:
        return [np.arange(n_bags)]
    values = np.asarray(strata)
    if values.shape != (n_bags,):
        raise InputError(f"bootstrap: expected labels of shape ({n_bags},), got {values.shape}")
    return [np.flatnonzero(values == value) for value in np.unique(values)]


def _draw(generator: np.random.Generator, groups: list[NDArray[np.int64]], count: int) -> NDArray[np.int64]:
    """Draws `count` resamples (rows) with replacement, as many from each group as it has."""
    drawn = [group[generator.integers(group.size, size=(count, group.size))] for group in groups]
    return np.concatenate(drawn, axis=1)


def _weights(drawn: NDArray[np.int64]) -> NDArray[np.float64]:
    """Counts how often each resample drew each bag."""
    count, n_bags = drawn.shape
    cells = drawn + n_bags * np.arange(count)[:, None]
    return np.bincount(cells.ravel(), minlength=count * n_bags).reshape(count, n_bags).astype(np.float64)
