import evaluation_references as reference
import numpy as np
import pytest

from its2clr.errors import InputError
from its2clr.evaluation.instances import pseudo_label_quality


def test_equals_counting():
    generator = np.random.default_rng(0)
    truth = generator.choice([-1, 0, 1], 100, p=[0.1, 0.6, 0.3])
    probabilities = np.clip(generator.normal(0.3 + 0.3 * (truth == 1), 0.2), 0, 1)
    order = np.argsort(probabilities)
    negative, positive = order[:40], order[-20:]
    selected = np.zeros(100, dtype=int)
    selected[positive], selected[negative] = 1, -1
    quality = pseudo_label_quality(truth, probabilities, selected)

    positive_truth = [truth[i] for i in positive if truth[i] >= 0]
    negative_truth = [truth[i] for i in negative if truth[i] >= 0]
    hits = sum(positive_truth)
    known = truth >= 0
    assert quality == pytest.approx(
        {
            "precision": hits / len(positive_truth),
            "recall": hits / sum(t == 1 for t in truth),
            "selected_recall": hits / (hits + sum(negative_truth)),
            "negative_precision": negative_truth.count(0) / len(negative_truth),
            "instance_auc": reference.auc(truth[known], probabilities[known]),
            "instance_max_f1": reference.max_f1(truth[known], probabilities[known]),
        }
    )


def test_nothing_selected_is_nan_but_no_positive_selected_is_zero_recall():
    quality = pseudo_label_quality([0, 1, 1], [0.1, 0.6, 0.7], [-1, -1, 0])
    assert np.isnan(quality["precision"])
    assert quality["recall"] == quality["selected_recall"] == 0.0
    assert quality["negative_precision"] == 0.5
    assert np.isnan(pseudo_label_quality([0, 1], [0.1, 0.6], [0, 0])["selected_recall"])


@pytest.mark.parametrize(
    ("truth", "probabilities", "selected", "message"),
    [
        ([0, 1, 1], [0.1, 0.2, 0.3], [0, 1], "selected: expected 3 entries, got 2"),
        ([0, 1, 1], [0.1, 0.2, 0.3], [0, 2, 1], r"selected: expected labels among \(-1, 0, 1\), got 2"),
        ([1, 1, -1], [0.1, 0.2, 0.3], [1, 0, 0], "both classes"),
        ([1, 0], [0.1], [1, 0], "expected 2 entries, got 1"),
    ],
)
def test_wrong_input_is_named(truth, probabilities, selected, message):
    with pytest.raises(InputError, match=message):
        pseudo_label_quality(truth, probabilities, selected)
