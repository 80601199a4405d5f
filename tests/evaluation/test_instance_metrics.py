import time
from itertools import product

import evaluation_references as reference
import numpy as np
import pytest
from scipy.special import expit

from its2clr.errors import InputError
from its2clr.evaluation.dice import fit_dice, soft_dice
from its2clr.evaluation.instances import instance_metrics

PRINTED = {"slope_range": (-5.0, 5.0), "intercept_range": (0.1, 10.0)}


def some_instances(seed, count=120, *, logits=False, decimals=8):
    generator = np.random.default_rng(seed)
    labels = (generator.random(count) < 0.15).astype(int)
    labels[:2] = (0, 1)
    scores = generator.normal(-3, 2, count) + 4 * labels
    return labels, np.round(scores if logits else expit(scores), decimals)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("decimals", [1, 8])
def test_equals_the_slow_reference(seed, decimals):
    labels, scores = some_instances(seed, decimals=decimals)
    tuning_labels, tuning_scores = some_instances(seed + 100, 90, decimals=decimals)
    metrics = instance_metrics(labels, scores, tuning_labels, tuning_scores)
    threshold = reference.best_threshold(reference.iou, tuning_labels.tolist(), tuning_scores.tolist())
    assert metrics["auc"] == pytest.approx(reference.auc(labels, scores))
    assert metrics["auprc"] == pytest.approx(reference.average_precision(labels, scores.tolist()))
    assert metrics["max_f1"] == pytest.approx(reference.max_f1(labels, scores))
    assert metrics["iou_threshold"] == pytest.approx(threshold)
    assert metrics["iou"] == pytest.approx(reference.iou(labels, scores, metrics["iou_threshold"]))
    assert metrics["dice"] == pytest.approx(
        reference.dice(labels, scores, metrics["dice_slope"], metrics["dice_intercept"])
    )


def test_settings_come_from_validation_alone():
    first, second = some_instances(0, logits=True), some_instances(2, logits=True)
    tuning = some_instances(1, logits=True)
    fit = fit_dice(*tuning)
    assert fit[:2] != fit_dice(*first)[:2] != fit_dice(*second)[:2]  # otherwise this test says nothing
    for labels, scores in (first, second):
        metrics = instance_metrics(labels, scores, *tuning)
        assert (metrics["dice_slope"], metrics["dice_intercept"]) == (fit.slope, fit.intercept)
        assert metrics["iou_threshold"] == instance_metrics(*tuning, *tuning)["iou_threshold"]
    assert set(instance_metrics(*first)) == {"auc", "auprc", "max_f1"}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("ranges", [{}, PRINTED])
def test_fitted_dice_is_no_worse_than_a_fine_grid(seed, logits, ranges):
    labels, scores = some_instances(seed, logits=logits)
    fit = fit_dice(labels, scores, **ranges)
    slope_range, intercept_range = (
        ranges.get("slope_range", (0.1, 10)),
        ranges.get("intercept_range", (-5, 5)),
    )
    best = 0.0
    for slope in np.linspace(*slope_range, 150):
        probabilities = expit(slope * scores[:, None] + np.linspace(*intercept_range, 150))
        values = 2 * probabilities[labels == 1].sum(axis=0) / (labels.sum() + probabilities.sum(axis=0))
        best = max(best, values.max())
    assert fit.dice >= best - 1e-4
    assert fit.dice == pytest.approx(reference.dice(labels, scores, fit.slope, fit.intercept))
    assert slope_range[0] <= fit.slope <= slope_range[1]
    assert intercept_range[0] <= fit.intercept <= intercept_range[1]


@pytest.mark.parametrize("seed", [6, 9, 10])
def test_the_highest_of_several_peaks_is_found(seed):
    generator = np.random.default_rng(seed)
    labels = (generator.random(60) < 0.15).astype(int)
    labels[:2] = (0, 1)
    scores = generator.normal(-9, 6, 60) + 4 * labels  # few logits, far apart: a grid of 11 leads to a lower peak
    best = max(
        soft_dice(labels, scores, *point) for point in product(np.geomspace(0.1, 10, 80), np.linspace(-5, 5, 80))
    )
    assert fit_dice(labels, scores).dice >= best - 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_no_point_close_by_is_better(seed):
    labels, scores = some_instances(seed, 3000, logits=True)
    fit = fit_dice(labels, scores)
    for step in (-0.03, 0, 0.03):
        for other in (-0.03, 0, 0.03):
            slope, intercept = np.clip(fit.slope + step, 0.1, 10), np.clip(fit.intercept + other, -5, 5)
            assert soft_dice(labels, scores, slope, intercept) <= fit.dice + 1e-9


def test_many_scores_are_fitted_as_well_and_fast():
    labels, scores = some_instances(5, 250_000, decimals=12)
    started = time.perf_counter()
    fit = fit_dice(labels, scores)
    assert time.perf_counter() - started < 8  # about half a second on two idle cores
    around = [
        soft_dice(labels, scores, np.clip(fit.slope + step, 0.1, 10), np.clip(fit.intercept + other, -5, 5))
        for step in (-0.2, 0, 0.2)
        for other in (-0.2, 0, 0.2)
    ]
    assert fit.dice == pytest.approx(max(around), abs=1e-6)
    assert fit == fit_dice(labels, scores)


def test_ranges_as_printed_hold_dice_of_probabilities_down():
    labels, scores = some_instances(6, 2000)
    prevalence = labels.mean()
    bound = 2 * prevalence / (2 * prevalence + expit(0.1) * (1 - prevalence))
    printed, default = fit_dice(labels, scores, **PRINTED), fit_dice(labels, scores)
    assert printed.dice < bound < default.dice - 0.15


def test_constant_scores_are_fitted():
    fit = fit_dice([0, 1, 0], [0.5, 0.5, 0.5])
    assert fit.dice == pytest.approx(0.5, abs=0.01)  # all called positive: 2 * 1 / (1 + 3)


def test_unknown_instances_are_left_out():
    labels, scores = some_instances(7)
    mixed_labels, mixed_scores = np.insert(labels, [0, 5, 50], -1), np.insert(scores, [0, 5, 50], 0.99)
    assert instance_metrics(mixed_labels, mixed_scores, mixed_labels, mixed_scores) == pytest.approx(
        instance_metrics(labels, scores, labels, scores)
    )


@pytest.mark.parametrize(
    ("labels", "scores", "message"),
    [
        ([-1, -1, 1, 1], [0.1, 0.2, 0.3, 0.4], "both classes, got 2 positive and 0 negative"),
        ([-1, -1], [0.1, 0.2], "both classes, got 0 positive and 0 negative"),
        ([0, 1, 1], [0.1, 0.2], "expected 3 entries, got 2"),
        ([0, 1], [np.inf, 0.2], "nan or infinite"),
        ([0, 1, 3], [0.1, 0.2, 0.3], "got 3"),
    ],
)
def test_wrong_input_is_named(labels, scores, message):
    with pytest.raises(InputError, match=message):
        instance_metrics(labels, scores)
    with pytest.raises(InputError, match=message):
        instance_metrics([0, 1], [0, 1], labels, scores)


def test_half_a_validation_set_is_refused():
    with pytest.raises(InputError, match="got no validation_scores"):
        instance_metrics([0, 1], [0, 1], validation_labels=[0, 1])
    with pytest.raises(InputError, match="got no validation_labels"):
        instance_metrics([0, 1], [0, 1], validation_scores=[0, 1])


def test_empty_range_is_refused():
    with pytest.raises(InputError, match="slope_range: expected low < high, got 2 and 1"):
        fit_dice([0, 1], [0, 1], slope_range=(2, 1))
