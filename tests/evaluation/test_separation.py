import math
import time

import numpy as np
import pytest
from scipy.stats import ortho_group

from its2clr.errors import InputError
from its2clr.evaluation import features as features_module
from its2clr.evaluation.features import ClassSeparation, class_separation


def some_features(seed, count=60, width=5, *, unknown=0.2):
    generator = np.random.default_rng(seed)
    labels = generator.choice([-1, 0, 1], size=count, p=[unknown, 0.7 - unknown, 0.3])
    labels[:4] = (0, 1, 0, 1)
    mixing = generator.normal(size=(width, width))
    return generator.normal(size=(count, width)) @ mixing + labels[:, None] * 0.7, labels


def reference_mean(rows):
    width = len(rows[0])
    return [sum(row[i] for row in rows) / len(rows) for i in range(width)]


def reference_deviation(rows):
    """Covariance entry by entry; its largest eigenvalue by power iteration."""
    width, mean = len(rows[0]), reference_mean(rows)
    covariance = [
        [sum((row[i] - mean[i]) * (row[j] - mean[j]) for row in rows) / (len(rows) - 1) for j in range(width)]
        for i in range(width)
    ]
    direction, eigenvalue = [1.0 + 0.1 * i for i in range(width)], 0.0
    for _ in range(3000):
        turned = [sum(covariance[i][j] * direction[j] for j in range(width)) for i in range(width)]
        eigenvalue = math.sqrt(sum(value**2 for value in turned))
        direction = [value / eigenvalue for value in turned]
    return math.sqrt(eigenvalue)


def reference_separation(features, labels):
    groups = {
        wanted: [row for row, label in zip(features.tolist(), labels.tolist(), strict=True) if label == wanted]
        for wanted in (1, 0)
    }
    distance = math.dist(reference_mean(groups[1]), reference_mean(groups[0]))
    return ClassSeparation(distance, reference_deviation(groups[1]), reference_deviation(groups[0]))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("count", "width"), [(60, 1), (60, 5), (12, 9), (8, 12)])
@pytest.mark.parametrize("block", [3, 8192])
def test_equals_the_slow_reference(monkeypatch, seed, count, width, block):
    monkeypatch.setattr(features_module, "ROWS_AT_ONCE", block)
    features, labels = some_features(seed, count, width)
    assert class_separation(features, labels) == pytest.approx(reference_separation(features, labels), rel=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_equals_numpy_in_every_precision(dtype):
    features, labels = some_features(3, 300, 40)
    features = features.astype(dtype)
    exact = features.astype(np.float64)
    positive, negative = exact[labels == 1], exact[labels == 0]
    found = class_separation(features, labels)
    assert found.inter_class_distance == pytest.approx(np.linalg.norm(positive.mean(axis=0) - negative.mean(axis=0)))
    assert found.positive_deviation == pytest.approx(np.sqrt(np.linalg.norm(np.cov(positive.T), ord=2)))
    assert found.negative_deviation == pytest.approx(np.sqrt(np.linalg.norm(np.cov(negative.T), ord=2)))


@pytest.mark.parametrize("seed", range(3))
def test_turning_and_moving_the_features_changes_nothing(seed):
    features, labels = some_features(seed, 80, 7)
    turned = features @ ortho_group.rvs(7, random_state=seed) + np.linspace(-20, 20, 7)
    assert class_separation(turned, labels) == pytest.approx(class_separation(features, labels))


@pytest.mark.parametrize("factor", [0.01, -3.0, 250.0])
def test_scales_with_the_features(factor):
    features, labels = some_features(0)
    expected = [abs(factor) * value for value in class_separation(features, labels)]
    assert class_separation(factor * features, labels) == pytest.approx(expected)


def test_swapping_the_classes_swaps_the_deviations():
    features, labels = some_features(1, unknown=0.0)
    found, swapped = class_separation(features, labels), class_separation(features, 1 - labels)
    assert found.positive_deviation != pytest.approx(found.negative_deviation)
    assert swapped == pytest.approx((found[0], found[2], found[1]))


def test_a_large_mean_does_not_drown_a_small_deviation():
    features, labels = some_features(2, 200, 6)
    moved = class_separation(1e6 + features, labels)
    assert moved == pytest.approx(class_separation(features, labels), rel=1e-6)


def test_unknown_instances_are_left_out():
    features, labels = some_features(4)
    features[labels == -1] = 1e6
    known = labels != -1
    assert 0 < known.sum() < labels.size
    assert class_separation(features, labels) == pytest.approx(class_separation(features[known], labels[known]))


def test_one_instance_has_no_deviation():
    found = class_separation([[0.0, 0.0], [3.0, 4.0], [3.0, 4.0]], [1, 0, 0])
    assert found.inter_class_distance == pytest.approx(5.0)
    assert math.isnan(found.positive_deviation)
    assert found.negative_deviation == 0.0


def test_features_are_not_changed():
    features, labels = some_features(5)
    before = features.copy()
    class_separation(features, labels)
    np.testing.assert_array_equal(features, before)


def test_many_instances_are_fast():
    generator = np.random.default_rng(0)
    features = generator.standard_normal((50_000, 256), dtype=np.float32)
    labels = (generator.random(50_000) < 0.05).astype(int)
    started = time.perf_counter()
    class_separation(features, labels)
    assert time.perf_counter() - started < 10  # well under a second on two idle cores


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        ([[1.0], [2.0]], [1, 1], "both classes, got 2 positive and 0 negative"),
        ([[1.0], [2.0]], [-1, 0], "both classes, got 0 positive and 1 negative"),
        ([[1.0], [2.0]], [0, 1, 1], r"features of instances: expected shape \(3, features\), got \(2, 1\)"),
        ([1.0, 2.0], [0, 1], r"got \(2,\)"),
        (np.empty((2, 0)), [0, 1], r"got \(2, 0\)"),
        ([[1.0], [np.nan]], [0, 1], "finite numbers, got 1 of 2"),
        ([[1.0], [2.0, 3.0]], [0, 1], "equally long rows"),
        ([["a"], ["b"]], [0, 1], "expected numbers"),
        ([[1.0], [2.0]], [0, 2], "got 2"),
    ],
)
def test_wrong_input_is_named(features, labels, message):
    with pytest.raises(InputError, match=message):
        class_separation(features, labels)
