"""The paper's soft Dice score and the two numbers fitted for it (appendix, Instance-level Evaluation).

Dice = 2 sum(y p) / (sum(y) + sum(p)) with p = sigmoid(a s + b), where a and b maximise Dice on validation.

The paper prints a in [-5, 5] and b in [0.1, 10]. If s is a probability and a >= 0, every p is then above
sigmoid(0.1) = 0.52, and Dice cannot pass 2 w / (2 w + 0.52 (1 - w)), w being the share of positives: 0.17 at 5%, while
the paper reports 0.31 to 0.63. If s is a logit, the printed ranges work, but Dice comes close to the best F1, and the
paper's Dice lies far below its F1. Swapped ranges with s a probability fit the reported numbers best, so the defaults
are slope a in [0.1, 10] and intercept b in [-5, 5]. The ranges are arguments, for those who read the paper otherwise.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from its2clr.errors import InputError
from its2clr.evaluation.arrays import labels_and_scores

SLOPE_RANGE = (0.1, 10.0)
INTERCEPT_RANGE = (-5.0, 5.0)
GRID = 15
"""Slopes, and intercepts, of the grid whose best point is refined."""


class DiceFit(NamedTuple):
    """The slope and intercept that maximise Dice, and that Dice."""

    slope: float
    intercept: float
    dice: float


def soft_dice(labels: ArrayLike, scores: ArrayLike, slope: float, intercept: float) -> float:
    """2 sum(y p) / (sum(y) + sum(p)) with p = sigmoid(slope * scores + intercept); label -1 is left out."""
    return -_negative_dice((slope, intercept), *labels_and_scores(labels, scores, "instances", unknown=True))


def fit_dice(
    labels: ArrayLike,
    scores: ArrayLike,
    slope_range: tuple[float, float] = SLOPE_RANGE,
    intercept_range: tuple[float, float] = INTERCEPT_RANGE,
) -> DiceFit:
    """Find the slope and intercept within their ranges that maximise the soft Dice.

    A grid over both, then bounded quasi-Newton steps from its best point. Deterministic; 250,000 instances take about
    half a second. As a function of both, Dice has one peak where scores are probabilities; where they are logits of few
    instances it may have several, and the highest may be missed (in 10 of 360 drawn sets, by 0.02 at most).

    Args:
        labels: (n,) ground truth of instances, 0 or 1, or -1 for unknown (left out).
        scores: (n,) probabilities (what this package passes) or logits.
        slope_range: Lowest and highest slope a.
        intercept_range: Lowest and highest intercept b.

    Raises:
        InputError: If a range is empty, or labels and scores do not fit.
    """
    from scipy.optimize import brute, minimize

    for name, (low, high) in (("slope_range", slope_range), ("intercept_range", intercept_range)):
        if not (np.isfinite([low, high]).all() and low < high):
            raise InputError(f"{name}: expected low < high, got {low} and {high}")
    known = labels_and_scores(labels, scores, "instances", unknown=True)
    ranges = (slope_range, intercept_range)
    options = {"ftol": 1e-13, "gtol": 1e-9}  # Dice is flat near its best; the defaults stop early
    refine = partial(minimize, method="L-BFGS-B", bounds=ranges, options=options)
    slope, intercept = brute(_negative_dice, ranges, args=known, Ns=GRID, finish=refine)
    return DiceFit(float(slope), float(intercept), -_negative_dice((slope, intercept), *known))


def _negative_dice(
    point: tuple[float, float] | NDArray[np.float64], labels: NDArray[np.int64], scores: NDArray[np.float64]
) -> float:
    from scipy.special import expit

    probabilities = expit(point[0] * scores + point[1])
    return float(-2 * probabilities[labels == 1].sum() / (labels.sum() + probabilities.sum()))
