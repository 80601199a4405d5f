import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from its2clr.files import write_json
from its2clr.run.handover import HANDOVER_FILE, compare, preferred_encoders, said

LABELS = np.tile([0, 1], 40)
GROUPS = np.arange(80).astype(str)


def scored(separation: float, seed: int) -> np.ndarray:
    """Probabilities of bags whose scores differ by so many deviations between the classes."""
    logits = separation * (LABELS - 0.5) + np.random.default_rng(seed).normal(0, 1, len(LABELS))
    return 1 / (1 + np.exp(-logits))


def test_a_clear_gain_hands_over_the_refined_encoder_and_a_loss_does_not():
    poor, good = scored(0.5, 0), scored(2.5, 1)
    better, worse = compare(LABELS, poor, good, GROUPS), compare(LABELS, good, poor, GROUPS)
    assert better["encoder"] == "refined"
    assert worse["encoder"] == "start"
    assert better["measure"] == "AUC"
    assert better["start"] == pytest.approx(roc_auc_score(LABELS, poor))
    assert better["refined"] == pytest.approx(roc_auc_score(LABELS, good))
    assert better["gain"] == -worse["gain"] == pytest.approx(better["refined"] - better["start"])
    assert better["confidence"] > 0.99
    assert "refined encoder is handed over: on 80 validation bags AUC" in said(better)


def test_its_standard_error_is_the_spread_over_repeated_samples():
    found = [compare(LABELS, scored(1.0, seed), scored(1.5, seed + 1000), GROUPS) for seed in range(400)]
    spread = np.std([one["gain"] for one in found])
    assert np.mean([one["standard_error"] for one in found]) == pytest.approx(spread, rel=0.1)


def test_bags_of_a_patient_count_as_one():
    few = np.repeat([0, 1] * 4, 10)
    noise = np.random.default_rng(1).normal(0, 1, 8).repeat(10) + np.random.default_rng(2).normal(0, 0.01, 80)
    start, refined = 1 / (1 + np.exp(-few + noise)), 1 / (1 + np.exp(-2 * few + noise[::-1]))
    alone = compare(few, start, refined, GROUPS)
    grouped = compare(few, start, refined, np.repeat(np.arange(8), 10).astype(str))
    assert grouped["standard_error"] > 2.5 * alone["standard_error"]


def test_encoders_that_rank_alike_are_compared_by_log_loss():
    perfect = np.where(LABELS == 1, 0.7, 0.3) + np.random.default_rng(0).normal(0, 0.02, 80)
    surer = np.where(LABELS == 1, 0.9, 0.1) + np.random.default_rng(1).normal(0, 0.02, 80)
    found = compare(LABELS, perfect, surer, GROUPS)
    assert found["measure"] == "log loss"
    assert found["encoder"] == "refined"
    assert found["gain"] > 0
    assert compare(LABELS, surer, perfect, GROUPS)["encoder"] == "start"


def test_equal_encoders_and_single_groups_hand_over_the_start():
    assert compare(LABELS, scored(1, 0), scored(1, 0), GROUPS)["encoder"] == "start"
    assert compare(LABELS, scored(0.1, 0), scored(3, 1), np.full(80, "one patient"))["encoder"] == "start"


def test_a_little_better_on_validation_is_enough():
    start = scored(1.0, 0)
    swapped = start.copy()
    low, high = np.flatnonzero(LABELS == 1)[
        np.argsort(start[LABELS == 1])[:2]
    ]  # a positive bag, ranked a little higher
    swapped[low] = start[high] + 1e-3
    found = compare(LABELS, start, swapped, GROUPS)
    assert 0.5 < found["confidence"] < 0.9
    assert found["encoder"] == "refined"


def test_without_a_comparison_the_refined_encoder_comes_first(tmp_path):
    assert preferred_encoders(tmp_path)[0] == "refined"
    write_json(tmp_path / HANDOVER_FILE, {"encoder": "start"})
    assert preferred_encoders(tmp_path)[0] == "start"


def test_the_comparison_of_an_older_run_is_said_too():
    older = {"encoder": "start", "start_log_loss": 0.5, "refined_log_loss": 0.6, "confidence": 0.3, "bags": 9}
    assert said(older).startswith("the start encoder is handed over: on 9 validation bags log loss 0.500")
