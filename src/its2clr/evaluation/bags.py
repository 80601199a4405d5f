"""Metrics of bag predictions: one table, from which values, intervals and headings are made.

A new metric is one line of `BAG_METRICS`. It is then in `results.json` and in `scores.json`, with its interval, in the
report, in the card of an exported encoder, and in experiments as `bag_<name>`.

A metric is a function of weights, how often each of R resamples drew each bag; its value is the one with every bag
drawn once. Metrics are written out here because of their intervals. For 1000 resamples of 129 bags and 5 retrainings,
on two busy cores, scikit-learn with `sample_weight` takes 7 to 16 s for each of them, torchmetrics 0.2 to 3 s, and
these functions 0.1 s for all together (`benchmarks/resampled_metrics.py`); a run has two models or more. Tests hold
each against scikit-learn and against plain loops.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from its2clr.evaluation.arrays import label_vector, labels_and_scores, require_both_classes, rows, vector
from its2clr.evaluation.uncertainty import Interval, Weights, bootstrap_interval, divided, weighted_auc

Numbers = NDArray[np.float64]
Labels = NDArray[np.int64]
Called = NDArray[np.bool_]


class BagMetric(NamedTuple):
    """A metric of bags.

    Attributes:
        title: Its heading in tables.
        of: Takes labels (n,), scores (n,) and weights (R, n) and gives (R,) numbers, nan where it is not defined.
        decided: Whether `of` takes decisions in place of scores: (n,), True where a bag is called positive.
    """

    title: str
    of: Callable[[Labels, NDArray[Any], Weights], Numbers]
    decided: bool = False


def _auc(labels: Labels, scores: Numbers, weights: Weights) -> Numbers:
    return weighted_auc(labels, scores, np.arange(labels.size), weights)


def _average_precision(labels: Labels, scores: Numbers, weights: Weights) -> Numbers:
    order = np.argsort(-scores, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))  # bags of one score are called together
    drawn = weights[:, order]
    called = np.cumsum(drawn, axis=1)[:, ends]
    found = np.cumsum(drawn * labels[order], axis=1)[:, ends]
    precision = np.divide(found, called, out=np.zeros_like(found), where=called > 0)
    return divided((precision * np.diff(found, axis=1, prepend=0.0)).sum(axis=1), found[:, -1])


def _sensitivity(labels: Labels, called: Called, weights: Weights) -> Numbers:
    return divided(weights @ (called & (labels == 1)), weights @ (labels == 1))


def _specificity(labels: Labels, called: Called, weights: Weights) -> Numbers:
    return divided(weights @ (~called & (labels == 0)), weights @ (labels == 0))


def _balanced_accuracy(labels: Labels, called: Called, weights: Weights) -> Numbers:
    return (_sensitivity(labels, called, weights) + _specificity(labels, called, weights)) / 2


def _f1(labels: Labels, called: Called, weights: Weights) -> Numbers:
    return divided(2 * (weights @ (called & (labels == 1))), weights @ called + weights @ (labels == 1))


BAG_METRICS: dict[str, BagMetric] = {
    "auc": BagMetric("AUC", _auc),
    "auprc": BagMetric("AUPRC", _average_precision),
    "balanced_accuracy": BagMetric("balanced accuracy", _balanced_accuracy, decided=True),
    "f1": BagMetric("F1", _f1, decided=True),
    "sensitivity": BagMetric("sensitivity", _sensitivity, decided=True),
    "specificity": BagMetric("specificity", _specificity, decided=True),
}


def bag_metrics(labels: ArrayLike, scores: ArrayLike, threshold: float | None = None) -> dict[str, float]:
    """The metrics of one set of bags, as `BAG_METRICS` names them.

    Args:
        labels: (n,) bag labels, 0 or 1.
        scores: (n,) probabilities or any other score, higher is more positive.
        threshold: A bag is called positive when its score >= threshold; from `balanced_accuracy_threshold` of
            validation bags. None: metrics of decisions are left out.

    Raises:
        InputError: If lengths differ, a label is not 0 or 1, a score is not finite, or a class is missing.

    Example:
        >>> bag_metrics([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8])["auc"]
        0.75
    """
    bag_labels, bag_scores = labels_and_scores(labels, scores, "bags")
    thresholds = None if threshold is None else [threshold]
    statistics = _statistics(bag_labels, bag_scores[None], thresholds)
    return {name: float(statistic(_once(bag_labels))[0]) for name, statistic in statistics.items()}


def bag_metric_intervals(
    labels: ArrayLike,
    scores: ArrayLike,
    thresholds: ArrayLike | None = None,
    *,
    resamples: int = 1000,
    seed: int = 0,
    groups: ArrayLike | None = None,
) -> dict[str, Interval]:
    """95% intervals of what `bag_metrics` gives, averaged over retrainings, all on the same resamples of bags.

    Resamples are stratified by bag label. Thresholds stay as they were chosen on validation.

    Args:
        labels: (n,) bag labels, 0 or 1.
        scores: (n,), or (S, n) for S retrainings on the same bags.
        thresholds: (S,) that of each retraining. None: metrics of decisions are left out.
        resamples: How many resamples.
        seed: Seed of the draws.
        groups: (n,) the bags of a group, such as a patient, are drawn together.

    Raises:
        InputError: As `bag_metrics`.
    """
    bag_labels, retrainings = _checked(labels, scores)
    return {
        name: bootstrap_interval(statistic, bag_labels, resamples=resamples, seed=seed, groups=groups)
        for name, statistic in _statistics(bag_labels, retrainings, thresholds).items()
    }


def bag_auc_difference(
    labels: ArrayLike,
    scores: ArrayLike,
    others: ArrayLike,
    *,
    resamples: int = 1000,
    seed: int = 0,
    groups: ArrayLike | None = None,
) -> tuple[float, Interval]:
    """The bag AUC of one model less that of another, and its 95% interval, both on the same resamples of bags.

    Intervals of the two alone may overlap where this one, being paired, shows a difference.

    Args:
        labels: (n,) bag labels, 0 or 1.
        scores: (n,), or (S, n) for S retrainings.
        others: The other model's, of as many retrainings as it has.
        resamples: How many resamples.
        seed: Seed of the draws.
        groups: (n,) the bags of a group, such as a patient, are drawn together.

    Raises:
        InputError: As `bag_metrics`.
    """
    bag_labels, retrainings = _checked(labels, scores)
    auc = _statistics(bag_labels, retrainings)["auc"]
    other_auc = _statistics(*_checked(labels, others))["auc"]

    def difference(weights: Weights) -> Numbers:
        return auc(weights) - other_auc(weights)

    interval = bootstrap_interval(difference, bag_labels, resamples=resamples, seed=seed, groups=groups)
    return float(difference(_once(bag_labels))[0]), interval


def _checked(labels: ArrayLike, scores: ArrayLike) -> tuple[Labels, Numbers]:
    """Labels (n,) of both classes, and scores (S, n)."""
    bag_labels = label_vector(labels, "labels of bags")
    retrainings = rows(scores, "scores of bags", bag_labels.size)
    require_both_classes(bag_labels, "bags")
    return bag_labels, retrainings


def _statistics(
    labels: Labels, scores: Numbers, thresholds: ArrayLike | None = None
) -> dict[str, Callable[[Weights], Numbers]]:
    """The mean over retrainings of each metric, as a function of weights; of scores alone where no threshold is."""
    judged: dict[bool, NDArray[Any]] = {False: scores}  # (S, n)
    if thresholds is not None:
        judged[True] = scores >= vector(thresholds, "thresholds", len(scores))[:, None]
    return {
        name: partial(_averaged, metric, labels, judged[metric.decided])
        for name, metric in BAG_METRICS.items()
        if metric.decided in judged
    }


def _averaged(metric: BagMetric, labels: Labels, judged: NDArray[Any], weights: Weights) -> Numbers:
    mean: Numbers = np.mean([metric.of(labels, one, weights) for one in judged], axis=0)
    return mean


def _once(labels: Labels) -> Weights:
    """Weights of one resample that holds every bag once."""
    return np.ones((1, labels.size))
