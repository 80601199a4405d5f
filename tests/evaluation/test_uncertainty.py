"""Deviation over retrainings, bootstrap over bags, and the AUC of many resamples at once."""

import statistics
import time

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from its2clr.errors import InputError
from its2clr.evaluation.bags import bag_metric_intervals
from its2clr.evaluation.instances import instance_auc_interval
from its2clr.evaluation.uncertainty import bootstrap_interval, summarise, weighted_auc


def some_instances(seed, bags, retrainings, sizes=(0, 12)):
    """Bags of different sizes, some empty; some labels unknown; many ties."""
    generator = np.random.default_rng(seed)
    counts = generator.integers(*sizes, size=bags)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    bag_labels = np.repeat(generator.random(bags) < 0.5, counts)
    labels = (bag_labels & (generator.random(offsets[-1]) < 0.3)).astype(int)
    scores = np.round(generator.normal(size=(retrainings, offsets[-1])) + labels, 1)
    labels[generator.random(labels.size) < 0.1] = -1
    return labels, scores, offsets


def test_mean_and_sample_deviation():
    aucs = [0.91, 0.94, 0.90, 0.93]
    summary = summarise([{"auc": auc, "f1": 1 - auc} for auc in aucs])
    assert summary["auc"]["mean"] == pytest.approx(statistics.mean(aucs))
    assert summary["auc"]["std"] == pytest.approx(statistics.stdev(aucs))
    assert summary["auc"]["values"] == aucs
    assert list(summary) == ["auc", "f1"]


def test_one_retraining_has_no_deviation():
    assert summarise([{"auc": 0.9}]) == {"auc": {"mean": 0.9, "std": None, "values": [0.9]}}


def test_retrainings_must_have_the_same_metrics():
    with pytest.raises(InputError, match="got none"):
        summarise([])
    with pytest.raises(InputError, match=r"\['auc'\] in each, got \['f1'\] in number 1"):
        summarise([{"auc": 0.9}, {"f1": 0.9}])


@pytest.mark.parametrize("seed", range(5))
def test_weighted_auc_equals_sklearn(seed):
    labels, scores, offsets = some_instances(seed, 25, 3)
    bags = np.repeat(np.arange(25), np.diff(offsets))
    known = labels >= 0
    labels, scores, bags = labels[known], scores[:, known], bags[known]
    weights = np.random.default_rng(seed).integers(0, 4, size=(20, 25)).astype(float)
    for one in scores:
        expected = [roc_auc_score(labels, one, sample_weight=row[bags]) for row in weights]
        np.testing.assert_allclose(weighted_auc(labels, one, bags, weights), expected, atol=1e-12)


def test_weighted_auc_of_one_class_is_nan():
    weights = np.array([[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    found = weighted_auc(np.array([0, 1]), np.array([0.1, 0.9]), np.arange(2), weights)
    np.testing.assert_array_equal(found, [np.nan, np.nan, 1.0])


@pytest.mark.parametrize("seed", range(3))
def test_instance_interval_equals_naive_resampling(seed):
    labels, scores, offsets = some_instances(seed, 20, 2)
    has_positive = [np.any(labels[offsets[b] : offsets[b + 1]] == 1) for b in range(20)]

    def auc(row):
        bags = np.repeat(np.arange(20), row.astype(int))
        taken = np.concatenate([np.arange(offsets[bag], offsets[bag + 1]) for bag in bags])
        taken = taken[labels[taken] >= 0]
        return np.mean([roc_auc_score(labels[taken], one[taken]) for one in scores])

    expected = bootstrap_interval(
        lambda weights: np.array([auc(row) for row in weights]), has_positive, resamples=60, seed=seed
    )
    found = instance_auc_interval(labels, scores, offsets, resamples=60, seed=seed)
    assert found == pytest.approx(expected, abs=1e-12)


def test_instances_of_one_bag_are_not_counted_as_independent():
    generator = np.random.default_rng(0)
    labels = np.repeat([0, 1], 200)
    scores = labels + np.repeat(generator.normal(size=20), 20) + generator.normal(0, 0.1, 400)  # bags of 20
    by_bag = instance_auc_interval(labels, scores, np.arange(0, 401, 20))
    as_if_independent = bag_metric_intervals(labels, scores)["auc"]
    assert by_bag.low < roc_auc_score(labels, scores) < by_bag.high
    assert by_bag.high - by_bag.low > 2 * (as_if_independent.high - as_if_independent.low)


def test_large_cohorts_take_seconds():
    labels, scores, offsets = some_instances(0, 400, 5, sizes=(100, 101))
    started = time.perf_counter()
    instance_auc_interval(labels, scores, offsets)
    assert time.perf_counter() - started < 8  # about 0.3 s on two idle cores


def mean_of(values):
    return lambda weights: weights @ values / values.size


def test_mean_interval_covers_as_often_as_claimed():
    generator = np.random.default_rng(0)
    covered = 0
    for trial in range(150):
        values = generator.normal(1.0, 2.0, size=40)
        low, high = bootstrap_interval(mean_of(values), np.zeros(40), resamples=200, seed=trial, level=0.9)
        covered += low <= 1.0 <= high
    assert 0.80 <= covered / 150 <= 0.96


def test_same_seed_same_interval_and_higher_level_wider():
    mean, strata = mean_of(np.random.default_rng(4).normal(size=60)), np.zeros(60)
    first = bootstrap_interval(mean, strata, seed=3)
    assert first == bootstrap_interval(mean, strata, seed=3)
    assert first != bootstrap_interval(mean, strata, seed=4)
    narrow = bootstrap_interval(mean, strata, seed=3, level=0.5)
    assert first.low < narrow.low < narrow.high < first.high


def test_ends_are_percentiles_of_the_resamples():
    seen = []
    statistic = mean_of(np.arange(30.0))
    interval = bootstrap_interval(lambda weights: seen.append(statistic(weights)) or seen[-1], np.zeros(30), level=0.8)
    assert interval == pytest.approx(np.quantile(seen[0], [0.1, 0.9]))
    assert seen[0].shape == (1000,)


def test_undefined_resamples_are_drawn_again():
    labels = np.array([0, 0, 0, 0, 1])
    seen = []

    def share(weights):
        seen.append(weights)
        positives = weights @ labels
        return np.where((positives == 0) | (positives == 5), np.nan, positives / 5)

    interval = bootstrap_interval(share, np.zeros(5), resamples=100)
    assert sum(len(weights) for weights in seen) > 100
    assert all((weights.sum(axis=1) == 5).all() for weights in seen)
    assert interval.low >= 0.2


def test_strata_keep_their_sizes():
    strata = np.array([0, 0, 0, 1, 1, 0, 2])
    seen = []
    bootstrap_interval(lambda weights: seen.append(weights) or np.zeros(len(weights)), strata, resamples=20)
    for value, size in ((0, 4), (1, 2), (2, 1)):
        assert (seen[0][:, strata == value].sum(axis=1) == size).all()
    assert len(np.unique(seen[0], axis=0)) > 1


def test_bags_of_a_group_are_drawn_together_and_groups_of_one_label_stay_as_many():
    labels = np.array([0, 1, 0, 1, 1, 0, 1, 0])
    groups = np.array(["p", "p", "a", "q", "q", "b", "r", "c"])  # p is of both labels, q and r of 1, a, b and c of 0
    seen = []
    bootstrap_interval(
        lambda weights: seen.append(weights) or np.zeros(len(weights)), labels, resamples=50, groups=groups
    )
    drawn = seen[0]
    np.testing.assert_array_equal(drawn[:, 0], 1)  # the only one of its stratum
    np.testing.assert_array_equal(drawn[:, 0], drawn[:, 1])
    np.testing.assert_array_equal(drawn[:, 3], drawn[:, 4])
    np.testing.assert_array_equal(drawn[:, 3] + drawn[:, 6], 2)
    np.testing.assert_array_equal(drawn[:, [2, 5, 7]].sum(axis=1), 3)
    assert len(np.unique(drawn, axis=0)) > 3


def test_groups_of_one_bag_change_nothing_and_large_ones_widen_the_interval():
    labels, scores, _ = some_instances(0, 60, 3, sizes=(1, 2))
    labels = np.where(labels < 0, 0, labels)
    alone = bag_metric_intervals(labels, scores, [0.5] * 3, resamples=200)
    assert alone == bag_metric_intervals(labels, scores, [0.5] * 3, resamples=200, groups=np.arange(len(labels))[::-1])
    generator = np.random.default_rng(0)
    of_bag = np.repeat(np.arange(20), 20)
    labels = of_bag % 2
    scores = labels + generator.normal(size=20)[of_bag] + generator.normal(0, 0.1, 400)
    (low, high), (least, most) = (bag_metric_intervals(labels, scores, groups=one)["auc"] for one in (None, of_bag))
    assert most - least > 2 * (high - low)


def zeros(weights):
    return np.zeros(len(weights))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bootstrap_interval(zeros, []), r"strata of shape \(0,\)"),
        (lambda: bootstrap_interval(zeros, [[0, 1]]), r"strata of shape \(1, 2\)"),
        (lambda: bootstrap_interval(zeros, [0, 1], level=1.0), "level=1.0"),
        (lambda: bootstrap_interval(zeros, [0, 1], resamples=0), "resamples=0"),
        (lambda: bootstrap_interval(zeros, [0, 1], groups=["a"]), "a group for each of 2 bags"),
        (lambda: bootstrap_interval(lambda weights: zeros(weights) * np.nan, [0, 1]), "got 0 in 20 rounds"),
        (lambda: instance_auc_interval([0, -1], [0.1, 0.2], [0, 2]), "both classes"),
        (lambda: instance_auc_interval([0, 1], [[0.1, 0.2, 0.3]], [0, 2]), r"or \(retrainings, 2\), got \(1, 3\)"),
        (lambda: instance_auc_interval([0, 1], [0.1, 0.2], [0, 1]), "from 0 to 2 instances, got 2 from 0 to 1"),
        (lambda: instance_auc_interval([0, 1], [0.1, 0.2], [0, 2, 1, 2]), "expected to rise"),
        (lambda: instance_auc_interval([0, 1], [0.1, 0.2], []), "got 0 from nothing"),
    ],
)
def test_wrong_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call()
