"""Metrics of bag predictions."""

from numpy.typing import ArrayLike
from sklearn.metrics import average_precision_score, balanced_accuracy_score, f1_score, roc_auc_score

from its2clr.evaluation.arrays import labels_and_scores, validation_pair
from its2clr.evaluation.operating_points import operating_points


def bag_metrics(
    labels: ArrayLike,
    scores: ArrayLike,
    validation_labels: ArrayLike | None = None,
    validation_scores: ArrayLike | None = None,
) -> dict[str, float]:
    """Gives the metrics of one set of bags.

    The threshold is chosen on validation bags alone: the one that maximises balanced accuracy (Youden's), at
    the midpoint between the two neighbouring scores; of equally good ones the highest. A bag is called
    positive when its score >= threshold.

    Args:
        labels: (n,) bag labels, 0 or 1.
        scores: (n,) probabilities or any real score, higher is more positive.
        validation_labels: (m,) labels of the validation bags, or None.
        validation_scores: (m,) scores of the validation bags from the same model, or None.

    Returns:
        `auc`, `auprc` (average precision); with validation also `balanced_accuracy` and `f1` at the
        `threshold`.

    Raises:
        InputError: If lengths differ, a label is not 0 or 1, a score is not finite, or a class is missing.

    Example:
        >>> bag_metrics([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8])["auc"]
        0.75
    """
    bag_labels, bag_scores = labels_and_scores(labels, scores, "bags")
    metrics = {
        "auc": float(roc_auc_score(bag_labels, bag_scores)),
        "auprc": float(average_precision_score(bag_labels, bag_scores)),
    }
    validation = validation_pair(validation_labels, validation_scores)
    if validation is not None:
        points = operating_points(*labels_and_scores(*validation, "validation bags"))
        threshold = points.best_threshold(points.balanced_accuracy)
        called = bag_scores >= threshold
        metrics["balanced_accuracy"] = float(balanced_accuracy_score(bag_labels, called))
        metrics["f1"] = float(f1_score(bag_labels, called, zero_division=0.0))
        metrics["threshold"] = threshold
    return metrics
