import numpy as np
import pytest

from its2clr.files import write_json
from its2clr.run.handover import HANDOVER_FILE, compare, preferred_encoders, said


def test_a_clear_gain_hands_over_the_refined_encoder_and_a_loss_does_not():
    generator = np.random.default_rng(0)
    groups = np.arange(60).astype(str)
    start, noise = generator.uniform(0.5, 1.0, 60) / 60, generator.normal(0, 0.1, 60) / 60
    better, worse = compare(start, start - 0.1 / 60 + noise, groups), compare(start, start + 0.1 / 60 + noise, groups)
    assert better["encoder"] == "refined"
    assert worse["encoder"] == "start"
    assert better["gain"] == pytest.approx(0.1 - noise.sum())
    assert better["standard_error"] == pytest.approx(noise.std(ddof=1) * np.sqrt(60))
    assert better["confidence"] > 0.99
    assert "refined encoder is handed over" in said(better)


def test_equal_encoders_and_single_groups_hand_over_the_start():
    losses = np.full(10, 0.05)
    assert compare(losses, losses, np.arange(10).astype(str))["encoder"] == "start"
    assert compare(losses, losses / 2, np.full(10, "one patient"))["encoder"] == "start"


def test_bags_of_a_patient_count_as_one():
    start = np.repeat(np.random.default_rng(1).normal(0.1, 0.3, 6), 10)
    alone = compare(start, np.zeros(60), np.arange(60).astype(str))
    grouped = compare(start, np.zeros(60), np.repeat(np.arange(6), 10).astype(str))
    assert grouped["standard_error"] > 2.5 * alone["standard_error"]


def test_without_a_comparison_the_refined_encoder_comes_first(tmp_path):
    assert preferred_encoders(tmp_path)[0] == "refined"
    write_json(tmp_path / HANDOVER_FILE, {"encoder": "start"})
    assert preferred_encoders(tmp_path)[0] == "start"
