import evaluation_references as reference
import numpy as np
import pytest

from its2clr.errors import InputError
from its2clr.evaluation import bag_metrics


def some_bags(seed, count=40, decimals=1):
    generator = np.random.default_rng(seed)
    labels = (generator.random(count) < 0.4).astype(int)
    labels[:2] = (0, 1)
    return labels, np.round(generator.normal(size=count) + labels, decimals)  # rounded: many ties


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("decimals", [0, 1, 8])
def test_equals_the_slow_reference(seed, decimals):
    labels, scores = some_bags(seed, decimals=decimals)
    validation_labels, validation_scores = some_bags(seed + 100, 30, decimals)
    metrics = bag_metrics(labels, scores, validation_labels, validation_scores)
    threshold = reference.best_threshold(
        reference.balanced_accuracy, validation_labels.tolist(), validation_scores.tolist()
    )
    assert metrics["auc"] == pytest.approx(reference.auc(labels, scores))
    assert metrics["auprc"] == pytest.approx(reference.average_precision(labels, scores.tolist()))
    assert metrics["threshold"] == pytest.approx(threshold)
    assert metrics["balanced_accuracy"] == pytest.approx(
        reference.balanced_accuracy(labels, scores, metrics["threshold"])
    )


def test_without_validation_nothing_is_thresholded():
    assert set(bag_metrics(*some_bags(0))) == {"auc", "auprc"}


def test_threshold_is_the_midpoint_and_of_equal_cuts_the_highest():
    assert bag_metrics([0, 1], [0, 1], [0, 0, 1, 1], [0.1, 0.2, 0.6, 0.8])["threshold"] == pytest.approx(0.4)
    # Cutting above 0.2 or above 0.6 both give 0.75.
    tied = bag_metrics([0, 1], [0, 1], [0, 1, 0, 1], [0.2, 0.4, 0.6, 0.8])
    assert tied["threshold"] == pytest.approx(0.7)


def test_threshold_is_finite_when_scores_say_nothing_or_lie():
    assert bag_metrics([0, 1], [0, 1], [0, 1, 1], [0.5, 0.5, 0.5])["threshold"] == 0.5
    assert bag_metrics([0, 1], [0, 1], [1, 0], [0.2, 0.7])["threshold"] == 0.2


def test_neighbouring_floats_are_still_told_apart():
    low = 0.5
    high = float(np.nextafter(low, 1))
    metrics = bag_metrics([0, 1], [low, high], [0, 1], [low, high])
    assert metrics["balanced_accuracy"] == 1.0


def test_any_rising_change_of_score_changes_nothing_but_the_threshold():
    labels, scores = some_bags(3)
    plain = bag_metrics(labels, scores, labels, scores)
    scaled = bag_metrics(labels, 100 * scores - 7, labels, 100 * scores - 7)
    assert {**plain, "threshold": 0} == pytest.approx({**scaled, "threshold": 0})


@pytest.mark.parametrize(
    ("labels", "scores", "message"),
    [
        ([1, 1], [0.1, 0.2], "both classes, got 2 positive and 0 negative"),
        ([0, 1], [0.1], "expected 2 entries, got 1"),
        ([0, 1], [0.1, np.nan], "got 1 of 2 that are nan"),
        ([0, 2], [0.1, 0.2], r"among \(0, 1\), got 2"),
        ([0, 1, -1], [0.1, 0.2, 0.3], "got -1"),
        ([[0, 1]], [0.1, 0.2], "one dimension"),
        ([0, 1], ["a", "b"], "expected numbers"),
        ([], [], "both classes"),
    ],
)
def test_wrong_input_is_named(labels, scores, message):
    with pytest.raises(InputError, match=message):
        bag_metrics(labels, scores)
    with pytest.raises(InputError, match=message):
        bag_metrics([0, 1], [0, 1], labels, scores)


def test_half_a_validation_set_is_refused():
    with pytest.raises(InputError, match="got no validation_scores"):
        bag_metrics([0, 1], [0, 1], validation_labels=[0, 1])
    with pytest.raises(InputError, match="got no validation_labels"):
        bag_metrics([0, 1], [0, 1], validation_scores=[0, 1])
