import numpy as np
import pytest
from sklearn.metrics import average_precision_score, balanced_accuracy_score, f1_score, roc_auc_score

from its2clr.evaluation import bag_auc_difference_interval, bag_auc_interval, bag_metric_intervals, bootstrap_interval
from its2clr.evaluation.weighted_metrics import resampled_average_precision, resampled_decisions


def some_bags(seed, count=40, retrainings=3):
    generator = np.random.default_rng(seed)
    labels = (generator.random(count) < 0.4).astype(int)
    labels[:2] = (0, 1)
    return labels, np.round(generator.normal(size=(retrainings, count)) + labels, 1)  # many ties


@pytest.mark.parametrize("seed", range(4))
def test_weighted_metrics_equal_sklearn(seed, monkeypatch):
    monkeypatch.setattr("its2clr.evaluation.weighted_metrics._CELLS", 130)  # in pieces
    labels, scores = some_bags(seed)
    weights = np.random.default_rng(seed).integers(0, 4, size=(20, labels.size)).astype(float)
    called = scores >= 0.5
    precision = resampled_average_precision(labels, scores, weights)
    accuracy, f1 = resampled_decisions(labels, called, weights)
    for row, *found in zip(weights, precision, accuracy, f1, strict=True):
        expected = [
            np.mean([average_precision_score(labels, one, sample_weight=row) for one in scores]),
            np.mean([balanced_accuracy_score(labels, one, sample_weight=row) for one in called]),
            np.mean([f1_score(labels, one, sample_weight=row) for one in called]),
        ]
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_intervals_equal_naive_resampling():
    labels, scores = some_bags(7)
    thresholds = [0.3, 0.5, 0.9]
    found = bag_metric_intervals(labels, scores, thresholds, resamples=200, seed=3)
    assert found["auc"] == bag_auc_interval(labels, scores, resamples=200, seed=3)
    statistics = {
        "auprc": lambda y, s, _: average_precision_score(y, s),
        "balanced_accuracy": lambda y, s, t: balanced_accuracy_score(y, s >= t),
        "f1": lambda y, s, t: f1_score(y, s >= t),
    }
    for name, metric in statistics.items():

        def mean(indices, metric=metric):
            pairs = zip(scores, thresholds, strict=True)
            return float(np.mean([metric(labels[indices], one[indices], cut) for one, cut in pairs]))

        expected = bootstrap_interval(mean, labels.size, resamples=200, seed=3, labels=labels)
        np.testing.assert_allclose(found[name], expected, atol=1e-12)


def test_difference_is_paired():
    labels, scores = some_bags(11)
    better = scores + 0.3 * labels  # the same bags, each a little more right: the intervals overlap, the difference not
    low, high = bag_auc_difference_interval(labels, better, scores, resamples=300, seed=1)
    alone, other = (bag_auc_interval(labels, s, resamples=300, seed=1) for s in (better, scores))
    assert alone.low < other.high
    assert 0 < low < high

    def difference(indices):
        drawn = labels[indices]
        return float(np.mean([roc_auc_score(drawn, b[indices]) - roc_auc_score(drawn, s[indices])
                              for b, s in zip(better, scores, strict=True)]))  # fmt: skip

    expected = bootstrap_interval(difference, labels.size, resamples=300, seed=1, labels=labels)
    np.testing.assert_allclose((low, high), expected, atol=1e-12)
