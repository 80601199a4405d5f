"""What an evaluation measures: settings from validation bags alone, and bag metrics from one table, everywhere."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from its2clr.cohort import Cohort
from its2clr.encoder_export import export_encoder
from its2clr.evaluation.bags import BAG_METRICS, BagMetric
from its2clr.evaluation.dice import fit_dice
from its2clr.evaluation.thresholds import balanced_accuracy_threshold
from its2clr.experiments.metrics import Value, read_metric
from its2clr.predict.against_labels import score, score_rows
from its2clr.predict.new_bags import predict
from its2clr.report import write_report
from its2clr.run.evaluation import evaluate, measure
from its2clr.run.opening import open_run
from its2clr.run.results_file import best_round
from its2clr.run.scores import Scores

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture(scope="module")
def splits(tiny_cohort):
    cohort = Cohort.open(tiny_cohort)
    return cohort.split("test"), cohort.split("val")


def scores_of(cohort, *levels):
    """Each retraining gives every negative, bag or instance, one score, and every positive another."""
    bags, instances = cohort.bags["label"].to_numpy(dtype=int), cohort.instance_labels()
    return Scores(*(np.array([np.where(truth == 1, high, low) for low, high in levels]) for truth in (bags, instances)))


def test_settings_are_tuned_on_validation_not_on_test(splits):
    test, validation = splits
    on_test = scores_of(test, (0.5, 0.9), (0.1, 0.9))  # thresholds of 0.7 and 0.5 would be best there
    on_validation = scores_of(validation, (0.1, 0.3), (0.5, 0.7))
    found = measure(test, on_test, validation, on_validation, resamples=20, seed=0)
    assert found["bag"]["threshold"]["values"] == pytest.approx([0.2, 0.6])
    assert found["bag"]["specificity"]["values"] == [0.0, 1.0]  # at 0.2 every test bag is called positive
    assert found["bag"]["balanced_accuracy"]["values"] == [0.5, 1.0]
    assert found["bag_intervals"]["balanced_accuracy"] == [0.75, 0.75]
    assert found["bag_auc"] == 1.0
    assert found["instance"]["iou_threshold"]["values"] == pytest.approx([0.2, 0.6])
    assert found["instance"]["iou"]["values"] == pytest.approx([(test.instance_labels() == 1).mean(), 1.0])
    fits = [fit_dice(validation.instance_labels(), one) for one in on_validation.instances]
    assert found["instance"]["dice_intercept"]["values"] == [fit.intercept for fit in fits]


def test_an_evaluation_tunes_on_the_validation_split(evaluated_run, splits):
    test, validation = splits
    stages = open_run(evaluated_run, quiet=True, write_features=False)
    aggregators = stages.aggregate("refined")
    by_split = [
        [
            balanced_accuracy_threshold(part.bags["label"], one)
            for one in Scores.of(aggregators, stages.features("refined", part.without_labels())).bags
        ]
        for part in (validation, test)
    ]
    results = json.loads((evaluated_run / "results.json").read_text())
    assert results["refined"]["test"]["bag"]["threshold"]["values"] == by_split[0] != by_split[1]


def test_numbers_are_means_over_retrainings_with_intervals_around_them(splits):
    test, validation = splits
    generator = np.random.default_rng(0)
    noisy = [
        Scores(*(part + generator.normal(0, 0.5, part.shape) for part in (sure.bags, sure.instances)))
        for sure in (scores_of(split, (0.0, 0.5), (0.0, 0.5), (0.0, 0.5)) for split in (test, validation))
    ]
    found = measure(test, noisy[0], validation, noisy[1], resamples=100, seed=0)
    assert found["bag_intervals"].keys() == BAG_METRICS.keys() == found["bag"].keys() - {"threshold"}
    for name in BAG_METRICS:
        summary, (low, high) = found["bag"][name], found["bag_intervals"][name]
        assert summary["mean"] == pytest.approx(np.mean(summary["values"]))
        assert len(summary["values"]) == 3
        assert low <= summary["mean"] <= high
        assert low < high
    assert (found["bag_auc"], found["bag_auc_std"]) == (found["bag"]["auc"]["mean"], found["bag"]["auc"]["std"])
    assert found["bag_auc_interval"] == found["bag_intervals"]["auc"]
    low, high = found["instance_auc_interval"]
    assert low < found["instance_auc"] == found["instance"]["auc"]["mean"] < high


@pytest.mark.slow
def test_one_line_of_the_table_puts_a_metric_everywhere(evaluated_run, tiny_cohort, tmp_path, monkeypatch):
    line = re.search(r'```python\n("accuracy": BagMetric.*?)```', PAGE.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.setitem(BAG_METRICS, *eval(f"{{{line[1]}}}", {"BagMetric": BagMetric}).popitem())
    run = tmp_path / "run"
    shutil.copytree(evaluated_run, run)
    stages = open_run(run, quiet=True)
    stages.run.mark_done("evaluate")  # as if by another version, so it is done again
    evaluate(stages, of_features=False)
    results = json.loads((run / "results.json").read_text())
    found = results["refined"]["test"]
    mean, (low, high) = found["bag"]["accuracy"]["mean"], found["bag_intervals"]["accuracy"]
    assert 0 <= low <= mean <= high <= 1
    shown = f"[{low:.3f}, {high:.3f}]"

    page = write_report(run, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "called right" in page
    assert shown in page
    card = (export_encoder(run, tmp_path / "export") / "README.md").read_text()
    assert f"{mean:.3f} {shown} |" in next(line for line in card.splitlines() if line.startswith("| bag called right"))
    value = read_metric(results, "refine", "bag_accuracy", None, "best", 1.0)
    assert value == Value(mean, found["bag"]["accuracy"]["std"])

    predict(run, tiny_cohort, tmp_path / "predictions", quiet=True)
    scored = score(tmp_path / "predictions", tiny_cohort / "bags.csv", split="test", resamples=50)
    low, high = scored["bag_intervals"]["accuracy"]
    assert ("called right", f"{scored['bag']['accuracy']:.3f} [{low:.3f}, {high:.3f}]") in score_rows(scored)


def test_the_kept_round_is_the_last_one_that_improved():
    rounds = [
        ({"epoch": epoch, "validation_auc": auc, "improved": improved}, None)
        for epoch, auc, improved in ((0, 0.6, True), (5, 0.7, True), (10, 0.8, True), (15, 0.5, False))
    ]
    assert best_round(rounds) == {"best_epoch": 10, "best_validation_auc": 0.8}


def test_what_refinement_added_is_compared_with_the_runs_own_aggregator(evaluated_run):
    results = json.loads((evaluated_run / "results.json").read_text())
    start, refined = (results[encoder]["test"]["bag_auc"] for encoder in ("start", "refined"))
    assert results["comparison"]["bag_auc_difference"] == pytest.approx(refined - start)
    low, high = results["comparison"]["bag_auc_difference_interval"]
    assert low <= refined - start <= high
