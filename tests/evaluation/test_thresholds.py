import evaluation_references as reference
import numpy as np
import pytest

from its2clr.errors import InputError
from its2clr.evaluation.bags import bag_metrics
from its2clr.evaluation.thresholds import balanced_accuracy_threshold, iou_threshold, max_f1


def some_scores(seed, decimals):
    generator = np.random.default_rng(seed)
    labels = (generator.random(40) < 0.4).astype(int)
    labels[:2] = (0, 1)
    return labels, np.round(generator.normal(size=40) + labels, decimals)  # rounded: many ties


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("decimals", [0, 1, 8])
def test_equal_the_slow_reference(seed, decimals):
    labels, scores = some_scores(seed, decimals)
    pairs = ((balanced_accuracy_threshold, reference.balanced_accuracy), (iou_threshold, reference.iou))
    for threshold, quality in pairs:
        assert threshold(labels, scores) == pytest.approx(reference.best_threshold(quality, labels, scores.tolist()))
    assert max_f1(labels, scores) == pytest.approx(reference.max_f1(labels, scores))


def test_threshold_is_the_midpoint_and_of_equal_cuts_the_highest():
    assert balanced_accuracy_threshold([0, 0, 1, 1], [0.1, 0.2, 0.6, 0.8]) == pytest.approx(0.4)
    # Cutting above 0.2 or above 0.6 both give 0.75.
    assert balanced_accuracy_threshold([0, 1, 0, 1], [0.2, 0.4, 0.6, 0.8]) == pytest.approx(0.7)


def test_threshold_is_finite_when_scores_say_nothing_or_lie():
    assert balanced_accuracy_threshold([0, 1, 1], [0.5, 0.5, 0.5]) == 0.5
    assert balanced_accuracy_threshold([1, 0], [0.2, 0.7]) == 0.2


def test_neighbouring_floats_are_still_told_apart():
    scores = [0.5, float(np.nextafter(0.5, 1))]
    assert bag_metrics([0, 1], scores, balanced_accuracy_threshold([0, 1], scores))["balanced_accuracy"] == 1.0


def test_unknown_instances_have_no_say():
    labels, scores = some_scores(3, 1)
    mixed = np.insert(labels, [0, 20], -1), np.insert(scores, [0, 20], (5.0, 0.05))
    for function in (iou_threshold, max_f1):
        assert function(*mixed) == function(labels, scores)


def test_wrong_input_is_named():
    with pytest.raises(InputError, match="validation bags: expected labels of both classes, got 2 positive"):
        balanced_accuracy_threshold([1, 1], [0.1, 0.2])
    with pytest.raises(InputError, match="got -1"):
        balanced_accuracy_threshold([0, 1, -1], [0.1, 0.2, 0.3])
    with pytest.raises(InputError, match="validation instances: expected labels of both classes"):
        iou_threshold([0, 0, -1], [0.1, 0.2, 0.3])
    with pytest.raises(InputError, match="expected 2 entries, got 1"):
        max_f1([0, 1], [0.1])
