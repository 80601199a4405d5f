"""Predictions for new bags against labels: the numbers by hand, what is refused, and the whole way from a model."""

import json

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score
from typer.testing import CliRunner

from its2clr.cli.program import app
from its2clr.cohort import Cohort
from its2clr.errors import InputError
from its2clr.evaluation.bags import bag_metric_intervals
from its2clr.predict.against_labels import score, score_notes, score_rows
from its2clr.predict.new_bags import predict

THRESHOLD = 0.6
PROBABILITY = {"a": 0.9, "007": 0.7, "NA": 0.6, "d": 0.2, "e": 0.65, "f": 0.1, "g/h": 0.55, "extra": 0.99}
LABELS = {"a": 1, "007": 1, "NA": 1, "d": 1, "e": 0, "f": 0, "g/h": 0}
SCORED = [(LABELS[bag_id], PROBABILITY[bag_id]) for bag_id in LABELS]


def calibrated(probability):
    return probability**2


@pytest.fixture
def folder(tmp_path):
    """Eight predicted bags of three images each; the first image is the likeliest of its bag."""
    out = tmp_path / "predictions"
    out.mkdir()
    bags = pd.DataFrame({"bag_id": list(PROBABILITY), "probability": list(PROBABILITY.values())})
    bags["calibrated_probability"] = calibrated(bags["probability"])
    bags["predicted_label"] = (bags["probability"] >= THRESHOLD).astype(int)
    bags.to_csv(out / "predictions.csv", index=False)
    rows = [
        (bag_id, f"img/{number}.png", probability / (number + 1))
        for bag_id, probability in PROBABILITY.items()
        for number in range(3)
    ]
    pd.DataFrame(rows, columns=["bag_id", "name", "probability"]).to_parquet(out / "instances.parquet")
    described = {"model": {"fingerprint": "0123", "method": "ItS2CLR"}, "threshold": THRESHOLD}
    (out / "prediction.json").write_text(json.dumps(described))
    return out


@pytest.fixture
def write(tmp_path):
    def write(text, name="bags.csv"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def bag_table(labels=LABELS):
    return "bag_id,stage,label\n" + "".join(f"{bag_id},II,{label}\n" for bag_id, label in labels.items())


def instance_table():
    """Image 0 of a positive bag is positive, image 2 unknown in two ways, all else negative."""
    rows = []
    for bag_id, label in LABELS.items():
        rows += [f"{bag_id},img/0.png,{label}", f"{bag_id},img/1.png,0", f"{bag_id},img/2.png,{'-1' if label else ''}"]
    return "bag_id,file,label\n" + "\n".join([*rows, "elsewhere,img/9.png,1"])


def bootstrap(statistic, groups, resamples=400):
    """Percentiles over resamples that hold as many bags of each group as there are: a slow loop."""
    generator = np.random.default_rng(1)
    drawn = [
        statistic([bag for group in groups for bag in generator.choice(group, len(group))]) for _ in range(resamples)
    ]
    return np.quantile(drawn, [0.025, 0.975])


def test_numbers_of_bags_are_those_by_hand(folder, write):
    found = score(folder, write(bag_table()))
    labels, probability = np.array(SCORED).T
    pairs = [(p > n) + (p == n) / 2 for label, p in SCORED if label for other, n in SCORED if not other]
    assert found["bag"]["auc"] == pytest.approx(np.mean(pairs)) == roc_auc_score(labels, probability)
    assert found["bag"]["auprc"] == pytest.approx(average_precision_score(labels, probability))
    assert found["bag"]["sensitivity"] == pytest.approx(3 / 4)  # "NA" is at the threshold, and so positive
    assert found["bag"]["specificity"] == pytest.approx(2 / 3)
    assert found["bag"]["balanced_accuracy"] == pytest.approx((3 / 4 + 2 / 3) / 2)
    assert found["bag"]["brier"] == pytest.approx(np.mean([(calibrated(p) - label) ** 2 for label, p in SCORED]))
    assert found["threshold"] == THRESHOLD
    assert found["model"]["fingerprint"] == "0123"
    counts = {"scored": 7, "positive": 4, "negative": 3}
    assert found["bags"] == {**counts, "not_predicted": [], "without_label": ["extra"]}
    groups = [[number for number, (label, _) in enumerate(SCORED) if label == wanted] for wanted in (0, 1)]
    slow = bootstrap(lambda drawn: roc_auc_score(labels[drawn], probability[drawn]), groups)
    np.testing.assert_allclose(found["bag_intervals"]["auc"], slow, atol=0.1)
    intervals = bag_metric_intervals(labels, probability, [THRESHOLD])
    assert found["bag_intervals"] == {name: list(interval) for name, interval in intervals.items()}
    assert "instance" not in found


def test_numbers_of_instances_are_those_by_hand(folder, write):
    found = score(folder, write(bag_table()), write(instance_table(), "instances.csv"))
    known = [
        (LABELS[bag_id] if number == 0 else 0, PROBABILITY[bag_id] / (number + 1))
        for bag_id in LABELS
        for number in (0, 1)
    ]
    labels, probability = np.array(known).T
    assert found["instance"] == {
        "auc": pytest.approx(roc_auc_score(labels, probability)),
        "auprc": pytest.approx(average_precision_score(labels, probability)),
    }
    assert found["instances"] == {"scored": 14, "positive": 4, "negative": 10, "without_label": 7}

    def auc(bags):
        rows = [row for bag in bags for row in (2 * bag, 2 * bag + 1)]  # an image goes with its bag
        return roc_auc_score(labels[rows], probability[rows])

    slow = bootstrap(auc, [[4, 5, 6], [0, 1, 2, 3]])
    np.testing.assert_allclose(found["instance_intervals"]["auc"], slow, atol=0.1)


def test_rows_in_any_order_give_the_same_numbers(folder, write):
    expected = score(folder, write(bag_table()), write(instance_table(), "instances.csv"))
    (header, *rows), (first, *images) = bag_table().splitlines(), instance_table().splitlines()
    mixed = pd.read_parquet(folder / "instances.parquet").sample(frac=1, random_state=0)
    mixed.to_parquet(folder / "instances.parquet")
    found = score(
        folder, write("\n".join([header, *rows[::-1]])), write("\n".join([first, *images[::-1]]), "instances.csv")
    )
    assert found == expected


def test_bags_that_one_side_does_not_know_are_said(folder, write):
    labels = {**{bag_id: LABELS[bag_id] for bag_id in ("a", "d", "e", "f")}, "lost": 1}
    found = score(folder, write(bag_table(labels)))
    assert found["bags"]["scored"] == 4
    assert found["bags"]["not_predicted"] == ["lost"]
    assert found["bags"]["without_label"] == ["007", "NA", "g/h", "extra"]
    said = "\n".join(score_notes(found))
    assert "1 bags of " in said
    assert "4 predicted bags have no label" in said


def test_one_split_alone(folder, write):
    rows = [f"{bag_id},{label},{'test' if bag_id in 'adef' else 'train'}" for bag_id, label in LABELS.items()]
    table = write("\n".join(["bag_id,label,split", *rows, "broken,maybe,train"]))
    found = score(folder, table, split="test")
    assert found["bags"]["scored"] == 4
    assert found["split"] == "test"
    with pytest.raises(InputError, match="no bag is in split 'val'; column split has 'test', 'train'"):
        score(folder, table, split="val")
    with pytest.raises(InputError, match="column 'split' is missing"):
        score(folder, write(bag_table()), split="test")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("bag,label\na,1\n", "column 'bag_id' is missing"),
        ("bag_id,diagnosis\na,1\n", "column 'label' is missing"),
        ("bag_id,label\n", "there are no bags"),
        ("bag_id,label\na,1\ne,0\na,1\n", "row 4: bag_id 'a' was already used in row 2"),
        ("bag_id,label\na,1\ne,2\n", "row 3: label is '2', expected 0 or 1"),
        ("bag_id,label\na,1\ne,\n", "row 3: label is '', expected 0 or 1"),
        ("bag_id,label\nA.svs,1\nE.svs,0\n", "none of its 2 bags was predicted; bag_id is 'A.svs' there and 'a' in"),
        ("bag_id,label\na,1\nd,1\nlost,0\n", "all 2 predicted bags with a label have label 1; AUC is not defined"),
    ],
)
def test_tables_of_bags_that_cannot_be_used(folder, write, table, message):
    with pytest.raises(InputError, match=message):
        score(folder, write(table))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("bag_id,name,label\na,img/0.png,1\n", "column 'file' is missing"),
        ("bag_id,file\na,img/0.png\n", "column 'label' is missing"),
        ("bag_id,file,label\na,img/0.png,yes\n", "row 2: label is 'yes'"),
        ("bag_id,file,label\na,img/0.png,\nlost,img/0.png,1\n", "no instance of the 7 bags"),
        ("bag_id,file,label\na,0.png,1\n", "none of its 1 .*file '0.png' there and name 'img/0.png'"),
        ("bag_id,file,label\na,img/0.png,1\na,img/7.png,0\n", "1 of 2 labelled instances .*'img/7.png'"),
        ("bag_id,file,label\na,img/0.png,1\na,img/0.png,0\n", "row 3: file 'img/0.png' of bag 'a' has another label"),
        ("bag_id,file,label\na,img/0.png,1\nd,img/0.png,1\n", "all 2 predicted instances .*AUC is not defined"),
    ],
)
def test_tables_of_instances_that_cannot_be_used(folder, write, table, message):
    with pytest.raises(InputError, match=message):
        score(folder, write(bag_table()), write(table, "instances.csv"))


def test_folders_that_hold_no_predictions(folder, write, tmp_path):
    table = write(bag_table())
    with pytest.raises(InputError, match=r"not a folder of predictions \(it has no prediction.json\)"):
        score(tmp_path, table)
    bags = pd.read_csv(folder / "predictions.csv", dtype=str, keep_default_na=False)
    for broken, message in (
        (bags.drop(columns="calibrated_probability"), "cannot be read .*calibrated_probability"),
        (bags.replace({"probability": {"0.9": "high"}}), "cannot be read .*high"),
        (pd.concat([bags, bags[:1]]), "bag_id 'a' is there twice"),
    ):
        broken.to_csv(folder / "predictions.csv", index=False)
        with pytest.raises(InputError, match=message):
            score(folder, table)
    (folder / "prediction.json").unlink()
    with pytest.raises(InputError, match=r"it has no prediction.json"):
        score(folder, table)


def test_from_a_model_to_scores_on_the_command_line(evaluated_run, tiny_cohort, tmp_path):
    out = tmp_path / "predictions"
    predict(evaluated_run, tiny_cohort, out, quiet=True)
    cohort = Cohort.open(tiny_cohort)
    instances = pd.DataFrame({"bag_id": cohort.bags["bag_id"].to_numpy()[cohort.bag_index()], "file": cohort.names()})
    instances.assign(label=cohort.instance_labels()).to_csv(tmp_path / "instances.csv", index=False)
    words = ["score", out, tiny_cohort / "bags.csv", "--split", "test", "--instances", tmp_path / "instances.csv"]
    said = CliRunner().invoke(app, [str(word) for word in words])
    assert said.exit_code == 0, said.exception
    found = json.loads((out / "scores.json").read_text())
    test = pd.read_csv(evaluated_run / "bag_predictions.csv").query("split == 'test' and encoder == 'refined'")
    tiles = pd.read_parquet(evaluated_run / "predictions.parquet").query("split == 'test' and encoder == 'refined'")
    assert found["bag"]["auc"] == pytest.approx(roc_auc_score(test["label"], test["probability"]))
    assert found["instance"]["auc"] == pytest.approx(roc_auc_score(tiles["label"], tiles["probability"]))
    assert found["bags"]["scored"] == len(test)
    assert found["instances"]["scored"] == len(tiles)
    low, high = found["bag_intervals"]["auc"]
    assert f"{found['bag']['auc']:.3f} [{low:.3f}, {high:.3f}]" in said.stdout
    assert f"{len(cohort) - len(test)} predicted bags have no label" in said.stdout
    assert str(out / "scores.json") in said.stdout
    CliRunner().invoke(app, [*(str(word) for word in words), "--json", str(tmp_path / "new" / "mine.json")])
    assert json.loads((tmp_path / "new" / "mine.json").read_text()) == found
    predict(evaluated_run, tiny_cohort, out, quiet=True)
    assert not (out / "scores.json").exists()  # it was of the predictions before


def test_an_interval_of_one_value_is_none(folder, write):
    found = score(folder, write(bag_table({"a": 1, "f": 0})))
    assert (found["bags"]["positive"], found["bags"]["negative"]) == (1, 1)
    assert set(found["bag_intervals"].values()) == {None}
    assert not any("[" in cell for row in score_rows(found) for cell in row)
    assert any(
        "no interval for auc, " in note and "1 positive and 1 negative bags" in note for note in score_notes(found)
    )
    some = score(folder, write(bag_table()))
    assert some["bag_intervals"]["auc"] is not None
    assert not any("no interval for auc" in note for note in score_notes(some))


def test_bags_that_the_model_was_trained_on_are_said(evaluated_run, tiny_cohort, tmp_path):
    predicted = predict(evaluated_run, tiny_cohort, tmp_path / "p", quiet=True)
    bags = Cohort.open(tiny_cohort).bags
    splits = {name: bags.loc[bags["split"] == name, "bag_id"].tolist() for name in ("train", "val", "test")}
    assert any(f"trained on {len(splits['train'])} of these bags" in note for note in predicted.notes)
    found = score(tmp_path / "p", tiny_cohort / "bags.csv")
    assert found["seen_in_training"] == splits
    assert any(f"the model was trained on {len(splits['train'])} of these bags" in note for note in score_notes(found))
    only_test = score(tmp_path / "p", tiny_cohort / "bags.csv", split="test")
    assert only_test["seen_in_training"] == {"train": [], "val": [], "test": splits["test"]}
    assert any("the model was tested on" in note for note in score_notes(only_test))


@pytest.fixture
def placed(folder):
    """The tiles of the predicted bags lie side by side, 100 pixels wide."""
    table = pd.read_parquet(folder / "instances.parquet")
    table["x"] = 100 * table.groupby("bag_id").cumcount()
    table.assign(y=0, tile_size_level0=100).to_parquet(folder / "instances.parquet")
    bags = pd.read_csv(folder / "predictions.csv", dtype={"bag_id": str}, keep_default_na=False)
    bags.assign(source="nowhere.svs").to_csv(folder / "predictions.csv", index=False)
    return folder


def outline(name, left, right):
    ring = [[left, 10], [right, 10], [right, 20], [left, 20], [left, 10]]
    geometry = {"type": "Polygon", "coordinates": [ring]}
    return json.dumps({"type": "Feature", "geometry": geometry, "properties": {"classification": {"name": name}}})


def test_annotations_are_ground_truth_of_tiles(placed, write, tmp_path):
    drawn = tmp_path / "drawn"
    drawn.mkdir()
    (drawn / "a.geojson").write_text(outline("Tumor", 10, 90))  # the first tile
    (drawn / "NA.geojson").write_text(outline("Tumor", 110, 120))  # the second
    (drawn / "007.geojson").write_text(outline("Ignore*", 0, 300))
    found = score(placed, write(bag_table()), annotations=drawn)
    positive = {("a", 0), ("NA", 1)}
    known = [
        (int((bag_id, number) in positive), PROBABILITY[bag_id] / (number + 1))
        for bag_id in LABELS
        for number in range(3)
        if LABELS[bag_id] == 0 or bag_id in ("a", "NA")  # of other positive bags nothing is known
    ]
    labels, probability = np.array(known).T
    assert found["instance"]["auc"] == pytest.approx(roc_auc_score(labels, probability))
    assert found["instances"]["positive"] == 2
    assert found["instances"]["negative"] == len(known) - 2
    with pytest.raises(InputError, match="--class 'DCIS' is in none of the annotations"):
        score(placed, write(bag_table()), annotations=drawn, classes=["DCIS"])
    with pytest.raises(InputError, match="there is no annotation of these 7 bags"):
        score(placed, write(bag_table()), annotations=tmp_path)


def test_labels_in_words_are_scored(folder, write):
    words = {bag_id: ("normal", "tumor")[label] for bag_id, label in LABELS.items()}
    assert score(folder, write(bag_table(words)), positive=["tumor"])["bag"] == score(folder, write(bag_table()))["bag"]
