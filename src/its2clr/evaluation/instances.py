"""Instance predictions and pseudo labels against instance ground truth. Never used for training."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from its2clr.errors import InputError
from its2clr.evaluation.arrays import (
    UNKNOWN,
    bag_offsets,
    label_vector,
    labels_and_scores,
    require_both_classes,
    rows,
)
from its2clr.evaluation.dice import fit_dice, soft_dice
from its2clr.evaluation.thresholds import every_cut, iou_threshold, max_f1
from its2clr.evaluation.uncertainty import Interval, bootstrap_interval, weighted_auc

INSTANCE_METRICS = {"auc": "AUC", "auprc": "AUPRC", "max_f1": "max F1", "dice": "Dice", "iou": "IoU"}
"""Names of the metrics, and their headings in tables."""


def instance_metrics(
    labels: ArrayLike,
    scores: ArrayLike,
    validation_labels: ArrayLike | None = None,
    validation_scores: ArrayLike | None = None,
) -> dict[str, float]:
    """The metrics of one set of instances, pooled over bags.

    `max_f1` is the best F1 over all thresholds on these very instances (the paper's F1-score), so it reads their
    labels. `dice` and `iou` take their settings from validation alone: slope and intercept (`its2clr.evaluation.dice`
    says what they are), and the threshold from which on an instance is called positive.

    Args:
        labels: (n,) ground truth, 0 or 1, or -1 for unknown: those instances are left out.
        scores: (n,) probabilities (what this package passes) or logits.
        validation_labels: (m,) ground truth of validation instances, or None.
        validation_scores: (m,) their scores from the same model, or None.

    Returns:
        `auc`, `auprc` (average precision), `max_f1`; with validation also `dice`, `dice_slope`, `dice_intercept`,
        `iou` and `iou_threshold`.

    Raises:
        InputError: If lengths differ, a label is not -1, 0 or 1, a score is not finite, or fewer than two classes are
            known.
    """
    known_labels, known_scores = labels_and_scores(labels, scores, "instances", unknown=True)
    cuts = every_cut(known_labels, known_scores)
    metrics = {
        "auc": cuts.auc,
        "auprc": cuts.average_precision,
        "max_f1": max_f1(known_labels, known_scores),
    }
    if validation_labels is None and validation_scores is None:
        return metrics
    if validation_labels is None or validation_scores is None:
        missing = "validation_labels" if validation_labels is None else "validation_scores"
        raise InputError(f"expected validation labels and scores together, got no {missing}")
    threshold = iou_threshold(validation_labels, validation_scores)
    called = known_scores >= threshold
    fit = fit_dice(validation_labels, validation_scores)
    return metrics | {
        "dice": soft_dice(known_labels, known_scores, fit.slope, fit.intercept),
        "dice_slope": fit.slope,
        "dice_intercept": fit.intercept,
        "iou": float((called & (known_labels == 1)).sum() / (called | (known_labels == 1)).sum()),
        "iou_threshold": threshold,
    }


def instance_auc_interval(
    instance_labels: ArrayLike,
    instance_scores: ArrayLike,
    offsets: ArrayLike,
    *,
    resamples: int = 1000,
    seed: int = 0,
    groups: ArrayLike | None = None,
) -> Interval:
    """95% interval of the instance AUC, averaged over retrainings: bags are drawn with all their instances.

    Resamples are stratified by whether a bag holds a known positive.

    Args:
        instance_labels: (N,) ground truth, 0 or 1, or -1 for unknown (left out).
        instance_scores: (N,), or (S, N) for S retrainings on the same instances.
        offsets: (bags + 1,): bag b holds instances offsets[b] to offsets[b + 1].
        resamples: How many resamples.
        seed: Seed of the draws.
        groups: (bags,) the bags of a group, such as a patient, are drawn together.

    Raises:
        InputError: As `instance_metrics`, or if the offsets do not cover all instances.
    """
    labels = label_vector(instance_labels, "labels of instances", unknown=True)
    retrainings = rows(instance_scores, "scores of instances", labels.size)
    require_both_classes(labels, "instances")
    starts = bag_offsets(offsets, labels.size)
    n_bags = starts.size - 1
    known = labels != UNKNOWN
    bags = np.repeat(np.arange(n_bags), np.diff(starts))[known]
    labels, retrainings = labels[known], retrainings[:, known]
    return bootstrap_interval(
        lambda weights: np.mean([weighted_auc(labels, one, bags, weights) for one in retrainings], axis=0),
        np.bincount(bags, weights=labels, minlength=n_bags) > 0,
        resamples=resamples,
        seed=seed,
        groups=groups,
    )


def pseudo_label_quality(ground_truth: ArrayLike, probabilities: ArrayLike, selected: ArrayLike) -> dict[str, float]:
    """How right the pseudo labels selected in one round are.

    Instances of unknown ground truth are left out of every number.

    Args:
        ground_truth: (N,) 0 or 1, or -1 for unknown.
        probabilities: (N,) instance probabilities the pseudo labels come from.
        selected: (N,) 1 where an instance is selected as pseudo-positive, -1 as pseudo-negative, 0 where it is not.

    Returns:
        `precision`: share of selected pseudo-positives that are positive. `recall`: share of all positives that are
        selected as pseudo-positive; it rises as self-paced learning lets more in. `selected_recall`: share of the
        positives among the selected that are pseudo-positive. `negative_precision`: share of selected pseudo-negatives
        that are negative. `instance_auc`, `instance_max_f1`: of the probabilities of all instances. What would divide
        by zero (nothing selected) is nan.

    Raises:
        InputError: If lengths differ, a value is not allowed, or only one class is known.
    """
    labels = label_vector(ground_truth, "ground truth", unknown=True)
    known_labels, known_scores = labels_and_scores(labels, probabilities, "instances", unknown=True)
    chosen = label_vector(selected, "selected", labels.size, unknown=True)[labels != UNKNOWN]
    either = chosen != 0
    return {
        "precision": _precision(known_labels, chosen == 1),
        "recall": _recall(known_labels, chosen == 1),
        "selected_recall": _recall(known_labels[either], chosen[either] == 1),
        "negative_precision": _precision(1 - known_labels, chosen == -1),
        "instance_auc": every_cut(known_labels, known_scores).auc,
        "instance_max_f1": max_f1(known_labels, known_scores),
    }


def _precision(labels: NDArray[np.int64], called: NDArray[np.bool_]) -> float:
    return float(labels[called].mean()) if called.any() else float("nan")


def _recall(labels: NDArray[np.int64], called: NDArray[np.bool_]) -> float:
    return float(called[labels == 1].mean()) if labels.any() else float("nan")
