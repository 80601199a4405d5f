"""How right the pseudo labels of a round are, where instance ground truth exists. Never used for training."""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.metrics import precision_score, recall_score, roc_auc_score

from its2clr.errors import InputError
from its2clr.evaluation.arrays import UNKNOWN, label_vector, labels_and_scores, vector
from its2clr.evaluation.operating_points import operating_points


def pseudo_label_quality(
    ground_truth: ArrayLike,
    probabilities: ArrayLike,
    pseudo_positive_indices: ArrayLike,
    pseudo_negative_indices: ArrayLike,
) -> dict[str, float]:
    """Gives the quality of the pseudo labels selected in one round.

    Instances of unknown ground truth are left out of every number.

    Args:
        ground_truth: (N,) 0 or 1, or -1 for unknown.
        probabilities: (N,) instance probabilities the pseudo labels come from.
        pseudo_positive_indices: Instances selected as pseudo-positive, each once.
        pseudo_negative_indices: Instances selected as pseudo-negative, each once; none may be in both.

    Returns:
        `precision`: share of selected pseudo-positives that are positive. `recall`: share of all positives
        that are selected pseudo-positives; it rises as self-paced learning lets more in. `selected_recall`:
        share of the positives among the selected that are pseudo-positive. `negative_precision`: share of
        selected pseudo-negatives that are negative. `auc`, `max_f1`: of the probabilities on all instances.
        What divides by nothing (nothing selected) is nan.

    Raises:
        InputError: If lengths differ, an index is out of range or repeated, or only one class is known.
    """
    labels = label_vector(ground_truth, "ground truth", unknown=True)
    scores = vector(probabilities, "probabilities", labels.size)
    chosen = np.zeros(labels.size, dtype=np.int64)  # +1 pseudo-positive, -1 pseudo-negative, 0 not selected
    positive = _indices(pseudo_positive_indices, "pseudo_positive_indices", labels.size)
    negative = _indices(pseudo_negative_indices, "pseudo_negative_indices", labels.size)
    both = np.intersect1d(positive, negative)
    if both.size:
        raise InputError(f"pseudo labels: expected each instance on one side, got {both.size} on both")
    chosen[positive], chosen[negative] = 1, -1

    known = labels != UNKNOWN
    known_labels, known_scores = labels_and_scores(labels, scores, "instances", unknown=True)
    chosen = chosen[known]
    selected = chosen != 0
    return {
        "precision": _precision(known_labels, chosen == 1),
        "recall": _recall(known_labels, chosen == 1),
        "selected_recall": _recall(known_labels[selected], chosen[selected] == 1),
        "negative_precision": _precision(1 - known_labels, chosen == -1),
        "auc": float(roc_auc_score(known_labels, known_scores)),
        "max_f1": float(operating_points(known_labels, known_scores).f1.max()),
    }


def _indices(values: ArrayLike, name: str, length: int) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise InputError(f"{name}: expected one row of whole numbers, got {array.dtype} of shape {array.shape}")
    if array.min() < 0 or array.max() >= length:
        raise InputError(f"{name}: expected 0 to {length - 1}, got {array.min()} to {array.max()}")
    if np.unique(array).size != array.size:
        raise InputError(f"{name}: expected each instance once, got {array.size - np.unique(array).size} repeats")
    return array.astype(np.int64)


def _precision(labels: NDArray[np.int64], called: NDArray[np.bool_]) -> float:
    return float(precision_score(labels, called, zero_division=np.nan)) if called.any() else float("nan")


def _recall(labels: NDArray[np.int64], called: NDArray[np.bool_]) -> float:
    return float(recall_score(labels, called, zero_division=np.nan)) if labels.any() else float("nan")
