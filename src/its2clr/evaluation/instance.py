"""Metrics of instance predictions against ground truth, for localization."""

from numpy.typing import ArrayLike
from sklearn.metrics import average_precision_score, jaccard_score, roc_auc_score

from its2clr.evaluation.arrays import labels_and_scores, validation_pair
from its2clr.evaluation.dice import INTERCEPT_RANGE, SLOPE_RANGE, fit_dice, soft_dice
from its2clr.evaluation.operating_points import operating_points


def instance_metrics(
    labels: ArrayLike,
    scores: ArrayLike,
    validation_labels: ArrayLike | None = None,
    validation_scores: ArrayLike | None = None,
    *,
    slope_range: tuple[float, float] = SLOPE_RANGE,
    intercept_range: tuple[float, float] = INTERCEPT_RANGE,
) -> dict[str, float]:
    """Gives the metrics of one set of instances, pooled over bags.

    `max_f1` is the best F1 over all thresholds on these very instances (the paper's F1-score), so it reads
    their labels; `dice` and `iou` take their settings from validation alone (`its2clr.evaluation.dice` says
    why the ranges of slope and intercept are not as printed in the paper). An instance is called positive
    when its score >= `iou_threshold`, a midpoint between neighbouring validation scores.

    Args:
        labels: (n,) ground truth, 0 or 1, or -1 for unknown: those instances are left out.
        scores: (n,) probabilities (what this package passes) or logits.
        validation_labels: (m,) ground truth of validation instances, or None.
        validation_scores: (m,) their scores from the same model, or None.
        slope_range: Lowest and highest slope of the Dice fit.
        intercept_range: Lowest and highest intercept of the Dice fit.

    Returns:
        `auc`, `auprc` (average precision), `max_f1`; with validation also `dice`, `dice_slope`,
        `dice_intercept`, `iou` and `iou_threshold`.

    Raises:
        InputError: If lengths differ, a label is not -1, 0 or 1, a score is not finite, or fewer than two
            classes are known.
    """
    known_labels, known_scores = labels_and_scores(labels, scores, "instances", unknown=True)
    metrics = {
        "auc": float(roc_auc_score(known_labels, known_scores)),
        "auprc": float(average_precision_score(known_labels, known_scores)),
        "max_f1": float(operating_points(known_labels, known_scores).f1.max()),
    }
    validation = validation_pair(validation_labels, validation_scores)
    if validation is not None:
        tuning = labels_and_scores(*validation, "validation instances", unknown=True)
        fit = fit_dice(*tuning, slope_range, intercept_range)
        points = operating_points(*tuning)
        threshold = points.best_threshold(points.iou)
        metrics["dice"] = soft_dice(known_labels, known_scores, fit.slope, fit.intercept)
        metrics["dice_slope"], metrics["dice_intercept"] = fit.slope, fit.intercept
        metrics["iou"] = float(jaccard_score(known_labels, known_scores >= threshold, zero_division=0.0))
        metrics["iou_threshold"] = threshold
    return metrics
