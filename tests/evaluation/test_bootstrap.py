import time

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

from its2clr.errors import InputError
from its2clr.evaluation import Interval, bag_auc_interval, bootstrap_interval, instance_auc_interval
from its2clr.evaluation.weighted_auc import resampled_auc


def some_bags(seed, count, retrainings, decimals=1):
    generator = np.random.default_rng(seed)
    labels = (generator.random(count) < 0.4).astype(int)
    labels[:2] = (0, 1)
    return labels, np.round(generator.normal(size=(retrainings, count)) + labels, decimals)


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


@pytest.mark.parametrize("seed", range(5))
def test_weighted_auc_equals_sklearn(seed):
    labels, scores, offsets = some_instances(seed, 25, 3)
    bags = np.repeat(np.arange(25), np.diff(offsets))
    known = labels >= 0
    labels, scores, bags = labels[known], scores[:, known], bags[known]
    weights = np.random.default_rng(seed).integers(0, 4, size=(20, 25)).astype(float)
    found = resampled_auc(labels, scores, bags, weights)
    for row, auc in zip(weights, found, strict=True):
        expected = [roc_auc_score(labels, one, sample_weight=row[bags]) for one in scores]
        assert auc == pytest.approx(np.mean(expected), abs=1e-12)


def test_weighted_auc_in_pieces_is_the_same(monkeypatch):
    labels, scores = some_bags(1, 50, 2)
    weights = np.random.default_rng(1).integers(0, 4, size=(20, 50)).astype(float)
    whole = resampled_auc(labels, scores, np.arange(50), weights)
    monkeypatch.setattr("its2clr.evaluation.weighted_auc._CELLS", 70)
    np.testing.assert_allclose(resampled_auc(labels, scores, np.arange(50), weights), whole, rtol=1e-12)


def test_weighted_auc_of_one_class_is_nan():
    weights = np.array([[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    found = resampled_auc(np.array([0, 1]), np.array([[0.1, 0.9]]), np.arange(2), weights)
    np.testing.assert_array_equal(found, [np.nan, np.nan, 1.0])


@pytest.mark.parametrize("seed", range(3))
def test_bag_interval_equals_naive_resampling(seed):
    labels, scores = some_bags(seed, 30, 3)

    def naive(drawn):
        return np.mean([roc_auc_score(labels[drawn], one[drawn]) for one in scores])

    expected = bootstrap_interval(naive, 30, resamples=60, seed=seed, labels=labels)
    assert bag_auc_interval(labels, scores, resamples=60, seed=seed) == pytest.approx(expected, abs=1e-12)
    one = bag_auc_interval(labels, scores[0], resamples=60, seed=seed)
    assert one == bag_auc_interval(labels, scores[:1], resamples=60, seed=seed)


@pytest.mark.parametrize("seed", range(3))
def test_instance_interval_equals_naive_resampling(seed):
    labels, scores, offsets = some_instances(seed, 20, 2)
    has_positive = [np.any(labels[offsets[b] : offsets[b + 1]] == 1) for b in range(20)]

    def naive(drawn):
        taken = np.concatenate([np.arange(offsets[bag], offsets[bag + 1]) for bag in drawn])
        taken = taken[labels[taken] >= 0]
        return np.mean([roc_auc_score(labels[taken], one[taken]) for one in scores])

    expected = bootstrap_interval(naive, 20, resamples=60, seed=seed, labels=has_positive)
    found = instance_auc_interval(labels, scores, offsets, resamples=60, seed=seed)
    assert found == pytest.approx(expected, abs=1e-12)


def test_instances_of_one_bag_are_not_counted_as_independent():
    generator = np.random.default_rng(0)
    labels = np.repeat([0, 1], 200)
    scores = labels + np.repeat(generator.normal(size=20), 20) + generator.normal(0, 0.1, 400)  # bags of 20
    by_bag = instance_auc_interval(labels, scores, np.arange(0, 401, 20))
    as_if_independent = bag_auc_interval(labels, scores)
    assert by_bag.low < roc_auc_score(labels, scores) < by_bag.high
    assert by_bag.high - by_bag.low > 2 * (as_if_independent.high - as_if_independent.low)


def test_mean_interval_covers_as_often_as_claimed():
    generator = np.random.default_rng(0)
    covered = 0
    for trial in range(150):
        values = generator.normal(1.0, 2.0, size=40)
        low, high = bootstrap_interval(
            lambda drawn, v=values: v[drawn].mean(), 40, resamples=200, seed=trial, level=0.9
        )
        covered += low <= 1.0 <= high
    assert 0.80 <= covered / 150 <= 0.96


def test_auc_interval_covers_as_often_as_claimed():
    generator = np.random.default_rng(1)
    truth = norm.cdf(1 / np.sqrt(2))  # two normals one standard deviation apart
    labels = np.repeat([0, 1], 50)
    covered = 0
    for trial in range(300):
        low, high = bag_auc_interval(labels, generator.normal(size=100) + labels, resamples=300, seed=trial)
        covered += low <= truth <= high
    assert 0.90 <= covered / 300 <= 0.99


def test_same_seed_same_interval_and_higher_level_wider():
    labels, scores = some_bags(4, 60, 2)
    first = bag_auc_interval(labels, scores, seed=3)
    assert first == bag_auc_interval(labels, scores, seed=3)
    assert first != bag_auc_interval(labels, scores, seed=4)
    narrow = bag_auc_interval(labels, scores, seed=3, level=0.5)
    assert first.low < narrow.low < narrow.high < first.high


def test_undefined_resamples_are_drawn_again():
    labels = np.array([0, 0, 0, 0, 1])
    seen = []

    def statistic(drawn):
        seen.append(drawn)
        return float("nan") if labels[drawn].sum() in (0, 5) else labels[drawn].mean()

    interval = bootstrap_interval(statistic, 5, resamples=100)
    assert len(seen) > 100
    assert all(drawn.shape == (5,) for drawn in seen)
    assert np.isfinite(interval).all()


def test_strata_keep_their_sizes():
    labels = np.array([0, 0, 0, 1, 1, 0, 2])
    for_all = []
    bootstrap_interval(lambda drawn: for_all.append(sorted(labels[drawn])) or 0.0, 7, resamples=20, labels=labels)
    assert for_all == [[0, 0, 0, 0, 1, 1, 2]] * 20


def test_perfect_separation_gives_a_point():
    assert bag_auc_interval([0, 0, 1, 1], [0.1, 0.2, 0.8, 0.9]) == Interval(1.0, 1.0)


def test_large_cohorts_take_seconds():
    labels, scores, offsets = some_instances(0, 400, 5, sizes=(100, 101))
    started = time.perf_counter()
    instance_auc_interval(labels, scores, offsets)
    assert time.perf_counter() - started < 8  # about 0.3 s on two idle cores


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bootstrap_interval(lambda _: 0.0, 0), "n_bags=0"),
        (lambda: bootstrap_interval(lambda _: 0.0, 5, level=1.0), "level=1.0"),
        (lambda: bootstrap_interval(lambda _: 0.0, 5, resamples=0), "resamples=0"),
        (lambda: bootstrap_interval(lambda _: 0.0, 5, labels=[0, 1]), r"shape \(5,\), got \(2,\)"),
        (lambda: bootstrap_interval(lambda _: float("nan"), 5), "got 0 in 20 rounds"),
        (lambda: bag_auc_interval([1, 1], [0.1, 0.2]), "both classes"),
        (lambda: bag_auc_interval([0, 1], [[0.1, 0.2, 0.3]]), r"or \(retrainings, 2\), got \(1, 3\)"),
        (lambda: bag_auc_interval([0, 1], [0.1, np.nan]), "nan or infinite"),
        (lambda: instance_auc_interval([0, -1], [0.1, 0.2], [0, 2]), "both classes"),
        (
            lambda: instance_auc_interval([0, 1], [0.1, 0.2], [0, 1]),
            "from 0 to 2 instances, got 2 from 0 to 1",
        ),
        (lambda: instance_auc_interval([0, 1], [0.1, 0.2], [0, 2, 1, 2]), "expected to rise"),
        (lambda: instance_auc_interval([0, 1], [0.1, 0.2], []), "got 0 from nothing"),
    ],
)
def test_wrong_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call()
