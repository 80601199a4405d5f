"""Bag metrics against plain loops and scikit-learn, their intervals against naive resampling, and the one table."""

import evaluation_references as reference
import numpy as np
import pytest
from scipy.stats import norm
from sklearn.metrics import average_precision_score, balanced_accuracy_score, f1_score, recall_score, roc_auc_score

from its2clr.errors import InputError
from its2clr.evaluation.bags import BAG_METRICS, BagMetric, bag_auc_difference, bag_metric_intervals, bag_metrics
from its2clr.evaluation.uncertainty import Interval, bootstrap_interval

SKLEARN = {
    "auc": roc_auc_score,
    "auprc": average_precision_score,
    "balanced_accuracy": balanced_accuracy_score,
    "f1": f1_score,
    "sensitivity": recall_score,
    "specificity": lambda labels, called, sample_weight=None: recall_score(
        labels, called, pos_label=0, sample_weight=sample_weight
    ),
}


def some_bags(seed, count=40, decimals=1, retrainings=None):
    generator = np.random.default_rng(seed)
    labels = (generator.random(count) < 0.4).astype(int)
    labels[:2] = (0, 1)
    shape = count if retrainings is None else (retrainings, count)
    return labels, np.round(generator.normal(size=shape) + labels, decimals)  # rounded: many ties


def drawn(weights):
    """The bags of each resample, one after the other, with repeats."""
    return [np.repeat(np.arange(row.size), row.astype(int)) for row in weights]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("decimals", [0, 1, 8])
def test_equals_the_slow_reference(seed, decimals):
    labels, scores = some_bags(seed, decimals=decimals)
    threshold = float(np.sort(scores)[-15])
    true_positive, false_positive, false_negative, true_negative = reference.counts(labels, scores, threshold)
    assert bag_metrics(labels, scores, threshold) == pytest.approx(
        {
            "auc": reference.auc(labels, scores),
            "auprc": reference.average_precision(labels, scores.tolist()),
            "balanced_accuracy": reference.balanced_accuracy(labels, scores, threshold),
            "f1": reference.f1(labels, scores, threshold),
            "sensitivity": true_positive / (true_positive + false_negative),
            "specificity": true_negative / (true_negative + false_positive),
        }
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", BAG_METRICS)
def test_equals_scikit_learn_on_every_resample(name, seed):
    metric = BAG_METRICS[name]
    labels, scores = some_bags(seed)
    judged = scores >= 0.5 if metric.decided else scores
    weights = np.random.default_rng(seed).integers(0, 4, size=(20, labels.size)).astype(float)
    expected = [SKLEARN[name](labels, judged, sample_weight=row) for row in weights]
    np.testing.assert_allclose(metric.of(labels, judged, weights), expected, atol=1e-12)


def test_without_threshold_nothing_is_decided():
    labels, scores = some_bags(0)
    assert list(bag_metrics(labels, scores)) == list(bag_metric_intervals(labels, scores)) == ["auc", "auprc"]


def test_a_score_at_the_threshold_is_called_positive():
    assert bag_metrics([0, 1], [0.2, 0.6], 0.6)["sensitivity"] == 1.0
    assert bag_metrics([0, 1], [0.6, 0.7], 0.6)["specificity"] == 0.0


def test_nothing_called_positive_is_an_f1_of_zero():
    found = bag_metrics([0, 1], [0.2, 0.6], 0.9)
    assert (found["f1"], found["balanced_accuracy"]) == (0.0, 0.5)


def test_any_rising_change_of_score_changes_nothing():
    labels, scores = some_bags(3)
    assert bag_metrics(labels, 100 * scores - 7, 43.0) == pytest.approx(bag_metrics(labels, scores, 0.5))


@pytest.mark.parametrize("name", BAG_METRICS)
def test_intervals_equal_naive_resampling(name):
    labels, scores = some_bags(7, retrainings=3)
    thresholds = [0.3, 0.5, 0.9]

    def naive(weights):
        pairs = list(zip(scores, thresholds, strict=True))
        judged = [one >= cut if BAG_METRICS[name].decided else one for one, cut in pairs]
        return np.array(
            [np.mean([SKLEARN[name](labels[bags], one[bags]) for one in judged]) for bags in drawn(weights)]
        )

    found = bag_metric_intervals(labels, scores, thresholds, resamples=100, seed=3)[name]
    expected = bootstrap_interval(naive, labels, resamples=100, seed=3)
    assert found == pytest.approx(expected, abs=1e-12)
    assert found.low < found.high


def test_one_retraining_may_come_without_its_row():
    labels, scores = some_bags(1)
    assert bag_metric_intervals(labels, scores, [0.5]) == bag_metric_intervals(labels, scores[None], [0.5])


def test_a_metric_is_in_values_and_intervals_by_one_line(monkeypatch):
    accuracy = BagMetric("accuracy", lambda y, called, w: (w @ (called == y)) / w.sum(axis=1), decided=True)
    monkeypatch.setitem(BAG_METRICS, "accuracy", accuracy)
    labels, scores = some_bags(2)
    value = bag_metrics(labels, scores, 0.5)["accuracy"]
    assert value == pytest.approx(np.mean((scores >= 0.5) == labels))
    low, high = bag_metric_intervals(labels, scores, [0.5])["accuracy"]
    assert low < value < high


def test_auc_interval_covers_as_often_as_claimed():
    generator = np.random.default_rng(1)
    truth = norm.cdf(1 / np.sqrt(2))  # two normals one standard deviation apart
    labels = np.repeat([0, 1], 50)
    covered = 0
    for trial in range(300):
        scores = generator.normal(size=100) + labels
        low, high = bag_metric_intervals(labels, scores, resamples=300, seed=trial)["auc"]
        covered += low <= truth <= high
    assert 0.90 <= covered / 300 <= 0.99


def test_perfect_separation_gives_a_point():
    assert bag_metric_intervals([0, 0, 1, 1], [0.1, 0.2, 0.8, 0.9])["auc"] == Interval(1.0, 1.0)


def test_difference_is_paired():
    labels, scores = some_bags(11, retrainings=3)
    better = scores + 0.3 * labels  # the same bags, each a little more right: the intervals overlap, the difference not
    difference, (low, high) = bag_auc_difference(labels, better, scores, resamples=300, seed=1)
    alone, other = (bag_metric_intervals(labels, s, resamples=300, seed=1)["auc"] for s in (better, scores))
    assert alone.low < other.high
    assert 0 < low < difference < high

    def naive(weights):
        pairs = list(zip(better, scores, strict=True))
        return np.array([
            np.mean([roc_auc_score(labels[bags], b[bags]) - roc_auc_score(labels[bags], s[bags]) for b, s in pairs])
            for bags in drawn(weights)
        ])  # fmt: skip

    assert difference == pytest.approx(naive(np.ones((1, labels.size)))[0])
    expected = bootstrap_interval(naive, labels, resamples=300, seed=1)
    assert (low, high) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("labels", "scores", "message"),
    [
        ([1, 1], [0.1, 0.2], "both classes, got 2 positive and 0 negative"),
        ([0, 1], [0.1], r"expected 2 entries, got 1|expected shape \(2,\) or \(retrainings, 2\), got \(1,\)"),
        ([0, 1], [0.1, np.nan], "got 1 of 2 that are nan"),
        ([0, 2], [0.1, 0.2], r"among \(0, 1\), got 2"),
        ([0, 1, -1], [0.1, 0.2, 0.3], "got -1"),
        ([[0, 1]], [0.1, 0.2], "one dimension"),
        ([0, 1], ["a", "b"], "expected numbers"),
        ([], [], "both classes"),
    ],
)
def test_wrong_input_is_named(labels, scores, message):
    for call in (bag_metrics, bag_metric_intervals, lambda y, s: bag_auc_difference(y, s, s)):
        with pytest.raises(InputError, match=message):
            call(labels, scores)


def test_thresholds_are_one_per_retraining():
    with pytest.raises(InputError, match="thresholds: expected 2 entries, got 1"):
        bag_metric_intervals([0, 1], [[0.1, 0.2], [0.3, 0.4]], [0.5])
