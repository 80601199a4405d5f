import inspect
import time
from itertools import pairwise

import evaluation_references as reference
import numpy as np
import pytest
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from its2clr.errors import InputError
from its2clr.evaluation.features import C_GRID, DEFAULT_C, linear_probe, linear_probe_metrics
from its2clr.evaluation.instances import instance_metrics


def some_instances(seed, count=150, width=6, *, signal=0.8, unknown=0.0, dtype=np.float64):
    """Features of uneven scale, of which the first two carry the label."""
    generator = np.random.default_rng(seed)
    labels = (generator.random(count) < 0.25).astype(int)
    labels[:4] = (0, 1, 0, 1)
    features = generator.normal(size=(count, width))
    features[:, :2] += signal * labels[:, None]
    features = features * np.linspace(0.05, 20, width) + np.linspace(-50, 50, width)
    labels[4:][generator.random(count - 4) < unknown] = -1
    return features.astype(dtype), labels


def some_bags(seed, *, unknown=0.0, **settings):
    features, labels = some_instances(seed, unknown=unknown, **settings)
    offsets = np.array([0, 1, 2, 20, 33, 60, 100, 149, len(labels)])
    return features, labels, offsets, np.array([0, 1, 1, 0, 1, 0, 0, 1])


def sklearn_probe(features, labels, c):
    model = LogisticRegression(C=c / len(labels), max_iter=10_000, tol=1e-9)
    return make_pipeline(StandardScaler(), model).fit(features, labels)


def bag_maxima(scores, offsets):
    maxima = []
    for first, last in pairwise(offsets):
        highest = -np.inf
        for place in range(first, last):
            if scores[place] > highest:
                highest = scores[place]
        maxima.append(highest)
    return maxima


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("c", [3.0, 100.0])
def test_equals_scikit_learn(seed, c):
    features, labels = some_instances(seed)
    other, _ = some_instances(seed + 10)
    probe = linear_probe(features, labels, c=c)
    expected = sklearn_probe(features, labels, c)
    np.testing.assert_allclose(probe.scores(other), expected.predict_proba(other)[:, 1], atol=2e-3)
    np.testing.assert_allclose(probe.scores(other), expit(probe.logits(other)))
    assert (probe.c, probe.converged, probe.validation_auc) == (c, True, {})


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_learns_a_separable_problem(dtype):
    train = some_instances(1, 400, signal=8.0, dtype=dtype)
    validation = some_instances(2, 200, signal=8.0, dtype=dtype)
    features, labels, offsets, _ = some_bags(3, signal=8.0, dtype=dtype)
    bag_labels = [int(labels[first:last].any()) for first, last in pairwise(offsets)]
    assert 0 < sum(bag_labels) < len(bag_labels)
    probe = linear_probe(*train, *validation)
    metrics = linear_probe_metrics(probe, features, labels, offsets, bag_labels, *validation)
    assert min(metrics[name] for name in ("auc", "auprc", "max_f1", "bag_auc", "iou")) > 0.98
    assert metrics["dice"] > 0.8


@pytest.mark.parametrize("seed", range(4))
def test_c_is_the_best_on_validation(seed):
    train, validation = some_instances(seed, 80, 20, signal=0.4), some_instances(seed + 50, 200, 20, signal=0.4)
    probe = linear_probe(*train, *validation)
    aucs = {}
    for c in C_GRID:
        aucs[c] = reference.auc(validation[1], sklearn_probe(*train, c).decision_function(validation[0]))
    assert probe.validation_auc == pytest.approx(aucs, abs=0.01)
    assert len(set(probe.validation_auc.values())) > 1  # otherwise any C would do
    assert probe.validation_auc[probe.c] == max(probe.validation_auc.values())
    alone = linear_probe(*train, c=probe.c)
    np.testing.assert_allclose(probe.scores(validation[0]), alone.scores(validation[0]), atol=5e-3)


@pytest.mark.parametrize("wrong", [False, True])
def test_equally_good_c_are_told_apart_by_log_loss(wrong):
    train, validation = some_instances(0, 300, signal=30.0), some_instances(1, signal=30.0)
    labels = 1 - validation[1] if wrong else validation[1]
    probe = linear_probe(*train, validation[0], labels, c=[1e3, 10.0, 1e2, 10.0])
    assert probe.validation_auc == dict.fromkeys((10.0, 1e2, 1e3), 0.0 if wrong else 1.0)
    assert probe.c == (10.0 if wrong else 1e3)  # the less sure the better only if all is wrong


def test_c_means_the_same_for_any_number_of_instances():
    features, labels = some_instances(0)
    probe, tripled = (
        linear_probe(features, labels, c=10.0),
        linear_probe(np.tile(features, (3, 1)), np.tile(labels, 3), c=10.0),
    )
    np.testing.assert_allclose(tripled.scores(features), probe.scores(features), atol=2e-3)


def test_default_c_leave_probabilities_wide_enough_for_dice():
    train, validation = some_instances(1, 400, signal=8.0), some_instances(2, 200, signal=8.0)
    for c in (*C_GRID, DEFAULT_C):
        probe = linear_probe(*train, c=c)
        tuning = validation[1], probe.scores(validation[0])
        assert instance_metrics(*tuning, *tuning)["dice"] > 0.8


def test_test_labels_cannot_influence_the_probe():
    assert not any("test" in name for name in inspect.signature(linear_probe).parameters)
    train = some_instances(3, 40, 20, signal=0.4)
    validation = some_instances(53, 200, 20, signal=0.4)
    features, labels, offsets, bag_labels = some_bags(90, width=20, signal=0.4)
    probe = linear_probe(*train, *validation)
    weights = probe.weights.copy()
    metrics = linear_probe_metrics(probe, features, labels, offsets, bag_labels, *validation)
    flipped = linear_probe_metrics(probe, features, 1 - labels, offsets, 1 - bag_labels, *validation)
    assert flipped["auc"] == pytest.approx(1 - metrics["auc"])
    assert flipped["bag_auc"] == pytest.approx(1 - metrics["bag_auc"])
    for setting in ("dice_slope", "dice_intercept", "iou_threshold"):
        assert flipped[setting] == metrics[setting]
    np.testing.assert_array_equal(probe.weights, weights)
    # What validation says does matter, and it is all that matters for the choice.
    other_validation = validation[0], 1 - validation[1]
    assert linear_probe(*train, *other_validation).c != probe.c
    again = linear_probe(*train, *validation)
    assert (again.c, again.validation_auc) == (probe.c, probe.validation_auc)


def test_validation_labels_choose_but_do_not_train():
    train, validation = some_instances(0), some_instances(1)
    fixed = linear_probe(*train, c=50.0)
    with_validation = linear_probe(*train, validation[0], 1 - validation[1], c=50.0)
    np.testing.assert_array_equal(fixed.weights, with_validation.weights)
    assert linear_probe(*train).c == DEFAULT_C


@pytest.mark.parametrize("seed", range(4))
def test_metrics_equal_the_slow_reference(seed):
    train, validation = some_instances(seed), some_instances(seed + 20)
    features, labels, offsets, bag_labels = some_bags(seed + 40, unknown=0.2)
    probe = linear_probe(*train, *validation)
    metrics = linear_probe_metrics(probe, features, labels, offsets, bag_labels, *validation)
    scores = [float(expit(sum(row * probe.weights) + probe.intercept)) for row in features]
    known = labels != -1
    known_labels, known_scores = labels[known].tolist(), np.array(scores)[known].tolist()
    assert metrics["bag_auc"] == pytest.approx(reference.auc(bag_labels, bag_maxima(scores, offsets)))
    assert metrics["auc"] == pytest.approx(reference.auc(known_labels, known_scores))
    assert metrics["auprc"] == pytest.approx(reference.average_precision(known_labels, known_scores))
    assert metrics["max_f1"] == pytest.approx(reference.max_f1(known_labels, known_scores))
    expected = instance_metrics(labels, scores, validation[1], probe.scores(validation[0]))
    assert {name: value for name, value in metrics.items() if name != "bag_auc"} == pytest.approx(expected)
    without = linear_probe_metrics(probe, features, labels, offsets, bag_labels)
    assert set(without) == {"auc", "auprc", "max_f1", "bag_auc"}


def test_bags_are_ranked_where_probabilities_round_to_one():
    probe = linear_probe([[-1.0], [1.0]] * 20, [0, 1] * 20)
    far = np.array([[900.0], [1000.0], [-5.0]])
    assert probe.scores(far)[0] == probe.scores(far)[1] == 1.0
    assert linear_probe_metrics(probe, far, [0, 1, 0], [0, 1, 3], [0, 1])["bag_auc"] == 1.0


def test_unknown_instances_train_and_choose_nothing():
    train, validation = some_instances(5), some_instances(6)
    blown_up = np.full((30, 6), 1e5)
    unknown = np.full(30, -1)
    mixed = [(np.vstack([blown_up, part]), np.concatenate([unknown, labels])) for part, labels in (train, validation)]
    probe, other = linear_probe(*train, *validation), linear_probe(*mixed[0], *mixed[1])
    np.testing.assert_array_equal(probe.weights, other.weights)
    assert (probe.intercept, probe.c, probe.validation_auc) == (other.intercept, other.c, other.validation_auc)


def test_instances_of_unknown_label_still_count_in_their_bag():
    probe = linear_probe([[-1.0], [1.0]] * 20, [0, 1] * 20)
    features = np.array([[0.5], [-1.0], [-0.5], [2.0]])
    known = linear_probe_metrics(probe, features, [1, 0, 0, -1], [0, 2, 4], [0, 1])
    assert known["bag_auc"] == 1.0  # the second bag is led by the instance nobody labelled
    assert known["auc"] == 1.0


def test_scale_and_place_of_the_features_change_nothing():
    train, validation, (other, _) = some_instances(7), some_instances(8), some_instances(9)
    factors, shift = np.array([1e-3, 5.0, -2.0, 100.0, 1.0, 0.3]), np.arange(6.0)
    probe = linear_probe(*train, *validation)
    moved = linear_probe(train[0] * factors + shift, train[1], validation[0] * factors + shift, validation[1])
    assert moved.c == probe.c
    np.testing.assert_allclose(moved.scores(other * factors + shift), probe.scores(other), atol=2e-3)


def test_constant_features_do_no_harm():
    features, labels = some_instances(0)
    features[:, 5] = 3.0
    probe = linear_probe(features, labels)
    assert np.isfinite(probe.weights).all()
    np.testing.assert_allclose(
        probe.scores(features), linear_probe(features[:, :5], labels).scores(features[:, :5]), atol=2e-3
    )


def test_same_input_gives_the_same_probe_and_stays_as_it_was():
    train = some_instances(0, 500, dtype=np.float32)
    validation = some_instances(1, 200, dtype=np.float32)
    before = train[0].copy(), validation[0].copy()
    first, second = linear_probe(*train, *validation), linear_probe(*train, *validation)
    np.testing.assert_array_equal(first.weights, second.weights)
    assert (first.intercept, first.c) == (second.intercept, second.c)
    np.testing.assert_array_equal(train[0], before[0])
    np.testing.assert_array_equal(validation[0], before[1])


def test_many_instances_are_fast():
    train = some_instances(0, 20_000, 128, dtype=np.float32)
    validation = some_instances(1, 5_000, 128, dtype=np.float32)
    started = time.perf_counter()
    probe = linear_probe(*train, *validation)
    assert time.perf_counter() - started < 20  # about a second on two idle cores
    assert probe.converged
    assert max(probe.validation_auc.values()) > 0.75


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_labels": [1, 1, -1]}, "training instances: expected labels of both classes, got 2 positive and 0"),
        ({"train_labels": [0, 1]}, r"features of training instances: expected shape \(2, features\), got \(3, 1\)"),
        ({"train_features": [[0.0], [np.inf], [1.0]]}, "nan or infinite"),
        ({"validation_labels": [0, 0]}, "validation instances: expected labels of both classes"),
        ({"validation_labels": None}, "together, got no validation_labels"),
        ({"validation_features": None}, "together, got no validation_features"),
        ({"validation_features": [[0.0, 1.0], [1.0, 0.0]]}, "expected 1 per instance, got 2"),
        ({"c": 0.0}, "c: expected positive numbers, got 0.0"),
        ({"c": [1.0, float("nan")]}, "c: expected positive numbers"),
        ({"c": []}, "c: expected positive numbers"),
        ({"c": [1.0, 2.0], "validation_features": None, "validation_labels": None}, "no validation to choose on"),
    ],
)
def test_wrong_input_is_named(changes, message):
    right = {
        "train_features": [[0.0], [1.0], [2.0]],
        "train_labels": [0, 1, 1],
        "validation_features": [[0.0], [1.0]],
        "validation_labels": [0, 1],
    }
    linear_probe(**right)
    with pytest.raises(InputError, match=message):
        linear_probe(**(right | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": [0, 1, 1, 3], "bag_labels": [0, 1, 1]}, "expected an instance in every bag, got none in 1.*bag 1"),
        ({"offsets": [0, 1]}, "expected to rise from 0 to 3"),
        ({"bag_labels": [1, 1]}, "bags: expected labels of both classes"),
        ({"bag_labels": [0, 1, 1]}, "expected 3 entries, got 2"),
        ({"bag_labels": [0, -1]}, "got -1"),
        ({"labels": [0, 1]}, r"expected shape \(2, features\)"),
        ({"labels": [-1, 1, 1]}, "instances: expected labels of both classes"),
        ({"features": [[0.0, 1.0]] * 3}, "expected 1 per instance, got 2"),
        ({"validation_features": [[0.0]]}, "got no validation_labels"),
    ],
)
def test_wrong_test_input_is_named(changes, message):
    probe = linear_probe([[0.0], [1.0], [2.0]], [0, 1, 1])
    right = {"features": [[0.0], [1.0], [2.0]], "labels": [0, 1, 1], "offsets": [0, 1, 3], "bag_labels": [0, 1]}
    linear_probe_metrics(probe, **right)
    with pytest.raises(InputError, match=message):
        linear_probe_metrics(probe, **(right | changes))
