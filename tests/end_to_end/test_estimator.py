import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import yaml
from PIL import Image
from sklearn.base import clone, is_classifier
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold, cross_val_score
from tests.conftest import TINY
from tests.end_to_end.commands import environment, its2clr

from its2clr import ItS2CLR
from its2clr.cohort import Cohort, load_tiles
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


def _short(run):
    """A features model that is fitted in a second."""
    overrides = {
        "aggregator.epochs": 2,
        "refine.epochs": 1,
        "refine.warmup_epochs": 1,
        "evaluation": {"retrainings": 1, "bootstrap": 10},
    }
    return ItS2CLR("features", run=run, overrides=overrides, verbose=False)


@pytest.fixture(scope="module")
def feature_bags():
    """Bags of which those of label 1 hold instances that are far off; two bags are of one patient."""
    rng = np.random.default_rng(0)
    labels = np.tile([0, 1], 12)
    bags = [rng.normal(size=(5, 8)) + 8 * label * (np.arange(5) < 2)[:, None] for label in labels]
    return bags, labels, np.repeat(np.arange(12), 2)


def test_scikit_learn_cross_validates_it_on_a_list_of_bags(feature_bags, tmp_path):
    bags, labels, groups = feature_bags
    model = _short(tmp_path / "folds")
    assert is_classifier(model)
    found = cross_val_score(model, bags, labels, groups=groups, cv=GroupKFold(2), params={"groups": groups})
    assert found.shape == (2,)
    assert (found > 0.9).all()
    folds = sorted((tmp_path / "folds").iterdir())
    assert len(folds) == 2  # a folder for each fold
    for fold in folds:
        table = Cohort.open(fold / "bags").bags
        assert set(table["split"]) == {"train", "val"}
        assert table.groupby("group")["split"].nunique().max() == 1
        assert table["group"].nunique() == 6
    before = [(fold / "state.json").stat().st_mtime_ns for fold in folds]
    again = cross_val_score(model, bags, labels, groups=groups, cv=GroupKFold(2), params={"groups": groups})
    assert np.array_equal(again, found)
    assert [(fold / "state.json").stat().st_mtime_ns for fold in folds] == before  # nothing is trained twice
    by_name = cross_val_score(
        model, bags, labels, groups=groups, cv=GroupKFold(2), params={"groups": groups}, scoring="roc_auc"
    )
    assert np.allclose(by_name, found)


def test_bags_of_a_cohort_keep_their_groups_and_give_the_scores_of_the_cohort(feature_bags, tmp_path):
    bags, labels, groups = feature_bags
    fitted = _short(tmp_path / "run").fit(bags, labels, groups)
    cohort = Cohort.open(fitted.run_ / "bags")
    assert fitted.run_ in list((tmp_path / "run").iterdir())
    assert "fitted on bags, not evaluated yet" in repr(fitted)
    whole = fitted.predict_proba(cohort)
    assert np.array_equal(fitted.predict_proba([cohort[3], cohort[0]]), whole[[3, 0]])
    assert np.array_equal(fitted.predict_proba([cohort[1], cohort[1]]), whole[[1, 1]])
    assert np.array_equal(fitted.predict_proba(bags[:2]), whole[:2])
    assert fitted.score(bags, labels) == pytest.approx(roc_auc_score(labels, whole[:, 1]))
    again = _short(tmp_path / "again").fit(cohort, cohort.bags["label"])
    assert Cohort.open(again.run_ / "bags").bags["group"].tolist() == cohort.bags["group"].tolist()
    with pytest.raises(IndexError, match="no number 24"):
        cohort[24]


def test_folders_of_images_and_arrays_of_tiles_are_bags_too(model, tmp_path):
    rng = np.random.default_rng(0)
    folders, arrays = [], []
    for number in range(8):
        tiles = rng.integers(0, 40, (4, 32, 32, 3), np.uint8) + np.uint8(100 * (number % 2))
        folder = tmp_path / f"{number}" / "bag"  # all of one name
        folder.mkdir(parents=True)
        for name, tile in enumerate(tiles):
            Image.fromarray(tile).save(folder / f"{name}.png")
        folders.append(folder)
        arrays.append(tiles)
    labels = [0, 1] * 4
    overrides = {**model.overrides, "pretrain.epochs": 0, "refine.epochs": 1, "refine.batch_size": 8}
    short = ItS2CLR("demo", run=tmp_path / "run", overrides=overrides, verbose=False)
    of_folders = short.fit(folders, labels)
    assert Cohort.open(of_folders.run_ / "bags").tile_size == 64  # small images are enlarged
    assert of_folders.predict_proba(folders[:3]).shape == (3, 2)
    with pytest.raises(InputError, match="tiles of 32 px, this run was trained on 64 px"):
        of_folders.predict_proba(arrays)
    of_arrays = clone(short).fit(arrays, labels)
    assert of_arrays.run_ != of_folders.run_
    assert Cohort.open(of_arrays.run_ / "bags")[5].encoded(1) != b""
    assert np.array_equal(load_tiles(Cohort.open(of_arrays.run_ / "bags"))[5], arrays[1][1].transpose(2, 0, 1))
    with pytest.raises(InputError, match="not trained on folders of images"):
        of_arrays.predict_proba(folders)


def test_a_list_of_bags_that_cannot_be_used_is_said(feature_bags, tmp_path):
    bags, labels, _ = feature_bags
    model = _short(tmp_path / "run")
    for given, y, said in (
        (bags, None, "needs labels: fit"),
        (bags, labels + 1, "a label, 0 or 1, for each of 24 bags, got 24 of shape .* such as 1, 2"),
        (bags, labels[:3], "for each of 24 bags, got 3"),
        ([*bags[:-1], tmp_path], labels, "is no folder with images"),
        ([*bags[:-1], np.zeros((3, 9))], labels, r"bag 23: expected tiles .* got float64 of shape \(3, 9\)"),
        ([np.zeros((2, 8, 9, 3), np.uint8)] * 4, [0, 1, 0, 1], "bag 0: expected tiles"),
        (bags[:2], labels[:2], "train and val cannot each get bags of both classes"),
        (tmp_path, labels, "holds its own labels"),
    ):
        with pytest.raises(InputError, match=said):
            model.fit(given, y)
    assert not any((tmp_path / "run").glob("*/bags"))
