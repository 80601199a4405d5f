import numpy as np
import pytest

from its2clr.errors import InputError
from its2clr.evaluation.health import estimate_witness_rate


def mixture(rate, apart, seed, count=4000):
    generator = np.random.default_rng(seed)
    labels = np.repeat([0, 1], count)
    positive = np.arange(2 * count) >= 2 * count - round(rate * count)
    return generator.normal(apart * positive, 1.0), labels


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0])
def test_the_rate_of_a_mixture_is_found(rate):
    found = [estimate_witness_rate(*mixture(rate, 4.0, seed)) for seed in range(5)]
    assert np.mean(found) == pytest.approx(rate, abs=0.03)


def test_scores_that_overlap_give_too_little():
    for rate in (0.3, 0.6):
        found = [estimate_witness_rate(*mixture(rate, 1.0, seed)) for seed in range(10)]
        assert 0 < np.mean(found) < rate
    assert np.mean([estimate_witness_rate(*mixture(0.3, 0.0, seed)) for seed in range(5)]) < 0.03


def test_only_the_order_of_scores_counts():
    scores, labels = mixture(0.2, 3.0, 0)
    assert estimate_witness_rate(scores, labels) == estimate_witness_rate(np.exp(scores / 2), labels)


def test_against_every_bin_by_hand():
    scores, labels = mixture(0.3, 2.0, 1, count=60)
    negative, positive = scores[labels == 0], scores[labels == 1]
    slack = 2 * np.sqrt(np.log(40) / 120)
    bins = [(np.mean(positive <= c), np.mean(negative <= c)) for c in negative]
    mixed, below = min(bins, key=lambda one: (one[0] + slack) / one[1])
    assert estimate_witness_rate(scores, labels) == pytest.approx(1 - mixed / below)


def test_one_kind_of_bags_is_not_enough():
    with pytest.raises(InputError, match="both positive and negative bags"):
        estimate_witness_rate([0.1, 0.2], [1, 1])
