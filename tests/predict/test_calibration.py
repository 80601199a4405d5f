import math

import numpy as np
import pytest

from its2clr.errors import InputError
from its2clr.predict.calibration import SLOPE_PENALTY, Calibration, calibration_error, fit_calibration


def slow_loss(slope, intercept, labels, probabilities):
    """The loss of the module's first lines, bag by bag."""
    positives = sum(labels)
    negatives = len(labels) - positives
    total = SLOPE_PENALTY / 2 * (slope - 1) ** 2
    for label, probability in zip(labels, probabilities, strict=True):
        target = (positives + 1) / (positives + 2) if label else 1 / (negatives + 2)
        p = min(max(probability, 1e-6), 1 - 1e-6)
        scaled = slope * math.log(p / (1 - p)) + intercept
        log_q = min(scaled, 0) - math.log1p(math.exp(-abs(scaled)))  # of q = 1 / (1 + exp(-scaled))
        total -= target * log_q + (1 - target) * (log_q - scaled)
    return total


def slow_fit(labels, probabilities):
    """The lowest loss of a grid, whose steps shrink around the best point."""
    slope, intercept, step = 1.0, 0.0, 2.0
    while step > 1e-7:
        around = [(max(slope + i * step, 0.0), intercept + j * step) for i in (-1, 0, 1) for j in (-1, 0, 1)]
        best = min(around, key=lambda point: slow_loss(*point, labels, probabilities))
        if best == (slope, intercept):
            step /= 2
        slope, intercept = best
    return slope, intercept


def bags(seed, count=40, sharpness=3.0):
    """Bags whose logits are `sharpness` times too large."""
    rng = np.random.default_rng(seed)
    true_logit = rng.normal(0, 1.5, count)
    labels = (rng.random(count) < 1 / (1 + np.exp(-true_logit))).astype(int)
    return labels.tolist(), (1 / (1 + np.exp(-sharpness * true_logit + 0.5))).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_it_minimises_what_it_says(seed):
    labels, probabilities = bags(seed)
    fitted = fit_calibration(labels, probabilities)
    assert (fitted.slope, fitted.intercept) == pytest.approx(slow_fit(labels, probabilities), abs=1e-5)


def test_overconfident_bags_become_less_so():
    labels, probabilities = bags(0, count=4000)
    fitted = fit_calibration(labels, probabilities)
    assert fitted.slope == pytest.approx(1 / 3, abs=0.03)  # undoes the sharpness
    assert fitted.intercept == pytest.approx(0.5 / 3, abs=0.1)
    assert fitted.brier_after < fitted.brier_before - 0.01
    assert fitted.brier_left_out == pytest.approx(fitted.brier_after, abs=1e-3)
    assert fitted.calibration_error_after < 0.03 < 0.1 < fitted.calibration_error_before


@pytest.mark.parametrize(
    ("labels", "probabilities"),
    [
        ([0, 1], [0.4, 0.6]),
        ([0, 0, 1, 1], [0.0, 0.0, 1.0, 1.0]),
        ([0, 0, 0, 1], [0.5, 0.5, 0.5, 0.5]),
        ([0] * 30 + [1] * 30, [1e-12] * 30 + [1 - 1e-12] * 30),
    ],
)
def test_few_or_separable_bags_give_finite_numbers_short_of_certainty(labels, probabilities):
    fitted = fit_calibration(labels, probabilities)
    assert (fitted.slope, fitted.intercept) == pytest.approx(slow_fit(labels, probabilities), abs=1e-4)
    calibrated = fitted.apply(probabilities)
    positives, negatives = sum(labels), len(labels) - sum(labels)
    assert calibrated.max() <= (positives + 1) / (positives + 2) + 1e-3
    assert calibrated.min() >= 1 / (negatives + 2) - 1e-3


def test_order_is_never_turned_around():
    fitted = fit_calibration([1, 1, 1, 0, 0, 0], [0.1, 0.2, 0.3, 0.7, 0.8, 0.9])
    assert fitted.slope == 0
    assert np.ptp(fitted.apply([0.01, 0.99])) == 0
    labels, probabilities = bags(1)
    calibrated = fit_calibration(labels, probabilities).apply(probabilities)
    assert (np.argsort(calibrated, kind="stable") == np.argsort(probabilities, kind="stable")).all()


def test_the_calibration_error_is_that_of_equal_bins():
    rng = np.random.default_rng(0)
    labels, probabilities = rng.integers(0, 2, 47), rng.random(47)
    order = sorted(range(47), key=lambda i: probabilities[i])
    sizes = [5] * 7 + [4] * 3
    expected, start = 0.0, 0
    for size in sizes:
        part = order[start : start + size]
        start += size
        expected += size / 47 * abs(sum(labels[i] for i in part) / size - sum(probabilities[i] for i in part) / size)
    assert calibration_error(labels, probabilities) == pytest.approx(expected)
    assert calibration_error([0, 1], [0.0, 1.0]) == 0


def test_identity_leaves_probabilities_and_one_class_is_refused():
    np.testing.assert_allclose(Calibration(1.0, 0.0).apply([0.0, 0.3, 1.0]), [1e-6, 0.3, 1 - 1e-6], rtol=1e-9)
    with pytest.raises(InputError, match="validation bags"):
        fit_calibration([1, 1], [0.1, 0.2])
