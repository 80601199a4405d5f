"""Checks shared by every metric: shapes, lengths, finite scores, labels of two classes."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from its2clr.errors import InputError

UNKNOWN = -1
"""Ground-truth label of an instance that nobody annotated."""


def finite_array(values: ArrayLike, name: str) -> NDArray[np.float64]:
    """Gives `values` as float64.

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
    """Gives `values` as a one-dimensional float64 array, of `length` entries where one is asked for."""
    array = finite_array(values, name)
    if array.ndim != 1:
        raise InputError(f"{name}: expected one dimension, got shape {array.shape}")
    if length is not None and array.size != length:
        raise InputError(f"{name}: expected {length} entries, got {array.size}")
    return array


def rows(values: ArrayLike, name: str, length: int) -> NDArray[np.float64]:
    """Gives (n,) or (S, n) as (S, n), n being `length`."""
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
    """Gives labels as int64, each 0 or 1, and `UNKNOWN` where `unknown` allows it."""
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
    """Gives the labels and scores that count: same length, both classes there, unknown labels left out.

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
    known = known_labels != UNKNOWN
    known_labels, known_scores = known_labels[known], known_scores[known]
    positives = int(known_labels.sum())
    negatives = known_labels.size - positives
    if positives == 0 or negatives == 0:
        raise InputError(f"{name}: expected labels of both classes, got {positives} positive and {negatives} negative")
    return known_labels, known_scores


def bag_offsets(offsets: ArrayLike, instances: int) -> NDArray[np.int64]:
    """Gives offsets as int64: bag b holds instances offsets[b] to offsets[b + 1], and all are covered."""
    array = vector(offsets, "offsets").astype(np.int64)
    if array.size < 2 or array[0] != 0 or array[-1] != instances or np.any(np.diff(array) < 0):
        ends = f"{array[0]} to {array[-1]}" if array.size else "nothing"
        raise InputError(f"offsets: expected to rise from 0 to {instances} instances, got {array.size} from {ends}")
    return array


def validation_pair(
    validation_labels: ArrayLike | None, validation_scores: ArrayLike | None
) -> tuple[ArrayLike, ArrayLike] | None:
    """Gives both, or None when neither was given; one without the other is an error."""
    if validation_labels is None and validation_scores is None:
        return None
    if validation_labels is None or validation_scores is None:
        missing = "validation_labels" if validation_labels is None else "validation_scores"
        raise InputError(f"expected validation labels and scores together, got no {missing}")
    return validation_labels, validation_scores
