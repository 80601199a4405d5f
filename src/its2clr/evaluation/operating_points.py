"""Every way to cut a score in two, with its counts, and the cut that is best on validation."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_curve


class OperatingPoints(NamedTuple):
    """Counts when entries with score >= `scores[i]` are called positive, highest score first.

    `scores` holds each distinct score once; the last cut calls everything positive.
    """

    scores: NDArray[np.float64]
    true_positives: NDArray[np.float64]
    false_positives: NDArray[np.float64]
    positives: int
    negatives: int

    @property
    def balanced_accuracy(self) -> NDArray[np.float64]:
        """Mean of sensitivity and specificity; its best cut is Youden's."""
        sensitivity = self.true_positives / self.positives
        return (sensitivity + 1.0 - self.false_positives / self.negatives) / 2

    @property
    def f1(self) -> NDArray[np.float64]:
        """Harmonic mean of precision and recall."""
        return 2 * self.true_positives / (self.positives + self.true_positives + self.false_positives)

    @property
    def iou(self) -> NDArray[np.float64]:
        """Jaccard index of the called and the true positives."""
        return self.true_positives / (self.positives + self.false_positives)

    def best_threshold(self, quality: NDArray[np.float64]) -> float:
        """Gives the threshold t of the best cut; positive means score >= t.

        Any t between two neighbouring scores cuts the same; t is their midpoint, so that new scores near the
        cut fall to the nearer side. Of equally good cuts the highest is taken (fewest called positive). Below
        the lowest score there is no neighbour: t is that score itself. t is always finite.
        """
        best = int(np.flatnonzero(quality >= quality.max() - 1e-12)[0])
        upper = float(self.scores[best])
        if best + 1 == self.scores.size:
            return upper
        lower = float(self.scores[best + 1])
        middle = lower / 2 + upper / 2
        return middle if middle > lower else upper  # neighbouring floats have no number between them


def operating_points(labels: NDArray[np.int64], scores: NDArray[np.float64]) -> OperatingPoints:
    """Counts true and false positives at every distinct score. Both classes must be there."""
    false_rate, true_rate, thresholds = roc_curve(labels, scores, drop_intermediate=False)
    positives = int(labels.sum())
    negatives = labels.size - positives
    return OperatingPoints(  # the first point of roc_curve, at infinity, calls nothing positive
        scores=thresholds[1:],
        true_positives=np.rint(true_rate[1:] * positives),
        false_positives=np.rint(false_rate[1:] * negatives),
        positives=positives,
        negatives=negatives,
    )
