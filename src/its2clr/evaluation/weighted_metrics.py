"""Average precision, balanced accuracy and F1 of many resamples of bags at once: sorted once, counted by weight."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_CELLS = 2_000_000  # of resamples x bags held at once


def resampled_average_precision(
    labels: NDArray[np.int64], scores: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Gives, for each resample, the mean over retrainings of the average precision.

    Args:
        labels: (n,) bag labels, 0 or 1.
        scores: (S, n) scores of S retrainings.
        weights: (R, n) how often each resample drew each bag.

    Returns:
        (R,), nan where a resample holds no positive bag.
    """
    total = np.zeros(weights.shape[0])
    for one in scores:
        order = np.argsort(-one, kind="stable")
        ends = np.flatnonzero(np.append(np.diff(one[order]) != 0, True))  # bags of one score are called together
        for rows in _chunks(weights):
            drawn = weights[rows][:, order]
            called = np.cumsum(drawn, axis=1)[:, ends]
            right = np.cumsum(drawn * labels[order], axis=1)[:, ends]
            precision = np.divide(right, called, out=np.zeros_like(right), where=called > 0)
            total[rows] += (precision * np.diff(right, axis=1, prepend=0.0)).sum(axis=1)
    return _divided(total / len(scores), weights @ labels)


def resampled_decisions(
    labels: NDArray[np.int64], called: NDArray[np.bool_], weights: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Gives, for each resample, balanced accuracy and F1 of decisions already made, each a mean over retrainings.

    Args:
        labels: (n,) bag labels, 0 or 1.
        called: (S, n) whether each of S retrainings calls a bag positive.
        weights: (R, n) how often each resample drew each bag.

    Returns:
        (R,) of each, nan where a resample lacks a class; F1 is 0 where nothing is found.
    """
    positives, negatives = weights @ labels, weights @ (1 - labels)
    right = weights @ (called & (labels == 1)).T.astype(np.float64)  # (R, S) true positives
    wrong = weights @ (called & (labels == 0)).T.astype(np.float64)  # (R, S) false positives
    sensitivity = _divided(right.mean(axis=1), positives)
    specificity = 1.0 - _divided(wrong.mean(axis=1), negatives)
    f1 = _divided(2 * right, positives[:, None] + right + wrong).mean(axis=1)
    return (sensitivity + specificity) / 2, f1


def _divided(numbers: NDArray[np.float64], by: NDArray[np.float64]) -> NDArray[np.float64]:
    result = np.full(numbers.shape, np.nan)
    np.divide(numbers, by, out=result, where=by > 0)
    return result


def _chunks(weights: NDArray[np.float64]) -> Iterator[slice]:
    step = max(1, _CELLS // max(1, weights.shape[1]))
    return (slice(first, first + step) for first in range(0, weights.shape[0], step))
