import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import yaml
from PIL import Image
from sklearn.base import clone
from sklearn.metrics import roc_auc_score
from tests.conftest import TINY
from tests.end_to_end.commands import environment, its2clr

from its2clr import ItS2CLR
from its2clr.cohort import Cohort
from its2clr.errors import InputError


@pytest.fixture(scope="module")
def model(tiny_cohort, tmp_path_factory):
    overrides = {}
    for override in TINY:
        key, _, value = override.partition("=")
        overrides[key] = yaml.safe_load(value)
    run = tmp_path_factory.mktemp("estimator") / "run"
    return ItS2CLR("demo", run=run, overrides=overrides, verbose=False).fit(tiny_cohort)


def test_predictions_agree_with_evaluation(model, tiny_cohort):
    test = Cohort.open(tiny_cohort).split("test")
    probabilities = model.predict_proba(test)
    assert probabilities.shape == (len(test), 2)
    assert np.allclose(probabilities.sum(1), 1)
    instances = model.predict_instances(test)
    assert len(instances) == test.n_instances
    assert instances["probability"].between(0, 1).all()
    model.evaluate()
    bags = pd.read_csv(model.run / "bag_predictions.csv").query("encoder == 'refined' and split == 'test'")
    assert bags["bag_id"].tolist() == test.bags["bag_id"].tolist()
    assert np.allclose(bags["probability"], probabilities[:, 1])
    written = pd.read_parquet(model.run / "predictions.parquet").query("encoder == 'refined' and split == 'test'")
    assert np.allclose(written["probability"], instances["probability"])


def test_features_per_bag(model, tiny_cohort):
    test = Cohort.open(tiny_cohort).split("test")
    features = model.transform(test)
    assert list(features) == list(test.bags["bag_id"])
    assert {part.shape for part in features.values()} == {(16, 16)}


def test_a_fitted_run_is_opened_again(model, tiny_cohort):
    again = ItS2CLR(run=model.run, verbose=False)
    assert np.array_equal(again.predict_proba(tiny_cohort), model.predict_proba(tiny_cohort))


def test_predicting_before_fitting_is_said(tiny_cohort, tmp_path):
    with pytest.raises(InputError, match="no run has begun"):
        ItS2CLR(run=tmp_path / "none", verbose=False).predict_proba(tiny_cohort)


def test_fitting_a_part_of_a_cohort_is_refused(tiny_cohort, tmp_path):
    part = Cohort.open(tiny_cohort).without_test()
    with pytest.raises(InputError, match="takes a whole cohort"):
        ItS2CLR("demo", run=tmp_path / "run", verbose=False).fit(part)


def test_predicting_needs_neither_the_training_cohort_nor_its_folder(model, tiny_cohort, tmp_path, monkeypatch):
    import shutil

    new = tmp_path / "new"
    shutil.copytree(tiny_cohort, new)
    hidden = tiny_cohort.with_name("hidden")
    tiny_cohort.rename(hidden)
    monkeypatch.chdir(tmp_path)
    try:
        assert len(ItS2CLR(run=model.run, verbose=False).predict_proba(new)) == 56
    finally:
        hidden.rename(tiny_cohort)


def test_new_bags_without_labels_are_predicted_and_not_trained_with(model, tmp_path):
    for bag in ("new/1", "new/2"):
        (tmp_path / bag).mkdir(parents=True)
        for number in range(3):
            Image.effect_noise((40, 40), 30 + 10 * number).convert("RGB").save(tmp_path / bag / f"{number}.png")
    (tmp_path / "new.csv").write_text("bag_id,path\na,new/1\nb,new/2\n")
    cohort = tmp_path / "cohort"
    its2clr("cohort", "images", tmp_path / "new.csv", cohort, "--tile-size", 32, "--unlabelled")
    assert "0 errors" in its2clr("doctor", cohort).stdout
    assert model.predict_proba(cohort).shape == (2, 2)
    assert len(model.predict_instances(cohort)) == 6
    assert model.predict_instances(cohort)["name"].tolist()[:2] == ["0.png", "1.png"]
    its2clr("cohort", "images", tmp_path / "new.csv", tmp_path / "large", "--tile-size", 48, "--unlabelled")
    with pytest.raises(InputError, match="with --tile-size 32"):
        model.predict_proba(tmp_path / "large")
    with pytest.raises(InputError, match="has no labels"):
        ItS2CLR("demo", run=tmp_path / "run", verbose=False).fit(cohort)


def test_it_says_how_far_it_is_and_how_good(model, evaluated_run, tmp_path):
    assert repr(ItS2CLR("demo", run=tmp_path / "none")).endswith("not fitted yet")
    evaluated = repr(ItS2CLR(run=evaluated_run))
    assert "fitted on tiny and evaluated on its test bags. SimCLR + dsmil: bag AUC " in evaluated
    begun = ItS2CLR("demo", run=tmp_path / "begun", overrides={"seed": 1})
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.yaml").write_bytes((model.run / "config.yaml").read_bytes())
    assert repr(begun).endswith("being fitted on tiny; finished: nothing yet")
    assert "overrides={'seed': 1}" in repr(begun)
    (tmp_path / "begun" / "config.yaml").write_text("{")
    assert repr(begun).endswith("its folder cannot be read")


def test_its_score_is_the_bag_auc(model, tiny_cohort):
    test = Cohort.open(tiny_cohort).split("test")
    expected = roc_auc_score(test.bags["label"], model.predict_proba(test)[:, 1])
    assert model.score(test) == pytest.approx(expected)
    with pytest.raises(InputError, match="has no labels to score with"):
        model.score(test.without_labels())


def test_scikit_learn_clones_it(model):
    copy = clone(model)
    assert copy is not model
    assert copy.get_params() == model.get_params()
    assert copy.set_params(verbose=True).verbose
    with pytest.raises(InputError, match="no argument 'recipes', did you mean 'recipe'"):
        copy.set_params(recipes="demo")


def test_names_are_listed_before_they_are_used():
    found = subprocess.run(
        [sys.executable, "-c", "import its2clr; print(*dir(its2clr)); its2clr.Cohort, its2clr.ItS2CLR"],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert {"ItS2CLR", "Cohort", "__version__"} <= set(found.stdout.split())
