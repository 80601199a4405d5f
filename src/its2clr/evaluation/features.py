"""How good frozen features are, against instance ground truth: class separation, and a linear probe.

Class separation is the paper's table of class collision: how far the two classes lie apart, and how far each spreads.
The linear probe is its linear evaluation (appendix, tab:instance_test3): a logistic regression that learns from the
ground truth of training bags and takes its one setting from validation. It never sees test instances: they come in only
with `linear_probe_metrics`, when the probe is fitted.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from its2clr.errors import InputError
from its2clr.evaluation.arrays import (
    ROWS_AT_ONCE,
    UNKNOWN,
    bag_offsets,
    feature_matrix,
    label_vector,
    labels_and_scores,
    require_both_classes,
)
from its2clr.evaluation.instances import instance_metrics

C_GRID = (1e2, 1e3, 1e4)
"""Values of C tried on validation. Smaller ones rank about as well but press all probabilities towards the share of
positives, and the soft Dice, whose slope is bounded, then measures the regularisation and not the features."""
DEFAULT_C = 1e3
"""C where there is no validation."""

_ITERATIONS = 1000
_TOLERANCE = 1e-5  # at 1e-4 a fit that starts from the one before may stop where it starts


class ClassSeparation(NamedTuple):
    """Distance between the classes and deviation within each, in units of the features."""

    inter_class_distance: float
    positive_deviation: float
    negative_deviation: float


def class_separation(features: ArrayLike, labels: ArrayLike) -> ClassSeparation:
    """How well separated the classes are in feature space (section 2).

        inter_class_distance = || mean(positives) - mean(negatives) ||_2
        deviation of a class = sqrt(largest eigenvalue of its covariance matrix)

    The deviation is the standard deviation along the direction in which the class spreads most. The covariance divides
    by n - 1, as `numpy.cov` does (the paper does not say), so a class of one instance has no deviation: nan. Features
    are taken as they are; normalise them first to compare encoders of different scale.

    Makes two passes in float64 over blocks of rows: no copy of all features is made, and a large mean does not drown a
    small deviation. 250,000 x 512 take about 4 s on two busy cores.

    Args:
        features: (N, D) features of the instances, of any float precision.
        labels: (N,) ground truth, 0 or 1, or -1 for unknown: those instances are left out.

    Raises:
        InputError: If the shapes do not fit, a label is not -1, 0 or 1, a feature is not finite, or fewer than two
            classes are known.

    Example:
        >>> class_separation([[0, 0], [2, 0], [4, 3], [4, 5]], [0, 0, 1, 1]).inter_class_distance
        5.0
    """
    known_labels = label_vector(labels, "labels of instances", unknown=True)
    matrix = feature_matrix(features, "features of instances", known_labels.size)
    require_both_classes(known_labels, "instances")
    positive, negative = np.flatnonzero(known_labels == 1), np.flatnonzero(known_labels == 0)
    positive_mean, negative_mean = _mean(matrix, positive), _mean(matrix, negative)
    return ClassSeparation(
        inter_class_distance=float(np.linalg.norm(positive_mean - negative_mean)),
        positive_deviation=_deviation(matrix, positive, positive_mean),
        negative_deviation=_deviation(matrix, negative, negative_mean),
    )


@dataclass(frozen=True, eq=False)
class LinearProbe:
    """A fitted logistic regression that takes features as they come (standardising is part of its weights).

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
        """(N,) logits of (N, D) features; they still rank where probabilities round to one."""
        matrix = feature_matrix(features, "features")
        if matrix.shape[1] != self.weights.size:
            raise InputError(f"features: expected {self.weights.size} per instance, got {matrix.shape[1]}")
        logits = np.empty(matrix.shape[0])
        for first in range(0, logits.size, ROWS_AT_ONCE):
            block = slice(first, first + ROWS_AT_ONCE)
            logits[block] = matrix[block].astype(np.float64) @ self.weights + self.intercept
        return logits

    def scores(self, features: ArrayLike) -> NDArray[np.float64]:
        """(N,) probabilities of being positive, for (N, D) features."""
        from scipy.special import expit

        return np.asarray(expit(self.logits(features)), dtype=np.float64)


def linear_probe(
    train_features: ArrayLike,
    train_labels: ArrayLike,
    validation_features: ArrayLike | None = None,
    validation_labels: ArrayLike | None = None,
    *,
    c: float | Sequence[float] | None = None,
) -> LinearProbe:
    """Fit an l2-regularised logistic regression on frozen features.

        minimise over w, b:   mean over instances of log loss(y, w x + b)  +  |w|^2 / (2 C)

    where x are the features, standardised by mean and deviation of the labelled training instances. Because of the mean
    over instances, one C suits small and large cohorts; scikit-learn sums instead, so its C is our C / N. Of several C,
    the one with the highest instance AUC on validation is taken, of equally good ones that with the lowest log loss
    there. Deterministic. Works in float32, or in float64 where the training features are float64. 150,000 x 512 in
    float32 take about 20 s for the grid on two busy cores, 5 s for one C.

    Args:
        train_features: (N, D) features of the instances of training bags.
        train_labels: (N,) their ground truth, 0 or 1, or -1 for unknown: those instances are left out.
        validation_features: (M, D) features of the instances of validation bags, or None.
        validation_labels: (M,) their ground truth, 0 or 1, or -1 for unknown, or None.
        c: Inverse strength of the regularisation: one number, or several to choose from on validation. None means
            `C_GRID` with validation and `DEFAULT_C` without.

    Raises:
        InputError: If shapes or labels do not fit, fewer than two classes are known in training or validation, a C is
            not positive, or there are several C and no validation to choose on.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.preprocessing import StandardScaler

    features, labels = _known(train_features, train_labels, "training instances")
    validation = _validation(validation_features, validation_labels, features.shape[1])
    candidates = _candidates(c, has_validation=validation is not None)

    scaler = StandardScaler(copy=False)
    standardised = scaler.fit_transform(features)
    model = LogisticRegression(solver="lbfgs", tol=_TOLERANCE, max_iter=_ITERATIONS, warm_start=True)
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
    """The metrics of a fitted probe on a set of bags.

    The score of a bag is that of its highest instance, of known label or not. Logits are compared, since the highest
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
        `bag_auc` and what `instance_metrics` gives: `auc`, `auprc`, `max_f1`; with validation also `dice`, `iou` and
        their settings.

    Raises:
        InputError: If shapes or labels do not fit, a bag is empty, or a class is missing.
    """
    from scipy.special import expit
    from sklearn.metrics import roc_auc_score

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


def _fit(model: Any, c: float, standardised: NDArray[Any], labels: NDArray[np.int64], scaler: Any) -> LinearProbe:
    """Fit on standardised features, starting where `model` stands; the probe takes features as they come."""
    from sklearn.exceptions import ConvergenceWarning

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
    """The features of known label, copied, in float32 or float64, and these labels, of both classes."""
    all_labels = label_vector(labels, f"labels of {name}", unknown=True)
    matrix = feature_matrix(features, f"features of {name}", all_labels.size)
    known = all_labels != UNKNOWN
    require_both_classes(all_labels, name)
    precision = np.float64 if matrix.dtype == np.float64 else np.float32
    return matrix[known].astype(precision, copy=False), all_labels[known]


def _validation(
    features: ArrayLike | None, labels: ArrayLike | None, width: int
) -> tuple[NDArray[Any], NDArray[np.int64]] | None:
    """Validation features of known label and these labels, or None when neither was given."""
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
    """The C to try, each once; rising, so that each fit starts near its solution."""
    if c is None:
        return list(C_GRID) if has_validation else [DEFAULT_C]
    values = np.unique(np.asarray(c, dtype=np.float64))
    if values.size == 0 or not np.all(np.isfinite(values) & (values > 0)):
        raise InputError(f"c: expected positive numbers, got {c}")
    if values.size > 1 and not has_validation:
        raise InputError(f"c: expected one number where there is no validation to choose on, got {values.size}")
    return [float(value) for value in values]


def _mean(features: NDArray[Any], chosen: NDArray[np.int64]) -> NDArray[np.float64]:
    total = np.zeros(features.shape[1])
    for block in _blocks(features, chosen):
        total += block.sum(axis=0)
    return total / chosen.size


def _deviation(features: NDArray[Any], chosen: NDArray[np.int64], mean: NDArray[np.float64]) -> float:
    """The square root of the spectral norm of the covariance of the chosen rows; nan for one row."""
    from scipy.linalg import eigvalsh

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
    """The chosen rows, some at a time, each a fresh float64 array."""
    for first in range(0, chosen.size, ROWS_AT_ONCE):
        yield features[chosen[first : first + ROWS_AT_ONCE]].astype(np.float64)
