import math

import numpy as np
import pytest

from its2clr.refine.pseudo_labels import (
    false_discovery_threshold,
    negative_bag_threshold,
    partition,
    same_share_threshold,
)


def slow_partition(bags, labels, threshold, ratio, top_instance):
    """The pools of section 3.2 by loops over instances."""
    negative_bag, positives, negatives, index = [], [], [], 0
    for bag, label in zip(bags, labels, strict=True):
        top, top_index, any_positive = -1.0, None, False
        members = []
        for probability in bag:
            if label == 0:
                negative_bag.append(index)
            else:
                members.append((index, probability))
                any_positive |= probability > threshold
                if probability > top:
                    top, top_index = probability, index
            index += 1
        for place, probability in members:
            if probability > threshold or (top_instance and not any_positive and place == top_index):
                positives.append((probability, place))
            else:
                negatives.append((probability, place))
    positives.sort(key=lambda item: (-item[0], item[1]))
    negatives.sort()
    kept_positives = positives[: math.ceil(round(ratio * len(positives), 9))]
    kept_negatives = negatives[: math.ceil(round(ratio * len(negatives), 9))]
    return negative_bag, sorted(p for _, p in kept_positives), sorted(p for _, p in kept_negatives)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ratio", [0.01, 0.2, 0.55, 1.0])
@pytest.mark.parametrize("top_instance", [False, True])
def test_equals_the_slow_reference(seed, ratio, top_instance):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, 8)
    bags = [np.round(rng.random(rng.integers(1, 12)), 1) for _ in labels]  # one decimal: ties are common
    threshold = float(rng.choice([0.0, 0.3, 0.5, 0.95]))
    expected = slow_partition(bags, labels, threshold, ratio, top_instance)
    per_bag = partition(bags, labels, threshold, ratio, top_instance=top_instance)
    sizes = [len(bag) for bag in bags]
    ids = np.repeat(np.arange(len(bags)), sizes)
    rows = np.concatenate(bags), np.repeat(labels, sizes)
    flat = partition(*rows, threshold, ratio, bag_ids=ids, top_instance=top_instance)
    for pools in (per_bag, flat):
        assert pools.negative_bag.tolist() == expected[0]
        assert pools.pseudo_positive.tolist() == expected[1]
        assert pools.pseudo_negative.tolist() == expected[2]


@pytest.mark.parametrize(("top_instance", "positive", "negative"), [(False, [2], [0, 1, 3]), (True, [1, 2], [0, 3])])
def test_a_positive_bag_below_the_threshold(top_instance, positive, negative):
    bags = [[0.1, 0.2], [0.9, 0.1], [0.05]]
    pools = partition(bags, [1, 1, 0], threshold=0.5, ratio=1.0, top_instance=top_instance)
    assert pools.pseudo_positive.tolist() == positive
    assert pools.pseudo_negative.tolist() == negative
    assert pools.negative_bag.tolist() == [4]


def test_flat_without_bags_counts_the_positive_bags_as_one():
    pools = partition([0.1, 0.25, 0.2, 0.9], [1, 1, 1, 0], threshold=0.5, ratio=1.0, top_instance=True)
    assert pools.pseudo_positive.tolist() == [1]
    assert pools.negative_bag.tolist() == [3]


def test_probability_at_the_threshold_is_negative():
    pools = partition(np.array([0.3, 0.31]), np.array([1, 1]), threshold=0.3, ratio=1.0)
    assert pools.pseudo_positive.tolist() == [1]


def test_share_is_rounded_up_but_not_by_rounding_noise():
    pools = partition(np.linspace(0.6, 0.9, 30), np.ones(30, int), threshold=0.5, ratio=0.1)
    assert len(pools.pseudo_positive) == 3  # 0.1 * 30 is 3.0000000000000004 in floating point


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.1], [2], 0.3, 1.0), "0 or 1"),
        (([0.1, 0.2], [1], 0.3, 1.0), "one bag label per instance"),
        (([[0.1], [0.2]], [1], 0.3, 1.0), "2 bags of probabilities but 1"),
        (([0.1], [1], 0.3, 0.0), "ratio"),
        (([0.1], [1], 1.3, 1.0), "threshold"),
        (([float("nan")], [1], 0.3, 1.0), "NaN"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        partition(*arguments)


def test_threshold_of_known_negatives_lets_no_more_than_the_rate_pass():
    scores = np.random.default_rng(0).random(501)
    for rate in (0.01, 0.05, 0.2):
        threshold = negative_bag_threshold(scores, rate)
        assert (scores > threshold).mean() <= rate < (scores > threshold - 1e-9).mean() + 1 / 501
    assert negative_bag_threshold(np.full(10, 0.4), 0.02) == 0.4


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.4])
@pytest.mark.parametrize("witness_rate", [0.05, 0.3, 0.7])
def test_as_many_pseudo_positives_are_wrong_as_the_false_discovery_rate_allows(rate, witness_rate):
    generator = np.random.default_rng(0)
    truth = generator.random(20_000) < witness_rate
    mixed = generator.normal(np.where(truth, 2.5, 0.0), 1)
    scores = np.concatenate([generator.normal(0, 1, 20_000), mixed])
    threshold = false_discovery_threshold(scores, np.arange(40_000) >= 20_000, rate)
    wrong = 1 - truth[mixed > threshold].mean()
    assert wrong == pytest.approx(min(rate, 1 - witness_rate), abs=0.06)


def test_the_false_discovery_threshold_is_the_lowest_that_a_slow_search_finds():
    generator = np.random.default_rng(1)
    for size in (5, 30, 200):
        known = generator.normal(0, 1, size).round(1)
        mixed = np.concatenate([generator.normal(0, 1, size), generator.normal(2, 1, size // 2)]).round(1)
        scores, positive = np.concatenate([known, mixed]), np.arange(2 * size + size // 2) >= size
        negatives = min(1.0, 2 * sum(score <= np.median(known) for score in mixed) / len(mixed))
        fitting = []
        for threshold in sorted(mixed):
            passing = sum(score > threshold for score in mixed) / len(mixed)
            wrong = negatives * sum(score > threshold for score in known) / len(known)
            if passing > 0 and wrong / passing <= 0.2:
                fitting.append(threshold)
        assert false_discovery_threshold(scores, positive, 0.2) == (min(fitting) if fitting else None)


def test_scores_that_tell_nothing_have_no_threshold_with_few_false_discoveries():
    scores = np.tile([0.1, 0.2, 0.3, 0.4], 50)
    assert false_discovery_threshold(scores, np.arange(200) % 8 < 4, 0.2) is None


@pytest.mark.parametrize("seed", range(20))
def test_the_same_share_passes_as_among_known_instances(seed):
    rng = np.random.default_rng(seed)
    known, others = rng.random(rng.integers(1, 40)), rng.random(rng.integers(1, 200)) ** 0.3
    for threshold in (0.0, 0.5, 0.97, 2.0):
        share = sum(score > threshold for score in known) / len(known)
        most = min(math.floor(share * len(others)), len(others) - 1)
        found = same_share_threshold(threshold, known, others)
        assert sum(score > found for score in others) == most  # scores without ties
        assert found in others


def test_ties_pass_less_than_the_share():
    assert same_share_threshold(0.5, np.array([0.2, 0.9]), np.array([0.7, 0.7, 0.7, 0.1])) == 0.7
