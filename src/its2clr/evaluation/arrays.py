"""Checks shared by every metric: shapes, lengths, finite scores, labels of two classes."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from its2clr.errors import InputError

UNKNOWN = -1
"""Ground-truth label of an instance that nobody annotated."""
ROWS_AT_ONCE = 8192
"""Rows of features that are looked at or taken to float64 at once: 32 MiB at 512 features."""


def finite_array(values: ArrayLike, name: str) -> NDArray[np.float64]:
    """`values` as float64.

    Raises:
        InputError: If they are not numbers, or some are nan or infinite.
    """
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: expected numbers in equally long rows, got {type(values).__name__}") from error
    wrong = int(np.count_nonzero(~np.isfinite(array)))
    if wrong:
        raise InputError(f"{name}: expected finite numbers, got {wrong} of {array.size} that are nan or infinite")
    return array


def vector(values: ArrayLike, name: str, length: int | None = None) -> NDArray[np.float64]:
    """`values` as a one-dimensional float64 array, of `length` entries if a length is given."""
    array = finite_array(values, name)
    if array.ndim != 1:
        raise InputError(f"{name}: expected one dimension, got shape {array.shape}")
    if length is not None and array.size != length:
        raise InputError(f"{name}: expected {length} entries, got {array.size}")
    return array


def rows(values: ArrayLike, name: str, length: int) -> NDArray[np.float64]:
    """(n,) or (S, n) values as (S, n) float64, where n must be `length`."""
    array = finite_array(values, name)
    if array.ndim == 1:
        array = array[None, :]
    if array.ndim != 2 or array.shape[1] != length or array.shape[0] == 0:
        shape = np.shape(values)
        raise InputError(f"{name}: expected shape ({length},) or (retrainings, {length}), got {shape}")
    return array


def label_vector(
    labels: ArrayLike, name: str, length: int | None = None, *, unknown: bool = False
) -> NDArray[np.int64]:
    """Labels as int64, each 0 or 1, or `UNKNOWN` where `unknown` allows it."""
    array = vector(labels, name, length)
    allowed = (UNKNOWN, 0, 1) if unknown else (0, 1)
    strange = np.setdiff1d(array, allowed)
    if strange.size:
        shown = ", ".join(f"{value:g}" for value in strange[:3])
        raise InputError(f"{name}: expected labels among {allowed}, got {shown}")
    return array.astype(np.int64)


def labels_and_scores(
    labels: ArrayLike, scores: ArrayLike, name: str, *, unknown: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Labels and scores that count: of the same length, with both classes, without unknown labels.

    Args:
        labels: (n,) of 0 and 1, and -1 for unknown where `unknown` allows it.
        scores: (n,) finite numbers, higher is more positive.
        name: What these are, for the message ("test bags").
        unknown: Whether -1 is allowed; those entries are left out.

    Raises:
        InputError: If lengths differ, a label or score is not allowed, or fewer than two classes remain.
    """
    known_labels = label_vector(labels, f"labels of {name}", unknown=unknown)
    known_scores = vector(scores, f"scores of {name}", known_labels.size)
    require_both_classes(known_labels, name)
    known = known_labels != UNKNOWN
    return known_labels[known], known_scores[known]


def both_classes(labels: ArrayLike) -> bool:
    """Whether there are known labels of both classes."""
    return bool(np.isin([0, 1], labels).all())


def require_both_classes(labels: NDArray[np.int64], name: str) -> None:
    """Raise an `InputError` unless there are known labels of both classes."""
    if not both_classes(labels):
        positives, negatives = int((labels == 1).sum()), int((labels == 0).sum())
        raise InputError(f"{name}: expected labels of both classes, got {positives} positive and {negatives} negative")


def bag_offsets(offsets: ArrayLike, instances: int) -> NDArray[np.int64]:
    """Offsets as int64: bag b holds instances offsets[b] to offsets[b + 1], and every instance is in a bag."""
    array = vector(offsets, "offsets").astype(np.int64)
    if array.size < 2 or array[0] != 0 or array[-1] != instances or np.any(np.diff(array) < 0):
        ends = f"{array[0]} to {array[-1]}" if array.size else "nothing"
        raise InputError(f"offsets: expected to rise from 0 to {instances} instances, got {array.size} from {ends}")
    return array


def feature_matrix(features: ArrayLike, name: str, length: int | None = None) -> NDArray[Any]:
    """Features as a (rows, D) array of numbers: float arrays as they are, anything else as float64.

    Unlike `finite_array` it does not copy float arrays: features are the largest arrays there are.

    Raises:
        InputError: If they are not a matrix of `length` rows and at least one column, or some are nan or infinite.
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
    blocks = (array[first : first + ROWS_AT_ONCE] for first in range(0, array.shape[0], ROWS_AT_ONCE))
    wrong = sum(int(np.count_nonzero(~np.isfinite(block))) for block in blocks)
    if wrong:
        raise InputError(f"{name}: expected finite numbers, got {wrong} of {array.size} that are nan or infinite")
    return array
