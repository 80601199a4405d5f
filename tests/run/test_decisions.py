"""One threshold for bags and one for instances, chosen on validation bags, stored once and read by everything."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from fastapi.testclient import TestClient

from its2clr import ItS2CLR
from its2clr.cli.results import geojson, map_
from its2clr.cohort import Cohort
from its2clr.config import RefineConfig
from its2clr.errors import InputError
from its2clr.evaluation.thresholds import balanced_accuracy_threshold
from its2clr.files import read_json, write_json
from its2clr.maps.bag_panels import draw_bag
from its2clr.maps.source import open_source
from its2clr.predict.model_of_run import model_of_run
from its2clr.predict.new_bags import predict
from its2clr.report.page_tables import bag_table
from its2clr.report.run_facts import called_at_validation, collect
from its2clr.report.shown_tiles import mistake_strips
from its2clr.run.decisions import Thresholds, choose_thresholds, read_thresholds
from its2clr.run.evaluation import evaluate
from its2clr.run.opening import open_run
from its2clr.run.scores import Model, RunScores, Scores
from its2clr.viewer.app import create_app
from its2clr.viewer.service import Viewer

MODEL = Model("refined", "dsmil")


@pytest.fixture
def stored(evaluated_run, tmp_path):
    """A copy of a run, in whose results the thresholds are such that no rule would give them."""
    run = tmp_path / "run"
    shutil.copytree(evaluated_run, run)
    results = read_json(run / "results.json")
    scores = RunScores(run)
    table = scores.bags.query("encoder == 'refined'")
    instances = pd.read_parquet(run / "predictions.parquet").query("encoder == 'refined'")["probability"]
    chosen = Thresholds(float(table["probability"].quantile(0.9)), float(instances.quantile(0.9)))
    results["refined"]["test"]["thresholds"] = chosen._asdict()
    write_json(run / "results.json", results)
    return SimpleNamespace(run=run, thresholds=chosen)


def test_an_evaluation_stores_what_the_mean_of_the_retrainings_needs(evaluated_run):
    scores = RunScores(evaluated_run)
    validation = scores.bags.query("encoder == 'refined' and split == 'val'")
    wanted = balanced_accuracy_threshold(validation["label"], validation["probability"])
    found = read_thresholds(evaluated_run, scores.config, scores.results, MODEL)
    assert found == Thresholds(wanted, scores.config.refine.threshold)
    assert scores.results["refined"]["test"]["thresholds"] == found._asdict()
    assert scores.results["health"]["final"]["threshold"] == found.instance


def test_thresholds_of_instances_follow_the_rule_of_the_run():
    validation = SimpleNamespace(labels=np.array([0, 1]), bag_of_instance=np.array([0, 0, 0, 0, 0, 1, 1]))
    scores = Scores(np.array([[0.1, 0.5], [0.3, 0.9]]), np.array([[0.1, 0.2, 0.3, 0.4, 0.5, 0.9, 0.9]]))
    assert choose_thresholds(RefineConfig(threshold=0.6), validation, scores) == pytest.approx((0.45, 0.6))
    rule = RefineConfig(threshold_rule="negative_bags", false_positive_rate=0.25)
    assert choose_thresholds(rule, validation, scores) == pytest.approx((0.45, 0.4))


def test_every_bag_is_called_by_the_stored_threshold(stored, tiny_cohort, tmp_path):
    least, run = stored.thresholds.bag, stored.run
    table = RunScores(run).bags.query("encoder == 'refined'")
    called = dict(zip(table["bag_id"], table["probability"] >= least, strict=True))
    assert 0 < sum(called.values()) < len(called)

    bags = Cohort.open(tiny_cohort).bags
    model = ItS2CLR(run=run, verbose=False)
    assert model.thresholds_ == stored.thresholds
    assert model.predict(tiny_cohort).tolist() == [int(called[bag_id]) for bag_id in bags["bag_id"]]

    described = model_of_run(run).description
    assert (described.threshold, described.instance_threshold) == stored.thresholds
    predicted = predict(run, tiny_cohort, tmp_path / "predictions", quiet=True)
    assert predicted.bags["predicted_label"].tolist() == [int(called[bag_id]) for bag_id in bags["bag_id"]]
    provenance = json.loads((tmp_path / "predictions" / "prediction.json").read_text("utf-8"))
    assert (provenance["threshold"], provenance["instance_threshold"]) == stored.thresholds

    facts = collect(run)
    assert called_at_validation(facts.models)["ItS2CLR + dsmil"].threshold == least
    rows = [[cell.text for cell in row] for row in bag_table(facts, ["test", "val", "train"], "all").rows]
    assert {row[0]: row[-1] == "right" for row in rows} == {
        bag_id: called[bag_id] == (label == 1)
        for bag_id, label in zip(bags["bag_id"], bags["label"], strict=True)
        if bag_id in {row[0] for row in rows}
    }

    viewer = Viewer(run)
    client = TestClient(create_app(viewer))
    assert client.get("/api/run").json()["models"][1]["bag_threshold"] == least
    shown = [row for page in (0, 1) for row in client.get("/api/bags", params={"page": page}).json()["rows"]]
    assert {row["bag_id"]: row["error"] for row in shown} == {
        row["bag_id"]: called[row["bag_id"]] != (row["label"] == 1) for row in shown
    }
    viewer.close()


def test_every_instance_is_called_by_the_stored_threshold(stored, tiny_cohort, tmp_path, capsys):
    least, run = stored.thresholds.instance, stored.run
    bag_id = RunScores(run).bags.query("label == 1 and split == 'test'")["bag_id"].iloc[0]
    positive = int((RunScores(run).bag(bag_id).instances >= least).sum())
    assert positive > 0

    geojson(run, bags=[bag_id], split=None, limit=0, models=None, threshold=None, only="tiles", out=tmp_path / "g")
    said = f"from a probability of {least:.3g} on, by the model's own threshold"
    assert said in " ".join(capsys.readouterr().out.split())
    features = json.loads((tmp_path / "g" / f"{bag_id}.geojson").read_text("utf-8"))["features"]
    assert sum(one["properties"]["classification"]["name"] == "Positive" for one in features) == positive

    source = open_source(run)
    assert source.best.instance_threshold == least
    panel = draw_bag(source, bag_id, [source.best], None, 64).panels[-1]
    given = draw_bag(source, bag_id, [source.best], least, 64).panels[-1]
    assert panel.seen_from == least
    assert np.array_equal(np.asarray(panel.image), np.asarray(given.image))
    shown = {"bags": [bag_id], "split": None, "limit": 0, "models": ["refined"], "longest": 64, "full_scale": True}
    map_(run, **shown, threshold=None, out=tmp_path / "m", factor=None, beside=None)
    assert said in " ".join(capsys.readouterr().out.split())
    overlay = next((tmp_path / "m" / "overlays").rglob("colour/*.ome.tiff"))
    assert f"{least:g}".encode() in overlay.read_bytes()

    predict(run, tiny_cohort, tmp_path / "predictions", quiet=True)
    assert open_source(tmp_path / "predictions").best.instance_threshold == least

    viewer = Viewer(run)
    assert [one["instance_threshold"] for one in viewer.run()["models"] if one["encoder"] == "refined"] == [least]
    viewer.close()

    best = collect(run).best
    instances = best.instances.assign(probability=least)  # all are positive, exactly on the threshold
    negatives, positives = mistake_strips(Cohort.open(tiny_cohort), instances, best.thresholds.instance)
    assert negatives.pictures
    assert not positives.pictures


def test_an_older_run_gets_the_same_thresholds_from_its_tables(evaluated_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(evaluated_run, run, ignore=shutil.ignore_patterns("features", "rounds"))
    before = RunScores(evaluated_run)
    wanted = {model: read_thresholds(evaluated_run, before.config, before.results, model) for model in before.models}
    results = read_json(run / "results.json")
    for encoder in ("start", "refined"):
        del results[encoder]["test"]["thresholds"]
    assert {model: read_thresholds(run, before.config, results, model) for model in before.models} == wanted
    table = pd.read_csv(run / "bag_predictions.csv").query("split != 'val'")
    table.to_csv(run / "bag_predictions.csv", index=False)
    with pytest.raises(InputError, match="did not predict validation bags; run `its2clr evaluate"):
        read_thresholds(run, before.config, results, MODEL)


def test_python_calls_bags_before_an_evaluation_as_after_it(evaluated_run, tmp_path):
    run = Path(shutil.copytree(evaluated_run, tmp_path / "run"))
    state = read_json(run / "state.json")
    del state["stages"]["evaluate"]
    write_json(run / "state.json", state)
    (run / "results.json").unlink()
    before = ItS2CLR(run=run, verbose=False).thresholds_
    evaluate(open_run(run, quiet=True))
    assert ItS2CLR(run=run, verbose=False).thresholds_ == before
