"""Cross-validation: no bag is scored by a model that has seen it, nothing is lost by a stop, one decision for all."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score
from tests.conftest import TINY
from typer.testing import CliRunner

import its2clr
from its2clr.cli import app
from its2clr.cohort import Cohort
from its2clr.cohort.folds import fold_of_bags
from its2clr.cohort.given_bags import make_cohort
from its2clr.crossval.page import results_rows, summary
from its2clr.crossval.study import open_study
from its2clr.crossval.train import cross_validate, train_fold
from its2clr.engine.devices import Engine
from its2clr.errors import InputError
from its2clr.evaluation.thresholds import balanced_accuracy_threshold
from its2clr.maps.source import open_source
from its2clr.predict.inference import open_for_prediction, score_bags
from its2clr.predict.model_of_run import open_model
from its2clr.predict.seen_bags import seen_bags
from its2clr.run.scores import RunScores
from its2clr.settings import parse_override

SETTINGS = [*TINY, "pretrain.epochs=1", "refine.epochs=2", "refine.refresh_every=1", "engine.accelerator=cpu"]
FOLDS = 2


def plain(results):
    return json.loads(json.dumps({**results, "cohort": {**results["cohort"], "path": ""}}))


@pytest.fixture(scope="module")
def study(tiny_cohort, tmp_path_factory):
    """Stopped after its first fold, and begun again."""
    out = tmp_path_factory.mktemp("crossval") / "out"
    first = open_study(out, tiny_cohort, FOLDS, "demo", SETTINGS)
    first.prepare()
    engine = Engine()
    engine.bars.enabled = False
    train_fold(first, 1, engine)
    written = (out / "fold-1" / "checkpoints" / "encoder-refined.safetensors").stat().st_mtime_ns
    study = open_study(out)
    cross_validate(study, quiet=True)
    assert (out / "fold-1" / "checkpoints" / "encoder-refined.safetensors").stat().st_mtime_ns == written
    return study


@pytest.fixture(scope="module")
def results(study):
    return json.loads((study.path / "results.json").read_text())


def test_every_bag_is_tested_once_and_groups_stay_whole(study):
    whole = study.cohort.bags
    tested = []
    for fold in study.numbers:
        cohort = Cohort.open(study.cohort_of(fold))
        bags = cohort.bags
        assert bags["bag_id"].tolist() == whole["bag_id"].tolist()
        assert bags["label"].tolist() == whole["label"].tolist()
        groups = [set(bags.loc[bags["split"] == split, "group"]) for split in ("train", "val", "test")]
        assert not groups[0] & groups[1]
        assert not groups[0] & groups[2]
        assert not groups[1] & groups[2]
        assert all(bags.loc[bags["split"] == split, "label"].nunique() == 2 for split in ("train", "val", "test"))
        tested += bags.loc[bags["split"] == "test", "bag_id"].tolist()
        assert cohort.identity().tiles == study.cohort.identity().tiles
    assert sorted(tested) == sorted(whole["bag_id"])
    table = pd.read_csv(study.path / "folds.csv", dtype={"bag_id": str})
    assert table["fold"].tolist() == study.fold_of_bag.tolist()
    assert set(study.fold_of_bag.tolist()) == {1, 2}


def test_scores_are_those_of_the_fold_that_has_not_seen_the_bag(study, results):
    found = pd.read_csv(study.path / "out_of_fold" / "predictions.csv", converters={"probability": float})
    instances = pd.read_parquet(study.path / "out_of_fold" / "instances.parquet")
    held = study.cohort.instance_labels()
    for fold in study.numbers:
        scores = RunScores(study.run(fold))
        own = scores.bags[scores.bags["split"] == "test"]
        own = own[(own["encoder"] == scores.best.encoder) & (own["aggregator"] == scores.best.aggregator)]
        for bag_id, probability in zip(own["bag_id"], own["probability"], strict=True):
            row = found[found["bag_id"] == bag_id].iloc[0]
            assert (row["probability"], row["fold"]) == (probability, fold)
            of_bag = instances[instances["bag_id"] == bag_id]["probability"].to_numpy()
            np.testing.assert_array_equal(of_bag, scores.bag(bag_id).instances)
    labels = study.cohort.bags["label"]
    handed = results["models"]["handed_over"]
    assert handed["bag"]["auc"] == pytest.approx(roc_auc_score(labels, found["probability"]))
    assert handed["instance"]["auc"] == pytest.approx(roc_auc_score(held, instances["probability"]))
    assert handed["of_folds"]["bag_auc"]["values"] == [
        json.loads((study.run(fold) / "results.json").read_text())[name]["test"]["bag_auc"]
        for fold, name in zip(study.numbers, results["handed_over"], strict=True)
    ]
    difference = results["models"]["refined"]["bag"]["auc"] - results["models"]["start"]["bag"]["auc"]
    assert results["comparison"]["bag_auc_difference"] == pytest.approx(difference)


def test_one_threshold_from_validation_bags_is_used_everywhere(study, results):
    labels, probabilities = [], []
    for fold in study.numbers:
        scores = RunScores(study.run(fold))
        bags = scores.bags[(scores.bags["split"] == "val") & (scores.bags["encoder"] == scores.best.encoder)]
        labels += bags["label"].tolist()
        probabilities += bags["probability"].tolist()
    threshold = balanced_accuracy_threshold(np.array(labels), np.array(probabilities))
    assert results["models"]["handed_over"]["threshold"] == threshold
    assert open_model(study.path).thresholds.bag == threshold
    found = pd.read_csv(study.path / "out_of_fold" / "predictions.csv", converters={"probability": float})
    assert (found["predicted_label"] == (found["probability"] >= threshold)).all()
    called = found["predicted_label"].to_numpy()[study.cohort.bags["label"].to_numpy() == 1]
    assert results["models"]["handed_over"]["bag"]["sensitivity"] == called.mean()


def test_the_model_of_all_folds_predicts_their_mean_and_knows_what_it_saw(study):
    bags = study.cohort.split("val")
    joined, engine = open_for_prediction(study.path, ["engine.accelerator=cpu"], quiet=True)
    single = [score_bags(open_model(study.run(fold)), bags, engine).bag_probability for fold in study.numbers]
    np.testing.assert_allclose(score_bags(joined, bags, engine).bag_probability, np.mean(single, axis=0), rtol=1e-9)
    assert np.abs(single[0] - single[1]).max() > 1e-4
    tiles = {bag.bag_id: bag.tiles for bag in study.cohort.identity().bags}
    assert sorted(seen_bags(joined.description.seen, tiles)["train"]) == sorted(tiles)
    assert joined.description.metrics["out_of_fold"]


def test_viewer_and_maps_take_the_whole(study):
    source = open_source(study.path)
    assert sorted(source.choose_bags(None)) == sorted(study.cohort.bags["bag_id"])
    provenance = json.loads((study.path / "out_of_fold" / "prediction.json").read_text())
    assert provenance["seen_in_training"] == {}  # each bag is scored by a fold that has not seen it


def test_a_stopped_one_ends_like_one_whose_folds_were_trained_side_by_side(study, results, tiny_cohort, tmp_path):
    words = ["fit", str(tiny_cohort), "--out", str(tmp_path / "whole"), "--folds", str(FOLDS), "--recipe", "demo"]
    words += ["--workers", "2"]
    ended = CliRunner().invoke(app, [*words, *(part for one in SETTINGS for part in ("--set", one))])
    assert ended.exit_code == 0, ended.output
    whole = json.loads((tmp_path / "whole" / "results.json").read_text())
    assert plain(whole) == plain(results)
    for name in ("out_of_fold/predictions.csv", "model.its2clr"):
        assert (tmp_path / "whole" / name).read_bytes() == (study.path / name).read_bytes()
    assert "All bags, out of fold" in ended.output
    assert all(line in " ".join(ended.output.split()) for line in summary(results))


def test_the_page_holds_the_numbers_and_leads_to_the_folds(study, results):
    page = (study.path / "report.html").read_text()
    for row in results_rows(results):
        assert all(cell in page for cell in row)
    assert [f'href="fold-{fold}/report.html"' in page for fold in study.numbers] == [True, True]
    assert all((study.run(fold) / "report.html").is_file() for fold in study.numbers)
    assert "Every fold pretrains a start of its own" in page


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"folds": 3}, "was begun with folds 2, not 3"),
        ({"recipe": "standard"}, "was begun with recipe demo, not standard"),
        ({"overrides": ["refine.epochs=5"]}, "was begun with settings"),
    ],
)
def test_another_command_is_refused(study, given, message):
    with pytest.raises(InputError, match=message):
        open_study(study.path, **given)


def test_workers_need_folds(tiny_cohort, tmp_path):
    ended = CliRunner().invoke(app, ["fit", str(tiny_cohort), "--out", str(tmp_path / "run"), "--workers", "2"])
    assert isinstance(ended.exception, InputError)
    assert "so they need --folds" in str(ended.exception)


def test_what_cannot_be_cross_validated(tiny_cohort, study, tmp_path):
    with pytest.raises(InputError, match="at least 2, got 1"):
        open_study(tmp_path / "out", tiny_cohort, 1)
    with pytest.raises(InputError, match="cannot each get bags of both classes"):
        open_study(tmp_path / "out", tiny_cohort, 40)
    with pytest.raises(InputError, match="holds a run"):
        open_study(study.run(1), tiny_cohort, 5)
    with pytest.raises(InputError, match="no cross-validation has begun here"):
        open_study(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    shutil.copytree(tiny_cohort, tmp_path / "unlabelled")
    table = pd.read_csv(tiny_cohort / "bags.csv").drop(columns="label")
    table.to_csv(tmp_path / "unlabelled" / "bags.csv", index=False)
    info = json.loads((tiny_cohort / "cohort.json").read_text())
    (tmp_path / "unlabelled" / "cohort.json").write_text(json.dumps({**info, "labelled": False}))
    with pytest.raises(InputError, match="has no labels"):
        open_study(tmp_path / "out", tmp_path / "unlabelled", 2)


def test_folds_depend_on_the_seed_and_on_nothing_else(tiny_cohort):
    cohort = Cohort.open(tiny_cohort)
    first = fold_of_bags(cohort, 4, 0)
    assert (first == fold_of_bags(Cohort.open(tiny_cohort), 4, 0)).all()
    assert (first != fold_of_bags(cohort, 4, 1)).any()
    positives = [int(cohort.bags["label"][first == fold].sum()) for fold in range(1, 5)]
    assert max(positives) - min(positives) <= 2


def test_a_cohort_of_features_has_one_start_for_all(tmp_path):
    generator = np.random.default_rng(0)
    labels = np.arange(24) % 2
    bags = [generator.normal(size=(6, 8)).astype(np.float32) for _ in labels]
    for bag, label in zip(bags, labels, strict=True):
        bag[:2] += 2 * label
    make_cohort(tmp_path / "cohort", bags, labels)
    short = [
        "aggregator.epochs=3",
        "refine.epochs=2",
        "refine.warmup_epochs=1",
        "evaluation={retrainings: 1, bootstrap: 20}",
    ]
    settings = dict(parse_override(text) for text in [*short, "engine.accelerator=cpu"])
    results = its2clr.cross_validate(tmp_path / "cohort", tmp_path / "out", folds=2, overrides=settings, verbose=False)
    assert results["start_is_trained"] is False
    assert "all folds have the same one" in (tmp_path / "out" / "report.html").read_text()
    assert "instance" not in results["models"]["handed_over"]
