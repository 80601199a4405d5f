import json

import numpy as np
import pytest

from its2clr.engine.guard import advice
from its2clr.errors import InputError
from its2clr.evaluation.health import (
    churn,
    contrast_auc,
    false_positive_share,
    health_report,
    median_auc,
    positive_share,
    seed_agreement,
    start_kept,
    warnings_of,
)

BAG_LABELS = np.array([0, 1, 0, 1])
OFFSETS = np.array([0, 10, 20, 30, 40])
PER_INSTANCE = np.repeat(BAG_LABELS, 10)


def healthy():
    """Two of ten instances positive in each positive bag, none elsewhere."""
    probabilities = np.full(40, 0.1) + (9 - np.arange(40) % 10) / 1000
    probabilities[[10, 11, 30, 31]] = 0.9
    return probabilities


def test_shares_by_counting():
    generator = np.random.default_rng(0)
    probabilities, labels = np.round(generator.random(200), 1), generator.integers(0, 2, 200)
    wrong = [p > 0.3 for p, label in zip(probabilities, labels, strict=True) if label == 0]
    found = [p > 0.3 for p, label in zip(probabilities, labels, strict=True) if label == 1]
    assert false_positive_share(probabilities, labels, 0.3) == pytest.approx(sum(wrong) / len(wrong))
    assert positive_share(probabilities, labels, 0.3) == pytest.approx(sum(found) / len(found))


def test_a_probability_at_the_threshold_is_not_positive():
    assert positive_share([0.5, 0.6], [1, 1], 0.5) == 0.5


def test_shares_without_such_bags_are_nan():
    assert np.isnan(false_positive_share([0.5], [1], 0.3))
    assert np.isnan(positive_share([0.5], [0], 0.3))


def test_churn():
    assert np.isnan(churn(None, [0, 1]))
    assert churn([0, 1, 1, 0], [0, 0, 1, 1]) == 0.5
    assert churn([0, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 0]) == pytest.approx(1 / 3)
    assert np.isnan(churn([0], [1], [0]))


def slow_spearman(first, second):
    def ranks(values):
        return [sum(other < v for other in values) + (sum(other == v for other in values) + 1) / 2 for v in values]

    return np.corrcoef(ranks(first), ranks(second))[0, 1]


def slow_kappa(first, second):
    agreed = sum(a == b for a, b in zip(first, second, strict=True)) / len(first)
    both = np.mean(first) * np.mean(second)
    by_chance = both + (1 - np.mean(first)) * (1 - np.mean(second))
    return (agreed - by_chance) / (1 - by_chance)


def test_seed_agreement_equals_the_slow_reference():
    generator = np.random.default_rng(1)
    truth, labels = generator.random(60), generator.integers(0, 2, 60)
    seeds = np.round(np.clip(truth + generator.normal(0, 0.2, (3, 60)), 0, 1), 1)
    kept = seeds[:, labels == 1]
    pairs = [(0, 1), (0, 2), (1, 2)]
    agreement = seed_agreement(seeds, 0.4, labels)
    assert agreement.spearman == pytest.approx(np.mean([slow_spearman(kept[i], kept[j]) for i, j in pairs]))
    assert agreement.kappa == pytest.approx(np.mean([slow_kappa(kept[i] > 0.4, kept[j] > 0.4) for i, j in pairs]))


def test_seed_agreement_leaves_undefined_pairs_out():
    rising = np.linspace(0, 1, 10)
    assert seed_agreement([rising, rising], 0.5) == pytest.approx((1.0, 1.0))
    with_constant = seed_agreement([rising, rising, np.full(10, 0.2)], 0.5)
    assert with_constant.spearman == pytest.approx(1.0)
    assert with_constant.kappa == pytest.approx(1 / 3)  # against a constant, kappa is 0
    assert np.isnan(seed_agreement([rising, rising], 2.0).kappa)
    assert np.isnan(seed_agreement([rising], 0.5)).all()
    assert np.isnan(seed_agreement([rising, rising], 0.5, np.zeros(10))).all()


def test_report_of_a_healthy_run_is_json_without_warnings():
    report = health_report([healthy(), np.stack([healthy(), healthy()])], BAG_LABELS, OFFSETS, [0.5, 0.5])
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["positive_bags"] == report["negative_bags"] == 2
    first, second = report["rounds"]
    assert first["churn"] is None
    assert first["seed_spearman"] is None
    assert second == {
        "round": 1,
        "threshold": 0.5,
        "median_auc": 0.5,
        "contrast_auc": 1.0,
        "false_positive_share": 0.0,
        "positive_share": 0.2,
        "churn": 0.0,
        "seed_spearman": pytest.approx(1.0),
        "seed_kappa": pytest.approx(1.0),
        "empty_positive_bags": 0,
    }
    assert warnings_of(report) == []


def warnings_after(*rounds):
    return warnings_of(health_report(rounds, BAG_LABELS, OFFSETS, [0.5] * len(rounds)))


def test_false_positives_are_said():
    wrong = healthy()
    wrong[[0, 1]] = 0.9
    (sentence,) = warnings_after(wrong)
    assert sentence.startswith("10% of instances from negative bags are scored positive: raise refine.threshold")


def test_uninformative_pseudo_labels_are_said():
    sentences = warnings_after(np.full(40, 0.9))
    assert any("no more often in positive bags (100%) than in negative bags (100%)" in s for s in sentences)
    assert not any("stain" in s for s in sentences)


def test_whole_bags_called_positive_are_said():
    (sentence,) = warnings_after(np.where(PER_INSTANCE == 1, 0.9, 0.1))
    assert sentence.startswith("100% of instances from positive bags are pseudo-positive")


def test_what_a_whole_bag_shares_is_said():
    stained = healthy() + np.where(PER_INSTANCE == 1, 0.2, 0.0)
    assert warnings_after(stained) == []  # positives stand out all the same
    noise = np.random.default_rng(0).uniform(0.0, 0.15, 40)
    noise[[3, 23]] = 0.3, 0.3  # what stands out, if anything, does so in negative bags
    sentences = warnings_after(noise + np.where(PER_INSTANCE == 1, 0.3, 0.0))
    assert any(s.startswith("a bag's median instance tells its label (AUC 1.00) better than") for s in sentences)


def test_contrast_auc_by_hand():
    offsets = [0, 3, 6]
    plain = [0.1, 0.2, 0.9, 0.3, 0.3, 0.4]
    assert contrast_auc(plain, [1, 0], offsets) == 1.0
    assert contrast_auc(plain, [0, 1], offsets) == 0.0
    odds = np.log(np.array(plain) / (1 - np.array(plain)))
    odds[:3] += 5  # what a bag shares cancels
    assert contrast_auc(1 / (1 + np.exp(-odds)), [0, 1], offsets) == 0.0
    assert contrast_auc([0.0, 0.5, 1.0, 0.5, 0.5, 0.5], [1, 0], offsets) == 1.0
    assert np.isnan(contrast_auc(plain, [1, 1], offsets))


def test_median_auc_by_hand():
    scores = [0.1, 0.2, 0.9, 0.3, 0.3, 0.1, 0.1, 0.8]
    assert median_auc(scores, [1, 0, 1], [0, 3, 5, 8]) == 0.0  # medians 0.2, 0.3, 0.1
    assert median_auc(scores, [0, 1, 0], [0, 3, 5, 8]) == 1.0
    assert np.isnan(median_auc(scores, [1, 1, 1], [0, 3, 5, 8]))


def test_churn_counts_in_the_last_round_only():
    moved = healthy()
    moved[[10, 11, 30, 31]], moved[[15, 16, 35, 36]] = 0.1, 0.9
    (sentence,) = warnings_after(healthy(), moved)
    assert sentence.startswith("pseudo labels flipped by 40% in the last round")
    assert warnings_after(healthy(), moved, moved) == []


def test_positive_bags_without_a_positive_are_said():
    empty = healthy()
    empty[[30, 31]] = 0.2
    (sentence,) = warnings_after(empty)
    assert sentence.startswith("no pseudo-positive in 1 of 2 positive bags")


def test_scores_that_overlap_are_not_a_matter_of_the_threshold():
    both = healthy()
    both[[0, 1, 12]], both[[30, 31]] = 0.9, 0.2
    (sentence,) = warnings_after(both)
    assert sentence.startswith("scores of positives and negatives overlap: 10% of instances from negative bags")
    assert "1 of 2 positive bags" in sentence
    assert "refine.threshold" not in sentence


def test_disagreeing_seeds_are_said():
    other = healthy()[::-1] / 2 + 0.2
    sentences = warnings_after(np.stack([healthy(), other]))
    assert any(s.startswith("seeds disagree (rank correlation -") for s in sentences)


def test_a_refinement_that_stayed_at_its_start_is_said():
    sentence = start_kept([0.8, 0.79, 0.75], [True, False, False])
    assert sentence is not None
    assert sentence.startswith("no round improved on the start (validation AUC 0.800, later at best 0.790)")
    assert sentence.endswith("Try a higher refine.learning_rate or more refine.epochs")
    stuck = start_kept([0.8, 0.79], [True, False], advice("refine"))
    assert stuck is not None
    assert "a lower refine.learning_rate" in stuck
    assert "a higher refine.learning_rate" not in stuck
    assert start_kept([0.8, 0.79, 0.81], [True, False, True]) is None
    assert start_kept([0.8], [True]) is None  # nothing was tried yet


def test_wrong_input_is_named():
    with pytest.raises(InputError, match="at least one round"):
        health_report([], BAG_LABELS, OFFSETS, [])
    with pytest.raises(InputError, match="expected 4 for 3 bags, got 5"):
        health_report([healthy()], BAG_LABELS[:3], OFFSETS, [0.5])
    with pytest.raises(InputError, match="probabilities of round 1"):
        health_report([healthy(), healthy()[:-1]], BAG_LABELS, OFFSETS, [0.5, 0.5])
    with pytest.raises(InputError, match="expected 2 entries, got 1"):
        false_positive_share([0.5], [0, 1], 0.5)
    with pytest.raises(InputError, match="expected 2 entries, got 1"):
        churn([1], [0, 1])
