"""Linear evaluation of frozen features: logistic regression on instance ground truth (appendix, tab:instance_test3).

The probe learns from the ground truth of training bags, takes its one setting from validation, and never sees
test instances: they come in only with `linear_probe_metrics`, when the probe is fitted.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler

from its2clr.errors import InputError
from its2clr.evaluation.arrays import UNKNOWN, bag_offsets, label_vector, labels_and_scores
from its2clr.evaluation.instance import instance_metrics
from its2clr.evaluation.separation import feature_matrix

C_GRID = (1e2, 1e3, 1e4)
"""Values of C tried on validation. Smaller ones rank about as well but press all probabilities towards the share of
positives, and the soft Dice, whose slope is bounded, then measures the regularisation and not the features."""
DEFAULT_C = 1e3
"""C where there is no validation."""

_ITERATIONS = 1000
_TOLERANCE = 1e-5  # at 1e-4 a fit that starts from the one before may stop where it starts
_ROWS = 8192  # scored at once


@dataclass(frozen=True, eq=False)
class LinearProbe:
    """A fitted logistic regression, in terms of the features as they come (the standardisation is folded in).

    Attributes:
        weights: (D,) one per feature.
        intercept: Logit of an instance whose features are all zero.
        c: Inverse strength of the regularisation it was fitted with, as `linear_probe` counts it.
        converged: Whether the optimiser met its tolerance within its iterations.
        validation_auc: Instance AUC on validation for each C tried; empty where C was fixed.
    """

    weights: NDArray[np.float64]
    intercept: float
    c: float
    converged: bool
    validation_auc: dict[float, float] = field(default_factory=dict)

    def logits(self, features: ArrayLike) -> NDArray[np.float64]:
        """Gives (N,) logits of (N, D) features; they rank where probabilities round to one."""
        matrix = feature_matrix(features, "features")
        if matrix.shape[1] != self.weights.size:
            raise InputError(f"features: expected {self.weights.size} per instance, got {matrix.shape[1]}")
        logits = np.empty(matrix.shape[0])
        for first in range(0, logits.size, _ROWS):
            block = slice(first, first + _ROWS)
            logits[block] = matrix[block].astype(np.float64) @ self.weights + self.intercept
        return logits

    def scores(self, features: ArrayLike) -> NDArray[np.float64]:
        """Gives (N,) probabilities of being positive, for (N, D) features."""
        return np.asarray(expit(self.logits(features)), dtype=np.float64)


def linear_probe(
    train_features: ArrayLike,
    train_labels: ArrayLike,
    validation_features: ArrayLike | None = None,
    validation_labels: ArrayLike | None = None,
    *,
    c: float | Sequence[float] | None = None,
    class_weight: Literal["balanced"] | None = None,
) -> LinearProbe:
    """Fits an l2-regularised logistic regression on frozen features.

        minimise over w, b:   mean over instances of log loss(y, w x + b)  +  |w|^2 / (2 C)

    with x the features standardised by mean and deviation of the labelled training instances. The mean makes C
    mean the same for small and large cohorts; scikit-learn, which sums, calls C / N what is C here. Of several C
    the one with the highest instance AUC on validation is taken, of equally good ones that with the lowest log
    loss there. Deterministic. Works in float32, or in float64 where the training features are float64.
    150,000 x 512 in float32 take about 20 s for the grid on two busy cores, 5 s for one C.

    Args:
        train_features: (N, D) features of the instances of training bags.
        train_labels: (N,) their ground truth, 0 or 1, or -1 for unknown: those instances are left out.
        validation_features: (M, D) features of the instances of validation bags, or None.
        validation_labels: (M,) their ground truth, 0 or 1, or -1 for unknown, or None.
        c: Inverse strength of the regularisation. A number fixes it; several are chosen from on validation; None
            means `C_GRID` with validation and `DEFAULT_C` without.
        class_weight: "balanced" gives both classes the same total weight; None counts every instance once.

    Raises:
        InputError: If shapes or labels do not fit, fewer than two classes are known in training or validation, a
            C is not positive, or there are several C and no validation to choose on.
    """
    if class_weight not in (None, "balanced"):
        raise InputError(f"class_weight: expected 'balanced' or None, got {class_weight!r}")
    features, labels = _known(train_features, train_labels, "training instances")
    validation = _validation(validation_features, validation_labels, features.shape[1])
    candidates = _candidates(c, has_validation=validation is not None)

    scaler = StandardScaler(copy=False)
    standardised = scaler.fit_transform(features)
    model = LogisticRegression(
        solver="lbfgs", class_weight=class_weight, tol=_TOLERANCE, max_iter=_ITERATIONS, warm_start=True
    )
    probes = [_fit(model, candidate, standardised, labels, scaler) for candidate in candidates]
    if validation is None or len(probes) == 1:
        return probes[0]
    logits = {probe.c: probe.logits(validation[0]) for probe in probes}
    aucs = {c: float(roc_auc_score(validation[1], found)) for c, found in logits.items()}
    losses = {c: float(np.logaddexp(0, np.where(validation[1] == 1, -z, z)).mean()) for c, z in logits.items()}
    return replace(max(probes, key=lambda probe: (aucs[probe.c], -losses[probe.c])), validation_auc=aucs)


def linear_probe_metrics(
    probe: LinearProbe,
    features: ArrayLike,
    labels: ArrayLike,
    offsets: ArrayLike,
    bag_labels: ArrayLike,
    validation_features: ArrayLike | None = None,
    validation_labels: ArrayLike | None = None,
) -> dict[str, float]:
    """Gives the metrics of a fitted probe on a set of bags.

    A bag scores as high as its highest instance (of known label or not); logits are compared, since the highest
    probabilities of large bags may all round to one.

    Args:
        probe: From `linear_probe`.
        features: (N, D) features of the instances, bag by bag.
        labels: (N,) their ground truth, 0 or 1, or -1 for unknown: left out of the instance metrics.
        offsets: (bags + 1,): bag b holds instances offsets[b] to offsets[b + 1], at least one.
        bag_labels: (bags,) 0 or 1.
        validation_features: (M, D) features of the instances of validation bags, for Dice and IoU, or None.
        validation_labels: (M,) their ground truth, or None.

    Returns:
        `bag_auc` and what `instance_metrics` gives: `auc`, `auprc`, `max_f1`; with validation also `dice`, `iou`
        and their settings.

    Raises:
        InputError: If shapes or labels do not fit, a bag is empty, or a class is missing.
    """
    truth = label_vector(labels, "labels of instances", unknown=True)
    logits = probe.logits(feature_matrix(features, "features of instances", truth.size))
    starts = bag_offsets(offsets, truth.size)
    empty = np.flatnonzero(np.diff(starts) == 0)
    if empty.size:
        raise InputError(f"offsets: expected an instance in every bag, got none in {empty.size}, first bag {empty[0]}")
    known_bag_labels, bag_logits = labels_and_scores(bag_labels, np.maximum.reduceat(logits, starts[:-1]), "bags")
    validation = _validation(validation_features, validation_labels, probe.weights.size)
    tuning = () if validation is None else (validation[1], probe.scores(validation[0]))
    metrics = instance_metrics(truth, expit(logits), *tuning)
    metrics["bag_auc"] = float(roc_auc_score(known_bag_labels, bag_logits))
    return metrics


def _fit(
    model: LogisticRegression, c: float, standardised: NDArray[Any], labels: NDArray[np.int64], scaler: StandardScaler
) -> LinearProbe:
    """Fits on standardised features, from where `model` stands, and gives the probe of features as they come."""
    model.set_params(C=c / labels.size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # said by `converged`
        model.fit(standardised, labels)
    weights = model.coef_[0].astype(np.float64) / scaler.scale_
    return LinearProbe(
        weights=weights,
        intercept=float(model.intercept_[0]) - float(scaler.mean_ @ weights),
        c=c,
        converged=bool(model.n_iter_[0] < _ITERATIONS),
    )


def _known(features: ArrayLike, labels: ArrayLike, name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Gives a copy of the features of known label, in float32 or float64, and these labels, of both classes."""
    all_labels = label_vector(labels, f"labels of {name}", unknown=True)
    matrix = feature_matrix(features, f"features of {name}", all_labels.size)
    known = all_labels != UNKNOWN
    known_labels, _ = labels_and_scores(all_labels, np.zeros(all_labels.size), name, unknown=True)
    precision = np.float64 if matrix.dtype == np.float64 else np.float32
    return matrix[known].astype(precision, copy=False), known_labels


def _validation(
    features: ArrayLike | None, labels: ArrayLike | None, width: int
) -> tuple[NDArray[Any], NDArray[np.int64]] | None:
    """Gives validation features and labels that are known, or None when neither was given."""
    if features is None and labels is None:
        return None
    if features is None or labels is None:
        missing = "validation_features" if features is None else "validation_labels"
        raise InputError(f"expected validation features and labels together, got no {missing}")
    matrix, known_labels = _known(features, labels, "validation instances")
    if matrix.shape[1] != width:
        raise InputError(f"features of validation instances: expected {width} per instance, got {matrix.shape[1]}")
    return matrix, known_labels


def _candidates(c: float | Sequence[float] | None, *, has_validation: bool) -> list[float]:
    """Gives the C to try, each once; rising, so that each fit starts near its solution."""
    if c is None:
        return list(C_GRID) if has_validation else [DEFAULT_C]
    values = np.unique(np.asarray(c, dtype=np.float64))
    if values.size == 0 or not np.all(np.isfinite(values) & (values > 0)):
        raise InputError(f"c: expected positive numbers, got {c}")
    if values.size > 1 and not has_validation:
        raise InputError(f"c: expected one number where there is no validation to choose on, got {values.size}")
    return [float(value) for value in values]
