"""Calibration of bag probabilities, fitted on validation bags alone: Platt scaling, guarded for few or separable bags.

The calibrated probability is `expit(slope * logit(p) + intercept)`. Slope and intercept minimise the cross-entropy on
the validation bags with two guards:

- Targets are Platt's: (n+ + 1) / (n+ + 2) for the n+ positive bags and 1 / (n- + 2) for the n- negative ones, in place
  of 1 and 0. Bags that a threshold separates would otherwise drive the slope to infinity; and the fewer bags there are,
  the less extreme a probability can become.
- The slope is not negative, so that calibration never reverses the order of bags. It is pulled weakly towards 1, which
  decides it when all bags have the same score.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize
from scipy.special import expit, logit
from sklearn.metrics import brier_score_loss
from sklearn.model_selection import StratifiedKFold

from its2clr.evaluation.arrays import labels_and_scores

SLOPE_PENALTY = 1e-3
CERTAIN = 1e-6
"""Probabilities are kept this far from 0 and 1, where logits are infinite."""
BINS = 10
FOLDS = 10


@dataclass(frozen=True)
class Calibration:
    """A fitted calibration, and how good it is on the validation bags.

    Attributes:
        slope: Factor of the logit; 1 and intercept 0 leave probabilities as they are.
        intercept: Added to it.
        bags: How many validation bags it was fitted on.
        positive_bags: How many of them are positive.
        brier_before: Brier score (mean squared error) of the raw probabilities.
        brier_after: Brier score of the calibrated ones; a little too good, since they were fitted on the same bags.
        brier_left_out: The same in cross-validation, each bag calibrated by a fit without it; None with too few bags.
        calibration_error_before: Expected calibration error of the raw probabilities, see `calibration_error`.
        calibration_error_after: The same of the calibrated ones.
    """

    slope: float
    intercept: float
    bags: int = 0
    positive_bags: int = 0
    brier_before: float | None = None
    brier_after: float | None = None
    brier_left_out: float | None = None
    calibration_error_before: float | None = None
    calibration_error_after: float | None = None

    def apply(self, probability: ArrayLike) -> NDArray[np.float64]:
        """Calibrated probabilities of raw ones."""
        return np.asarray(expit(self.slope * _logit(probability) + self.intercept), dtype=np.float64)

    def as_dict(self) -> dict[str, Any]:
        """For the model file."""
        return asdict(self)


def fit_calibration(labels: ArrayLike, probability: ArrayLike) -> Calibration:
    """Fit a calibration on validation bags and measure it.

    Args:
        labels: (n,) 0 or 1, both there.
        probability: (n,) raw bag probabilities.

    Raises:
        InputError: If lengths differ, a class is missing or a probability is not finite.
    """
    truth, raw = labels_and_scores(labels, probability, "validation bags")
    slope, intercept = _fit(truth, raw)
    fitted = Calibration(slope, intercept)
    calibrated = fitted.apply(raw)
    return Calibration(
        slope,
        intercept,
        bags=truth.size,
        positive_bags=int(truth.sum()),
        brier_before=float(brier_score_loss(truth, raw)),
        brier_after=float(brier_score_loss(truth, calibrated)),
        brier_left_out=_left_out(truth, raw),
        calibration_error_before=calibration_error(truth, raw),
        calibration_error_after=calibration_error(truth, calibrated),
    )


def calibration_error(labels: ArrayLike, probability: ArrayLike, bins: int = BINS) -> float:
    """Expected calibration error: |share of positives - mean probability|, mean over bins weighted by their bags.

    Each bin holds the same number of bags: with bins of equal width, most would be empty in a small validation set.
    """
    truth, scores = np.asarray(labels, dtype=np.float64), np.asarray(probability, dtype=np.float64)
    parts = np.array_split(np.argsort(scores, kind="stable"), min(bins, len(scores)))
    return float(sum(abs((truth[part] - scores[part]).sum()) for part in parts) / len(scores))


def _fit(truth: NDArray[np.int64], raw: NDArray[np.float64]) -> tuple[float, float]:
    positives = int(truth.sum())
    negatives = truth.size - positives
    targets = np.where(truth == 1, (positives + 1) / (positives + 2), 1 / (negatives + 2))
    z = _logit(raw)

    def loss(parameters: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        slope, intercept = parameters
        scaled = slope * z + intercept
        penalty = SLOPE_PENALTY / 2 * (slope - 1) ** 2
        value = float((np.logaddexp(0, scaled) - targets * scaled).sum() + penalty)
        error = expit(scaled) - targets
        return value, np.array([(error * z).sum() + SLOPE_PENALTY * (slope - 1), error.sum()])

    found = minimize(
        loss,
        np.array([1.0, 0.0]),
        jac=True,
        method="L-BFGS-B",
        bounds=[(0.0, None), (None, None)],
        options={"maxiter": 1000, "ftol": 1e-15, "gtol": 1e-9},
    )
    return float(found.x[0]), float(found.x[1])


def _left_out(truth: NDArray[np.int64], raw: NDArray[np.float64]) -> float | None:
    folds = min(FOLDS, int(truth.sum()), int((1 - truth).sum()))
    if folds < 2:
        return None
    calibrated = np.empty_like(raw)
    for fitted_on, left_out in StratifiedKFold(folds, shuffle=True, random_state=0).split(raw, truth):
        calibrated[left_out] = Calibration(*_fit(truth[fitted_on], raw[fitted_on])).apply(raw[left_out])
    return float(brier_score_loss(truth, calibrated))


def _logit(probability: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(logit(np.clip(np.asarray(probability, dtype=np.float64), CERTAIN, 1 - CERTAIN)))
