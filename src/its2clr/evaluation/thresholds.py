"""Where to cut scores in two: thresholds that are best on validation, and the best F1 of any cut."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from its2clr.evaluation.arrays import labels_and_scores


class _Cuts(NamedTuple):
    """Counts when entries with score >= `scores[i]` are called positive, for each distinct score, highest first."""

    scores: NDArray[np.float64]
    true_positives: NDArray[np.float64]
    false_positives: NDArray[np.float64]
    positives: int
    negatives: int


def balanced_accuracy_threshold(labels: ArrayLike, scores: ArrayLike) -> float:
    """The threshold with the highest balanced accuracy on validation bags (Youden's).

    A bag is called positive when its score >= threshold. The threshold lies halfway between two neighbouring scores,
    so that a new score near it falls to the nearer side. Of equally good thresholds the highest is taken. It is always
    finite: if calling every bag positive is best, it is the lowest score.

    Args:
        labels: (n,) labels of validation bags, 0 or 1.
        scores: (n,) their scores, higher is more positive.

    Raises:
        InputError: If lengths differ, a label is not 0 or 1, a score is not finite, or a class is missing.
    """
    cuts = _cuts(*labels_and_scores(labels, scores, "validation bags"))
    return _best(cuts, cuts.true_positives / cuts.positives - cuts.false_positives / cuts.negatives)


def iou_threshold(labels: ArrayLike, scores: ArrayLike) -> float:
    """The threshold with the highest IoU (Jaccard index) on validation instances; see `balanced_accuracy_threshold`."""
    cuts = _cuts(*labels_and_scores(labels, scores, "validation instances", unknown=True))
    return _best(cuts, cuts.true_positives / (cuts.positives + cuts.false_positives))


def max_f1(labels: ArrayLike, scores: ArrayLike) -> float:
    """The best F1 over all thresholds on these very instances (the paper's F1-score)."""
    cuts = _cuts(*labels_and_scores(labels, scores, "instances", unknown=True))
    return float((2 * cuts.true_positives / (cuts.positives + cuts.true_positives + cuts.false_positives)).max())


def _cuts(labels: NDArray[np.int64], scores: NDArray[np.float64]) -> _Cuts:
    from sklearn.metrics import roc_curve

    false_rate, true_rate, thresholds = roc_curve(labels, scores, drop_intermediate=False)
    positives = int(labels.sum())
    negatives = labels.size - positives
    return _Cuts(  # the first point of roc_curve, at infinity, calls nothing positive
        scores=thresholds[1:],
        true_positives=np.rint(true_rate[1:] * positives),
        false_positives=np.rint(false_rate[1:] * negatives),
        positives=positives,
        negatives=negatives,
    )


def _best(cuts: _Cuts, quality: NDArray[np.float64]) -> float:
    best = int(np.flatnonzero(quality >= quality.max() - 1e-12)[0])
    upper = float(cuts.scores[best])
    if best + 1 == cuts.scores.size:
        return upper
    lower = float(cuts.scores[best + 1])
    middle = lower / 2 + upper / 2
    return middle if middle > lower else upper  # neighbouring floats have no number between them
