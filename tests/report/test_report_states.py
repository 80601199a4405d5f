import json
import os
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml
from report_pages import Page
from typer.testing import CliRunner

from its2clr.cli import app
from its2clr.errors import InputError, TrainingError
from its2clr.report import reported, words, write_report
from its2clr.report.run_state import said_age
from its2clr.settings import resolve_config

TEST_PARTS = {"bag-results", "instance-results", "decisions", "test-bags", "other-bags", "separation"}


def read(run: Path) -> Page:
    return Page(write_report(run).read_text(encoding="utf-8"))


def edit_state(run: Path, *lost: str) -> None:
    state = json.loads((run / "state.json").read_text())
    for stage in lost:
        state["stages"].pop(stage)
    (run / "state.json").write_text(json.dumps(state))


def unevaluate(run: Path) -> Path:
    for name in ("results.json", "predictions.parquet", "bag_predictions.csv"):
        (run / name).unlink()
    edit_state(run, "evaluate")
    return run


def grow_old(run: Path, seconds: float = 7200) -> None:
    for path in run.rglob("*"):
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - seconds))


@pytest.fixture
def run(evaluated_run, tmp_path):
    shutil.copytree(evaluated_run, tmp_path / "run")
    return tmp_path / "run"


def test_a_run_that_has_just_begun(tmp_path, tiny_cohort):
    run = tmp_path / "run"
    run.mkdir()
    document = {"cohort": str(tiny_cohort), **resolve_config("demo").model_dump(mode="json")}
    (run / "config.yaml").write_text(yaml.safe_dump(document))
    out = tmp_path / "deep" / "mine.html"
    found = CliRunner().invoke(app, ["report", str(run), "--out", str(out)])
    assert found.exit_code == 0, found.output
    assert str(out) in found.output.replace("\n", "")
    html = out.read_text(encoding="utf-8")
    assert html.startswith("<!DOCTYPE html>")
    page = Page(html)
    assert "just begun" in page.text
    assert f"its2clr fit --out {run}" in page.text
    assert not TEST_PARTS & page.tables.keys()
    assert page.tables["cohort-splits"][-1][:4] == ["test", "16", "not looked at", "not looked at"]
    assert "Report of run run" in page.text


def test_a_run_that_stopped_shows_training_and_says_how_to_go_on(run):
    unevaluate(run)
    edit_state(run, "refine", "aggregate refined")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:-3]) + '\n{"stage": "refi')  # killed in mid-line
    grow_old(run)
    page = read(run)
    assert "not finished" in page.text
    assert "2 hours ago" in page.text
    assert f"its2clr fit --out {run}" in page.text
    assert re.search(r"refine has done \d of 4 epochs", page.text)
    assert not TEST_PARTS & page.tables.keys()
    header, *rows = page.tables["rounds-table"]
    expected = [json.loads(path.read_text()) for path in sorted(run.glob("rounds/*/metrics.json"))]
    assert [row[1] for row in rows] == [f"{found['validation_auc']:.3f}" for found in expected]
    assert {"AUC", "precision", "churn"} <= set(header)  # against ground truth of the training bags
    best = [found["epoch"] for found in expected if found["improved"]][-1]
    assert words.rounds_words(expected, best, "is kept so far") in page.text
    assert "health-table" in page.tables
    assert len(page.all("svg")) == 2


def test_rounds_of_an_unfinished_run_are_those_of_the_evaluation(run):
    evaluated = read(run)
    unevaluate(run)
    assert read(run).tables["rounds-table"] == evaluated.tables["rounds-table"]


def test_no_test_label_is_read_before_the_evaluation(run, tiny_cohort, tmp_path):
    """The page of a run that was not evaluated is the same whatever the test labels are."""
    unevaluate(run)
    pages = []
    for name, flip in (("one", False), ("two", True)):
        cohort = tmp_path / name
        shutil.copytree(tiny_cohort, cohort)
        bags = pd.read_csv(cohort / "bags.csv", dtype=str)
        if flip:
            test = bags["split"] == "test"
            bags.loc[test, "label"] = bags.loc[test, "label"].map({"0": "1", "1": "0"})
            for bag_id in bags.loc[test, "bag_id"]:
                (cohort / "tiles" / f"{bag_id}.h5").write_bytes(b"not to be opened")
        bags.to_csv(cohort / "bags.csv", index=False)
        config = yaml.safe_load((run / "config.yaml").read_text())
        (run / "config.yaml").write_text(yaml.safe_dump({**config, "cohort": str(cohort)}, sort_keys=False))
        html = write_report(run).read_text(encoding="utf-8").replace(str(cohort), "COHORT")
        pages.append(re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", "WHEN", html))
    assert "not looked at" in pages[0]
    assert pages[0] == pages[1]


def test_a_run_that_is_being_trained(run):
    fcntl = pytest.importorskip("fcntl")
    if not Path("/proc/locks").is_file():
        pytest.skip("this system does not list its locks")
    unevaluate(run)
    edit_state(run, "refine", "aggregate refined")
    grow_old(run)
    with (run / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "still going" in read(run).text
    assert "still going" not in read(run).text


def test_a_run_that_is_trained_or_measured_too_early(run):
    assert "Trained and measured on the test bags." in read(run).text
    state = json.loads((run / "state.json").read_text())
    state["stages"]["aggregate refined max"] = {"retrainings": 2}
    (run / "state.json").write_text(json.dumps(state))
    page = read(run)
    assert "before this was trained: refined max" in page.text
    assert f"its2clr evaluate {run}" in page.text
    assert "bag-results" in page.tables
    unevaluate(run)
    page = read(run)
    assert "Trained, not measured yet." in page.text
    assert f"its2clr evaluate {run}" in page.text


def test_a_collapse_is_seen_in_the_numbers(run):
    unevaluate(run)
    edit_state(run, "refine", "aggregate refined")
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for entry in entries:
        if entry["stage"] == "refine":
            entry |= {"loss": 4.844187086458591, "spread": 1e-4}  # log(127): two views of 64 tiles
    (run / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert "the representation collapsed" not in read(run).text  # when it continues, it will try something else
    retry = {"seen": 4, "loss": 4.844, "collapsed_loss": 4.844, "spread": 1e-4, "back_to": 0, "remedy": "less"}
    (run / "retries.json").write_text(json.dumps([retry, {**retry, "back_to": 2}]))
    page = read(run)
    assert "failed" in page.text
    assert "the representation collapsed to one point" in page.text
    assert "a lower refine.learning_rate" in page.text
    assert "it went back to the state after epoch 2 and tried less" in page.text
    assert "To go on" not in page.text


def test_a_failed_training_leaves_a_report_that_says_why(run):
    unevaluate(run)
    edit_state(run, "refine", "aggregate refined")
    said: list[str] = []
    with pytest.raises(TrainingError, match="<b>not a number"), reported(run, said.append):
        raise TrainingError("refine: the loss is <b>not a number</b>")
    *warnings, where = said
    assert where == f"report in {run / 'report.html'}"
    page = Page((run / "report.html").read_text(encoding="utf-8"))
    assert "Why it stopped: refine: the loss is <b>not a number</b>" in page.text
    told = [text.removeprefix("warning: ") for text in warnings]
    assert told  # the tiny run's pseudo labels are poor
    assert all(text in page.text for text in told)
    assert f"its2clr fit --out {run}" in page.text
    with pytest.raises(KeyboardInterrupt), reported(run, said.append):
        raise KeyboardInterrupt
    assert "it was stopped from the keyboard" in read(run).text
    os.utime(run / "metrics.jsonl", None)  # trained since
    assert "Why it stopped" not in read(run).text
    with reported(run, said.append):
        assert not (run / "failure.json").exists()
    assert "Why it stopped" not in (run / "report.html").read_text(encoding="utf-8")


def test_a_report_that_fails_does_not_fail_the_run(run, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("its2clr.report.page.render", lambda _: 1 / 0)
    with reported(run, said.append):
        pass
    assert len(said) == 1
    assert said[0].startswith("warning: no report was written (ZeroDivisionError")


def test_fit_ends_with_a_report(run):
    found = CliRunner().invoke(app, ["fit", "--out", str(run)])
    assert found.exit_code == 0, found.output
    assert f"report in {run / 'report.html'}" in found.output.replace("\n", "")
    assert "bag-results" in Page((run / "report.html").read_text(encoding="utf-8")).tables


def test_without_ground_truth(run, tiny_cohort, tmp_path):
    cohort = tmp_path / "cohort"
    shutil.copytree(tiny_cohort, cohort)
    info = json.loads((cohort / "cohort.json").read_text())
    (cohort / "cohort.json").write_text(json.dumps({**info, "has_instance_labels": False}))
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**config, "cohort": str(cohort)}, sort_keys=False))
    results = json.loads((run / "results.json").read_text())
    del results["cohort"]["witness_rate"], results["made_from"]
    for encoder in ("start", "refined"):
        results[encoder] = {"test": {k: v for k, v in results[encoder]["test"].items() if "instance" not in k}}
    results["rounds"] = [
        {k: found[k] for k in ("epoch", "validation_auc", "threshold", "pseudo_labels_replaced")}
        for found in results["rounds"]
    ]
    (run / "results.json").write_text(json.dumps(results))
    table = pd.read_parquet(run / "predictions.parquet")
    table.assign(label=table["label"] * 0 - 1).to_parquet(run / "predictions.parquet", index=False)
    page = read(run)
    assert "There is no ground truth for the instances" in page.text
    assert not {"instance-results", "separation"} & page.tables.keys()
    assert "tile of a positive bag" in page.text
    assert "coloured by bag" in page.text
    assert len(page.all("img")) > 20
    assert "Truly" not in page.text
    assert "Problems" not in page.text
    assert not any("truly" in picture["alt"] for picture in page.all("img"))


@pytest.mark.parametrize("damage", ["results.json", "bag_predictions.csv", "predictions.parquet", "features", "tiles"])
def test_damaged_parts_are_said_and_the_rest_is_shown(run, damage, tiny_cohort, tmp_path):
    if damage == "features":
        shutil.rmtree(run / "features" / "refined")
    elif damage == "tiles":
        shutil.copytree(tiny_cohort, tmp_path / "cohort")
        config = yaml.safe_load((run / "config.yaml").read_text())
        (run / "config.yaml").write_text(yaml.safe_dump({**config, "cohort": str(tmp_path / "cohort")}))
        for path in (tmp_path / "cohort" / "tiles").iterdir():
            path.write_bytes(path.read_bytes()[:500])
    else:
        (run / damage).write_bytes((run / damage).read_bytes()[:300])
    page = read(run)
    assert "rounds-table" in page.tables
    if damage == "features":
        assert "SimCLR (before)" in page.text
    else:
        assert "cannot be shown" in page.text
    assert ("bag-results" in page.tables) == (damage not in {"results.json", "bag_predictions.csv"})


def test_what_is_no_run_is_said(tmp_path, run):
    with pytest.raises(InputError, match="not a run"):
        write_report(tmp_path)
    with pytest.raises(InputError, match="is a folder"):
        write_report(run, tmp_path)


def test_ages_are_said_in_the_unit_that_fits():
    assert [said_age(seconds) for seconds in (5, 150, 7300, 200_000)] == ["5 seconds", "2 minutes", "2 hours", "2 days"]
