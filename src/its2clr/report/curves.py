"""Points of curves: ROC, precision and recall, reliability; and the counts at a threshold."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score, roc_curve

MOST_POINTS = 300
"""Of a curve on the page; more cannot be seen."""


class Curve(NamedTuple):
    """Points from left to right, and the area below all of them (before some were left out)."""

    x: NDArray[np.float64]
    y: NDArray[np.float64]
    area: float


class Reliability(NamedTuple):
    """One bin of predicted probability: its mean, the share that was positive with a 95% interval, how many bags."""

    predicted: float
    positive: float
    low: float
    high: float
    bags: int


class Decisions(NamedTuple):
    """What calling bags positive at a threshold amounts to."""

    threshold: float
    true_positives: int
    false_negatives: int
    true_negatives: int
    false_positives: int

    @property
    def sensitivity(self) -> float:
        """Share of the positives that are found."""
        return self.true_positives / max(1, self.true_positives + self.false_negatives)

    @property
    def specificity(self) -> float:
        """Share of the negatives that are left alone."""
        return self.true_negatives / max(1, self.true_negatives + self.false_positives)


def roc(labels: NDArray[np.int64], scores: NDArray[np.float64]) -> Curve:
    """Sensitivity over the share of false alarms; area: AUC."""
    false_rate, true_rate, _ = roc_curve(labels, scores)
    return Curve(*_thinned(false_rate, true_rate), float(roc_auc_score(labels, scores)))


def precision_recall(labels: NDArray[np.int64], scores: NDArray[np.float64]) -> Curve:
    """Precision over recall, from high recall to none; area: average precision."""
    precision, recall, _ = precision_recall_curve(labels, scores, drop_intermediate=True)
    return Curve(*_thinned(recall, precision), float(average_precision_score(labels, scores)))


def reliability(labels: NDArray[np.int64], probabilities: NDArray[np.float64]) -> list[Reliability]:
    """How often bags of about one predicted probability were positive; five bins, ten from 200 bags on."""
    bins = 10 if labels.size >= 200 else 5
    place = np.minimum((probabilities * bins).astype(np.int64), bins - 1)
    found = []
    for number in np.unique(place):
        inside = place == number
        count, positive = int(inside.sum()), int(labels[inside].sum())
        interval = binomtest(positive, count).proportion_ci(method="wilson")
        mean = float(probabilities[inside].mean())
        found.append(Reliability(mean, positive / count, float(interval.low), float(interval.high), count))
    return found


def decisions(labels: NDArray[np.int64], scores: NDArray[np.float64], threshold: float) -> Decisions:
    """Counts when scores >= threshold are called positive."""
    called, positive = scores >= threshold, labels == 1
    return Decisions(
        threshold,
        int((called & positive).sum()),
        int((~called & positive).sum()),
        int((~called & ~positive).sum()),
        int((called & ~positive).sum()),
    )


def _thinned(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """At most `MOST_POINTS` of the points, evenly along the curve, with both ends."""
    if x.size <= MOST_POINTS:
        return x, y
    way = np.concatenate([[0.0], np.cumsum(np.hypot(np.diff(x), np.diff(y)))])
    wanted = np.linspace(0.0, way[-1], MOST_POINTS)
    chosen = np.unique(np.minimum(np.searchsorted(way, wanted), x.size - 1))
    chosen = np.union1d(chosen, [0, x.size - 1])
    return x[chosen], y[chosen]
