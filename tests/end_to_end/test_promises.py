"""Promises of the product: test labels stay out of training, ground truth is not needed, nothing is a pickle."""

import json
import shlex
import shutil
from dataclasses import replace

import h5py
import numpy as np
import pandas as pd
import pytest
from tests.conftest import TINY

from its2clr.cohort import Cohort
from its2clr.engine.checkpoint import load_checkpoint
from its2clr.errors import InputError
from its2clr.refine.rounds import Reader
from its2clr.run.evaluation import evaluate
from its2clr.run.opening import open_run


def trained(cohort, run):
    stages = open_run(run, cohort, "demo", TINY, quiet=True)
    stages.fit()
    return stages


@pytest.fixture(scope="module")
def finished(tiny_cohort, tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    stages = trained(tiny_cohort, run)
    evaluate(stages)
    return stages


def weights(run):
    paths = sorted([*(run / "checkpoints").glob("*.safetensors"), *(run / "aggregators").glob("*.safetensors")])
    assert len(paths) == 6
    from safetensors.torch import load_file

    return {f"{path.name}/{key}": value.numpy() for path in paths for key, value in load_file(path).items()}


def change_labels(folder, change_bag, change_instances, splits):
    """Rewrite the labels of some splits of a cohort on disk, behind the package's back."""
    bags = pd.read_csv(folder / "bags.csv", dtype=str)
    chosen = bags["split"].isin(splits)
    bags.loc[chosen, "label"] = [change_bag(label) for label in bags.loc[chosen, "label"]]
    bags.to_csv(folder / "bags.csv", index=False)
    for bag_id in bags.loc[chosen, "bag_id"]:
        with h5py.File(folder / "tiles" / f"{bag_id}.h5", "r+") as file:
            labels = change_instances(file["labels"][:])
            del file["labels"]
            if labels is not None:
                file["labels"] = labels


@pytest.mark.slow
def test_test_labels_change_nothing_that_is_trained(tiny_cohort, finished, tmp_path):
    other = tmp_path / "cohort"
    shutil.copytree(tiny_cohort, other)
    change_labels(other, lambda label: str(1 - int(label)), lambda labels: (1 - labels).astype(np.int8), ["test"])
    run = trained(other, tmp_path / "run").run.path
    expected, found = weights(finished.run.path), weights(run)
    assert expected.keys() == found.keys()
    assert all(np.array_equal(expected[key], found[key]) for key in expected)
    flipped = evaluate(open_run(run, quiet=True))  # but evaluation does read them
    original = json.loads((finished.run.path / "results.json").read_text())
    assert flipped["refined"]["test"]["bag_auc"] == pytest.approx(1 - original["refined"]["test"]["bag_auc"])


@pytest.mark.slow
def test_instance_ground_truth_changes_nothing_that_is_trained(tiny_cohort, finished, tmp_path):
    other = tmp_path / "cohort"
    shutil.copytree(tiny_cohort, other)
    info = json.loads((other / "cohort.json").read_text())
    (other / "cohort.json").write_text(json.dumps({**info, "has_instance_labels": False}))
    change_labels(other, lambda label: label, lambda labels: None, ["train", "val", "test"])
    stages = trained(other, tmp_path / "run")
    expected, found = weights(finished.run.path), weights(stages.run.path)
    assert all(np.array_equal(expected[key], found[key]) for key in expected)
    results = evaluate(stages)
    assert "instance_auc" not in results["refined"]["test"]
    assert results["health"]["final"]["false_positive_share"] is not None
    reference = json.loads((finished.run.path / "results.json").read_text())
    assert results["refined"]["test"]["bag_auc"] == reference["refined"]["test"]["bag_auc"]


def test_what_training_holds_has_no_test_bag(finished):
    assert set(finished.cohort.bags["split"]) == {"train", "val"}
    with pytest.raises(InputError, match="no bags of split test"):
        finished.cohort.split("test")


def test_results_hold_every_number(finished):
    results = json.loads((finished.run.path / "results.json").read_text())
    for encoder in ("start", "refined"):
        test = results[encoder]["test"]
        assert {"auc", "auprc", "balanced_accuracy", "threshold"} <= test["bag"].keys()
        assert {"auc", "auprc", "max_f1", "dice", "iou"} <= test["instance"].keys()
        assert len(test["bag"]["auc"]["values"]) == 2
        for metric in ("bag_auc", "instance_auc"):
            low, high = test[f"{metric}_interval"]
            assert 0 <= low <= high <= 1
        assert results[encoder]["class_separation"]["test"]["inter_class_distance"] > 0
        assert {"auc", "dice", "bag_auc"} <= results[encoder]["linear_probe"].keys()
    assert [entry["epoch"] for entry in results["rounds"]] == [0, 2, 4]
    assert all("instance_auc" in entry for entry in results["rounds"])
    assert {"churn", "positive_share", "false_positive_share"} <= results["health"]["rounds"][1].keys()
    predictions = pd.read_parquet(finished.run.path / "predictions.parquet")
    assert len(predictions) == 2 * Cohort.open(finished.run.cohort).n_instances
    best = max(results["rounds"], key=lambda entry: (entry["validation_auc"], entry["epoch"]))
    assert results["refine"]["best_epoch"] == best["epoch"]
    _, state = load_checkpoint(finished.run.checkpoint("encoder-refined"))
    assert state["notes"]["best_epoch"] == best["epoch"]


def test_pseudo_labels_are_replaced_only_when_validation_allows(finished):
    results = json.loads((finished.run.path / "results.json").read_text())
    best = -1.0
    for entry in results["rounds"]:
        assert entry["pseudo_labels_replaced"] == (entry["validation_auc"] >= best)
        best = max(best, entry["validation_auc"])


def test_an_update_is_taken_up_only_if_it_is_as_good_as_the_best(tiny_cohort, finished, tmp_path, monkeypatch):
    aucs = iter([0.80, 0.79, 0.80])
    read = Reader.read
    monkeypatch.setattr(Reader, "read", lambda *arguments: replace(read(*arguments), validation_auc=next(aucs)))
    stages = refined(tiny_cohort, finished, tmp_path / "run")
    found = [json.loads(path.read_text()) for path in sorted((tmp_path / "run").glob("rounds/*/metrics.json"))]
    assert [entry["improved"] for entry in found] == [True, False, True]
    assert [entry["pseudo_labels_replaced"] for entry in found] == [True, False, True]
    _, state = load_checkpoint(stages.run.checkpoint("encoder-refined"))
    assert state["notes"]["best_epoch"] == 4


def test_no_file_of_a_run_is_a_pickle(finished):
    for path in finished.run.path.rglob("*"):
        if path.is_file():
            head = path.read_bytes()[:4]
            assert not head.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")), path


def test_features_are_in_the_trident_layout(finished, tiny_cohort):
    cohort = Cohort.open(tiny_cohort)
    bag_id = cohort.bags["bag_id"][0]
    with h5py.File(finished.run.path / "features" / "refined" / f"{bag_id}.h5") as file:
        assert file["features"].dtype == np.float32
        assert file["coords"].dtype == np.int64
        assert np.array_equal(file["coords"][:], cohort.tile_file(bag_id).coords)
        assert len(file["features"]) == len(file["coords"])
        assert file["coords"].attrs["patch_size_level0"] == 32


def refined(tiny_cohort, finished, run, *overrides):
    """A refinement with other switches from the same start."""
    start = f"pretrain.start={finished.run.path}"
    stages = open_run(run, tiny_cohort, "demo", [*TINY, start, *overrides], quiet=True)
    stages.refine()
    return stages


@pytest.mark.parametrize("switch", ["iterative", "self_paced"])
def test_switches_of_the_ablations(tiny_cohort, finished, tmp_path, switch):
    stages = refined(tiny_cohort, finished, tmp_path / "run", f"refine.{switch}=false")
    folders = sorted((tmp_path / "run" / "rounds").iterdir())
    replaced = [json.loads((folder / "metrics.json").read_text())["pseudo_labels_replaced"] for folder in folders]
    if switch == "iterative":
        assert replaced == [True, False, False]
    tensors, _ = load_checkpoint(stages.run.checkpoint("refine"))
    first = pd.read_parquet(folders[0] / "pseudo_labels.parquet")["probability"].to_numpy()
    assert np.array_equal(tensors["extra.probabilities"].numpy(), first) == (replaced.count(True) == 1)


def test_finetuning_with_ground_truth_uses_it_and_only_when_asked(tiny_cohort, finished, tmp_path):
    stages = refined(tiny_cohort, finished, tmp_path / "run", "refine.labels=ground_truth")
    tensors, _ = load_checkpoint(stages.run.checkpoint("refine"))
    truth = Cohort.open(tiny_cohort).split("train").instance_labels()
    assert np.array_equal(tensors["extra.probabilities"].numpy(), truth)


def test_cross_entropy_trains_the_encoder_and_leaves_one_that_loads(tiny_cohort, finished, tmp_path):
    stages = refined(tiny_cohort, finished, tmp_path / "run", "refine.objective=cross_entropy")
    stages.aggregate("refined")
    tensors, _ = load_checkpoint(stages.run.checkpoint("refine"))
    assert tensors["network.head.weight"].shape == (1, 16)
    start, _ = load_checkpoint(finished.run.checkpoint("encoder-start"))
    assert not np.array_equal(start["encoder.backbone.conv1.weight"], tensors["network.encoder.backbone.conv1.weight"])


def test_a_reader_of_its_own_is_trained_and_measured_on_both_encoders(tiny_cohort, finished, tmp_path):
    reader = "refine.reader={name: smooth_max, options: {sharpness: 2.0}, epochs: 4}"
    settings = [*TINY, f"pretrain.start={finished.run.path}", reader, "refine.threshold_rule=negative_bags"]
    stages = open_run(tmp_path / "run", tiny_cohort, "demo", settings, quiet=True)
    stages.fit()
    results = evaluate(stages)
    for encoder in ("start", "refined"):
        assert 0 <= results[encoder]["aggregators"]["smooth_max"]["instance_auc"] <= 1
    assert stages.aggregate("refined", "smooth_max").options == {"sharpness": 2.0}
    thresholds = [entry["threshold"] for entry in results["rounds"]]
    assert thresholds == [entry["threshold"] for entry in results["health"]["rounds"]]
    assert len(set(thresholds)) > 1
    table = pd.read_parquet(stages.run.path / "predictions.parquet")
    table = table.merge(stages.cohort.bags[["bag_id", "label"]], on="bag_id", suffixes=("", "_of_bag"))
    final = table.query("split == 'val' and encoder == 'refined' and aggregator == 'dsmil' and label_of_bag == 0")
    own = np.quantile(final["probability"], 1 - stages.config.refine.false_positive_rate, method="higher")
    assert results["health"]["final"]["threshold"] == pytest.approx(own)  # not the reader's, of another scale


def test_a_start_built_otherwise_is_refused_before_anything_is_written(finished, tiny_cohort, tmp_path):
    start = f"pretrain.start={finished.run.path}"
    changes = ["projector.output_dim=24", "encoder.mean=[0, 0, 0]"]
    with pytest.raises(InputError, match=r"other settings of projector\.output_dim, encoder\.mean") as caught:
        open_run(tmp_path / "run", tiny_cohort, "demo", [*TINY, start, *changes], quiet=True)
    assert not (tmp_path / "run").exists()
    words = shlex.split(str(caught.value).partition("begin this one with ")[2])
    right = [word for word in words if word != "--set"]
    open_run(tmp_path / "run", tiny_cohort, "demo", [*TINY, start, *changes, *right], quiet=True)
