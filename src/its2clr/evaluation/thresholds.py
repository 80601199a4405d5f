"""Where to cut scores in two: thresholds that are best on validation, and the best F1 of any cut."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from its2clr.evaluation.arrays import labels_and_scores


class Cuts(NamedTuple):
    """Counts when entries with score >= `scores[i]` are called positive, for each distinct score, highest first."""

    scores: NDArray[np.float64]
    true_positives: NDArray[np.float64]
    false_positives: NDArray[np.float64]
    positives: int
    negatives: int

    @property
    def auc(self) -> float:
        """Area under the ROC curve: the share of pairs of both classes that the scores rank right."""
        false, true = (np.append(0.0, counts) for counts in (self.false_positives, self.true_positives))
        area = (np.diff(false) * (true[1:] + true[:-1]) / 2).sum()
        return float(area / (self.positives * self.negatives))

    @property
    def average_precision(self) -> float:
        """Precision of every cut, weighted by the positives that it finds more than the cut before."""
        precision = self.true_positives / (self.true_positives + self.false_positives)
        return float((precision * np.diff(self.true_positives, prepend=0.0)).sum() / self.positives)


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
    cuts = every_cut(*labels_and_scores(labels, scores, "validation bags"))
    return _best(cuts, cuts.true_positives / cuts.positives - cuts.false_positives / cuts.negatives)


def iou_threshold(labels: ArrayLike, scores: ArrayLike) -> float:
    """The threshold with the highest IoU (Jaccard index) on validation instances; see `balanced_accuracy_threshold`."""
    cuts = every_cut(*labels_and_scores(labels, scores, "validation instances", unknown=True))
    return _best(cuts, cuts.true_positives / (cuts.positives + cuts.false_positives))


def max_f1(labels: ArrayLike, scores: ArrayLike) -> float:
    """The best F1 over all thresholds on these very instances (the paper's F1-score)."""
    cuts = every_cut(*labels_and_scores(labels, scores, "instances", unknown=True))
    return float((2 * cuts.true_positives / (cuts.positives + cuts.true_positives + cuts.false_positives)).max())


def every_cut(labels: NDArray[np.int64], scores: NDArray[np.float64]) -> Cuts:
    """What every cut calls right and wrong; by hand, because scikit-learn takes a second to be imported.

    Args:
        labels: (n,) 0 or 1, of both classes.
        scores: (n,) higher is more positive.
    """
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    last = np.flatnonzero(np.append(np.diff(ordered) != 0, True))  # entries of one score are called together
    true_positives = np.cumsum(labels[order])[last].astype(np.float64)
    positives = int(labels.sum())
    return Cuts(
        scores=ordered[last],
        true_positives=true_positives,
        false_positives=last + 1 - true_positives,
        positives=positives,
        negatives=labels.size - positives,
    )


def _best(cuts: Cuts, quality: NDArray[np.float64]) -> float:
    best = int(np.flatnonzero(quality >= quality.max() - 1e-12)[0])
    upper = float(cuts.scores[best])
    if best + 1 == cuts.scores.size:
        return upper
    lower = float(cuts.scores[best + 1])
    middle = lower / 2 + upper / 2
    return middle if middle > lower else upper  # neighbouring floats have no number between them
