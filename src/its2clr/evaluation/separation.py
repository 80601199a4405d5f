"""How far the two classes of instances lie apart, and how far each spreads (the paper's table of class collision)."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import eigvalsh

from its2clr.errors import InputError
from its2clr.evaluation.arrays import label_vector

_ROWS = 8192  # taken to float64 at once: 32 MiB at 512 features


class ClassSeparation(NamedTuple):
    """Distance between the classes and deviation within each, in units of the features."""

    inter_class_distance: float
    positive_deviation: float
    negative_deviation: float


def class_separation(features: ArrayLike, labels: ArrayLike) -> ClassSeparation:
    """Gives how well separated the classes are in feature space (section 2).

        inter_class_distance = || mean(positives) - mean(negatives) ||_2
        deviation of a class = sqrt(largest eigenvalue of its covariance matrix)

    The deviation is the standard deviation along the direction in which the class spreads most. The covariance
    is the unbiased one (divided by n - 1, as `numpy.cov` does by default; the paper does not say which); a class
    of one instance therefore has no deviation: nan. Features are taken as they are: normalise them first if two
    encoders of different scale are to be compared.

    Takes two passes in float64 over blocks of rows, so no copy of all features is made, and a large mean does
    not drown a small deviation; 250,000 x 512 take about 4 s on two busy cores.

    Args:
        features: (N, D) features of the instances, of any float precision.
        labels: (N,) ground truth, 0 or 1, or -1 for unknown: those instances are left out.

    Raises:
        InputError: If the shapes do not fit, a label is not -1, 0 or 1, a feature is not finite, or fewer than
            two classes are known.

    Example:
        >>> class_separation([[0, 0], [2, 0], [4, 3], [4, 5]], [0, 0, 1, 1]).inter_class_distance
        5.0
    """
    known_labels = label_vector(labels, "labels of instances", unknown=True)
    matrix = feature_matrix(features, "features of instances", known_labels.size)
    positive, negative = np.flatnonzero(known_labels == 1), np.flatnonzero(known_labels == 0)
    if positive.size == 0 or negative.size == 0:
        raise InputError(
            f"instances: expected labels of both classes, got {positive.size} positive and {negative.size} negative"
        )
    positive_mean, negative_mean = _mean(matrix, positive), _mean(matrix, negative)
    return ClassSeparation(
        inter_class_distance=float(np.linalg.norm(positive_mean - negative_mean)),
        positive_deviation=_deviation(matrix, positive, positive_mean),
        negative_deviation=_deviation(matrix, negative, negative_mean),
    )


def feature_matrix(features: ArrayLike, name: str, length: int | None = None) -> NDArray[Any]:
    """Gives features as a (rows, D) array of numbers: float arrays as they are, all else as float64.

    Unlike `finite_array` this copies nothing: features are the largest arrays there are.

    Raises:
        InputError: If they are not a matrix, have not `length` rows or no column, or some are nan or infinite.
    """
    try:
        array = np.asarray(features)
        if not np.issubdtype(array.dtype, np.floating):
            array = array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: expected numbers in equally long rows, got {type(features).__name__}") from error
    wanted = "rows" if length is None else length
    if array.ndim != 2 or array.shape[1] == 0 or (length is not None and array.shape[0] != length):
        raise InputError(f"{name}: expected shape ({wanted}, features), got {array.shape}")
    blocks = (array[first : first + _ROWS] for first in range(0, array.shape[0], _ROWS))
    wrong = sum(int(np.count_nonzero(~np.isfinite(block))) for block in blocks)
    if wrong:
        raise InputError(f"{name}: expected finite numbers, got {wrong} of {array.size} that are nan or infinite")
    return array


def _mean(features: NDArray[Any], chosen: NDArray[np.int64]) -> NDArray[np.float64]:
    total = np.zeros(features.shape[1])
    for block in _blocks(features, chosen):
        total += block.sum(axis=0)
    return total / chosen.size


def _deviation(features: NDArray[Any], chosen: NDArray[np.int64], mean: NDArray[np.float64]) -> float:
    """Gives the square root of the spectral norm of the covariance of the chosen rows; nan for one row."""
    if chosen.size == 1:
        return float("nan")
    width = features.shape[1]
    scatter = np.zeros((width, width))
    for block in _blocks(features, chosen):
        centred = np.subtract(block, mean, out=block)
        scatter += centred.T @ centred
    largest = eigvalsh(scatter / (chosen.size - 1), subset_by_index=[width - 1, width - 1])[0]
    return float(np.sqrt(max(largest, 0.0)))  # rounding may leave it just below zero where all rows are equal


def _blocks(features: NDArray[Any], chosen: NDArray[np.int64]) -> Iterator[NDArray[np.float64]]:
    """Gives the chosen rows, some at a time, each a fresh float64 array."""
    for first in range(0, chosen.size, _ROWS):
        yield features[chosen[first : first + _ROWS]].astype(np.float64)
