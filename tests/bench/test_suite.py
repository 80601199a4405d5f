"""The suite of real cohorts: its table says what its runs say, and what docs/results-real.md says is made of them."""

import json
import os
import shutil
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.conftest import TINY

from its2clr.engine.workers import LOCK

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("ITS2CLR_DATA", ROOT.parent / "shared" / "data"))


SHORT = [
    "refine.hand_over=better",
    "pretrain.epochs=1",
    "aggregator.epochs=2",
    "refine.epochs=2",
    "end_to_end.epochs=1",
]
SHORT += ["end_to_end.bags_per_step=8", "evaluation={retrainings: 2, bootstrap: 20}"]


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import suite_page

    yield suite_page
    del sys.modules["suite_page"]


@pytest.fixture
def suite(page, monkeypatch):
    import suite

    tiny = {"size": "tiny"}
    monkeypatch.setitem(suite.COHORTS, "demo", suite.Source(None, tiny))
    monkeypatch.setitem(suite.COHORTS, "other", suite.Source(None, tiny | {"evidence": 0.5}, starts="demo"))
    yield suite
    del sys.modules["suite"]


def call(suite, monkeypatch, data, out, *words):
    """Run the suite; returns whether a run failed, and its results."""
    monkeypatch.setattr(sys, "argv", ["", str(data), str(out), "--samplings", "1", "--trainings", "1", *words])
    with pytest.raises(SystemExit) as ended:
        suite.main()
    return ended.value.code, json.loads((out / "suite.json").read_text())


def run(row, number, bag_auc, instance_auc=0.5, **more):
    which = {"split": "test", "cohort": "demo", "row": row, "sampling": number, "training": 0, "settings": "a"}
    return which | {"bag_auc": bag_auc, "instance_auc": instance_auc, "instance_auprc": 0.5} | more


def test_summary_of_a_cohort(page):
    runs = [run("ours", 0, 0.8), run("ours", 1, 0.55), run("ours", 2, 0.9), run("once", 0, 0.4)]
    runs += [run("start", 0, 0.5, 0.5), run("start", 1, 0.6, 0.7)]
    runs += [run("ground truth", 0, 0.9, 0.8), run("ground truth", 1, 0.8, 0.6)]
    runs += [run("colours", 0, 0.3)]
    rows = page.summarised(runs, ["colours", "start", "once", "ours", "ground truth"])
    _, _, once, ours, _ = rows
    assert [row["row"] for row in rows] == ["colours", "start", "once", "ours", "ground truth"]
    assert ours["bag_auc"]["mean"] == pytest.approx(0.75)
    assert ours["bag_auc"]["deviation"] == pytest.approx(((0.05**2 + 0.2**2 + 0.15**2) / 2) ** 0.5)
    # Ground truth is 0.4 and 0.2 ahead: 0.3 with a standard error of 0.1. Ours has a start in two of its three runs.
    assert ours["bag_auc"]["closed"] == pytest.approx((0.3 - 0.05) / 2 / 0.3)
    assert (ours["bag_auc"]["below"], ours["bag_auc"]["paired"]) == (1, 2)
    assert ours["instance_auc"]["closed"] is None  # 0.3 and -0.1 ahead: 0.1 with a standard error of 0.2
    assert once["bag_auc"]["deviation"] is None
    assert once["bag_auc"]["closed"] == pytest.approx((0.4 - 0.5) / 0.4)
    table = page.table(rows)
    assert "| once | 1 | 0.400 | 0.500 | 0.500 | -25% / no clear gap / no clear gap | 1 / 0 / 0 of 1 |" in table
    assert "| ours | 3 | 0.750 ± 0.180 |" in table
    assert "| colours | 1 | 0.300 | 0.500 | 0.500 |  |  |" in table  # it does not begin with the start


def test_one_run_has_no_clear_gap(page):
    rows = page.summarised([run("start", 0, 0.5), run("ground truth", 0, 0.9)], ["start", "ground truth"])
    assert rows[1]["bag_auc"]["closed"] is None


def test_later_results_are_merged(page):
    names = {"cohorts": ["demo"], "rows": ["start", "ours"]}
    lost = {**run("ours", 0, None), "why": "it failed"}
    first = names | {"runs": [run("start", 0, 0.5), run("start", 1, 0.6)], "missing": [lost]}
    second = names | {"rows": ["start", "ours", "mine"], "runs": [run("start", 1, 0.7)], "missing": []}
    found = page.merged([first, second])
    assert [one["bag_auc"] for one in found["runs"]] == [0.5, 0.7]
    assert found["rows"] == ["start", "ours", "mine"]
    assert "Missing: ours, 1 runs: it failed." in page.sections(found, "test")[-1]
    third = names | {"runs": [run("ours", 0, 0.8, settings="b", handed_over="start")], "missing": []}
    found = page.merged([found, third])
    assert found["missing"] == []
    said = page.sections(found, "test")[-1]
    assert "different settings: a; b" in said
    assert "ours: 1 of 1 runs handed over their start" in said
    assert page.sections(found, "val") == []


def test_the_page_is_made_of_the_results(page, tmp_path, monkeypatch):
    shutil.copy(ROOT / "docs" / "results-real.md", tmp_path / "page.md")
    results = ROOT / "benchmarks" / "results" / "suite.json"
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "page.md"), str(results)])
    page.main()
    assert (tmp_path / "page.md").read_text() == (ROOT / "docs" / "results-real.md").read_text()


@pytest.mark.slow
def test_every_row_on_the_embedded_cohort(suite, tmp_path, monkeypatch):
    tiny = ["--recipe", "demo", "--set", *TINY, *SHORT]
    failed, _ = call(suite, monkeypatch, tmp_path, tmp_path, "--cohorts", "demo", *tiny)
    assert not failed
    failed, found = call(suite, monkeypatch, tmp_path, tmp_path, "--cohorts", "other", "--rows", "start", *tiny)
    assert not failed
    assert not (tmp_path / "other" / "sampling-0" / "pretrained").exists()  # it takes the starts of the other cohort
    missing = {one["row"] for one in found["missing"]}
    trained = [("demo", row) for row in suite.ROWS if row not in missing]
    assert [(one["cohort"], one["row"]) for one in found["runs"]] == [*trained, ("other", "start")]
    assert all("is not installed" in one["why"] for one in found["missing"])
    assert all(0 <= one[measure] <= 1 for one in found["runs"] for measure in ("bag_auc", "instance_auprc"))

    by_row = {one["row"]: one for one in found["runs"] if one["cohort"] == "demo"}
    for one in (by_row["ItS2CLR"], by_row["ItS2CLR, paper settings"], by_row["cross-entropy"]):
        assert one["handed_over"] == "refined" or one["bag_auc"] == by_row["start"]["bag_auc"]
    assert "refined" not in by_row["ground truth"]  # it is the refined one whatever validation says

    # A run with other settings is named, not reported as if it were the one that was asked for.
    words = ["--cohorts", "demo", "--rows", "start", "--no-train", "--split", "test", *tiny, "aggregator.epochs=5"]
    _, found = call(suite, monkeypatch, tmp_path, tmp_path, *words)
    on_test = [one for one in (*found["runs"], *found["missing"]) if one["split"] == "test"]
    assert [one["why"] for one in on_test] == ["OUT holds it with other settings of aggregator"]


def worker_at(folder):
    """The process that works on a run."""
    lock = str(folder / LOCK)
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(file.path == lock for file in process.open_files()):
                return process
    return None


@pytest.mark.slow
def test_a_worker_that_is_killed_twice_changes_no_number(suite, tmp_path, monkeypatch):
    words = ["--cohorts", "demo", "--rows", "start", "ItS2CLR", "--recipe", "demo"]
    words += ["--set", *TINY, *SHORT, "pretrain.epochs=3"]
    failed, expected = call(suite, monkeypatch, tmp_path, tmp_path / "quiet", *words)
    assert not failed
    here = tmp_path / "disturbed"
    sampling, killed = here / "demo" / "sampling-0", []

    def kill():
        for run, saved in (("pretrained", "checkpoints/pretrain*"), ("ItS2CLR", "rounds/000")):
            folder = sampling / run / "seed-0"
            while not list(folder.glob(saved)):
                time.sleep(0.002)
            process = worker_at(folder)
            process.kill()
            killed.append((process.pid, (folder / "results.json").exists()))

    threading.Thread(target=kill, daemon=True).start()
    failed, found = call(suite, monkeypatch, tmp_path, here, *words, "--workers", "2")
    assert not failed
    assert [finished for _, finished in killed] == [False, False]
    assert found == expected


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "breast-idc").is_dir(), reason="the breast tiles are not on this machine")
def test_colour_of_real_tiles_from_zip_to_numbers(suite, tmp_path, monkeypatch):
    row = "colour statistics, bag labels copied"
    words = ["--cohorts", "breast-0.2", "--rows", row, "--recipe", "demo"]
    _, found = call(suite, monkeypatch, DATA, tmp_path, *words)
    assert [one["row"] for one in found["runs"]] == [row]
    assert found["runs"][0]["instance_auc"] > 0.8  # colour alone ranks tumour tiles
