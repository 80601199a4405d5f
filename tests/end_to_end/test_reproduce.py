"""`its2clr reproduce` as a user runs it."""

import json
import shutil
import time

import pandas as pd
import pytest
from tests.end_to_end.commands import its2clr
from tests.end_to_end.test_promises import change_labels

from its2clr.experiments.spec import experiments

SIX_MINUTES = 360


@pytest.mark.slow
@pytest.mark.xdist_group("reproduce")
def test_all_of_the_paper_in_one_command(tmp_path):
    out = tmp_path / "out"
    started = time.monotonic()
    first = its2clr("reproduce", "all", "--budget", "smoke", "--out", out, "--workers", 2, timeout=900)
    seconds = time.monotonic() - started
    assert "FAILED" not in first.stdout
    page = (out / "results.md").read_text()
    for label, spec in experiments().items():
        folder = out / spec.folder
        assert f"`{label}`" in page
        assert {"README.md", "table.csv", "result.json"} <= {path.name for path in folder.iterdir()}
        assert (folder / "plot.png").is_file() == (spec.kind != "drawing"), label
        result = json.loads((folder / "result.json").read_text())
        assert result["budget"] == "smoke"
        if spec.kind == "table":
            found = pd.read_csv(folder / "table.csv").set_index(["row", "column"])
            for place, cell in spec.cells().items():
                assert pd.isna(found.loc[place, "ours"]) == (cell.missing is not None), (label, place)
                assert found.loc[place, "paper"] == spec.paper[place[0]][list(spec.columns).index(place[1])].mean
        elif spec.kind == "sweep":
            found = pd.read_csv(folder / "table.csv")
            assert found["ours"].notna().all()
            assert len(found) == 2 * sum(len(sweep.values) for sweep in spec.sweeps.values())
        elif spec.kind in ("curves", "training"):
            assert set(pd.read_csv(folder / "table.csv")["line"]) >= set(spec.lines), label
    assert len(pd.read_csv(out / "problems.csv")) == 0
    assert seconds < SIX_MINUTES

    # The same again trains nothing: every run is there.
    started = time.monotonic()
    its2clr("reproduce", "all", "--budget", "smoke", "--out", out, "--workers", 1, timeout=300)
    assert time.monotonic() - started < seconds
    assert (out / "results.md").read_text() == page


@pytest.mark.slow
def test_without_instance_labels_what_needs_them_is_left_out_and_said(tiny_cohort, tmp_path):
    cohort = tmp_path / "cohort"
    shutil.copytree(tiny_cohort, cohort)
    info = json.loads((cohort / "cohort.json").read_text())
    (cohort / "cohort.json").write_text(json.dumps({**info, "has_instance_labels": False}))
    change_labels(cohort, lambda label: label, lambda labels: None, ["train", "val", "test"])
    out = tmp_path / "out"
    its2clr(
        "reproduce", "tab:mainresult", "tab:WR_exp", "tab:instance_test", "fig:localization",
        "--budget", "smoke", "--cohort", cohort, "--out", out, "--workers", 1,
    )  # fmt: skip
    main = pd.read_csv(out / "tab-mainresult" / "table.csv")
    assert main["ours"].notna().all()
    rates = pd.read_csv(out / "tab-WR_exp" / "table.csv").set_index(["row", "column"])
    assert pd.notna(rates.loc[("Original", "ItS2CLR"), "ours"])
    assert pd.isna(rates.loc[("5% Neg.", "ItS2CLR"), "ours"])
    assert "needs instance labels" in rates.loc[("Original", "Finetuning w. instance GT"), "reason"]
    assert pd.read_csv(out / "tab-instance_test" / "table.csv")["ours"].isna().all()


@pytest.mark.slow
def test_a_run_that_fails_is_a_row_in_a_table_not_a_crash(tiny_cohort, tmp_path):
    out = tmp_path / "out"
    result = its2clr(
        "reproduce", "app:hyperparameter", "--budget", "smoke", "--cohort", tiny_cohort, "--out", out, "--workers", 1,
        "--set", "refine.learning_rate=1e30",
    )  # fmt: skip
    assert "FAILED: TrainingError" in result.stdout
    found = pd.read_csv(out / "app-hyperparameter" / "table.csv")
    assert found["ours"].isna().all()
    assert found["reason"].str.contains("loss became").all()
    assert len(pd.read_csv(out / "problems.csv")) == 2
    assert "have no result" in (out / "results.md").read_text()


@pytest.mark.slow
def test_tables_can_be_made_of_what_is_finished(tiny_cohort, tmp_path):
    out = tmp_path / "out"
    arguments = ["--budget", "smoke", "--cohort", tiny_cohort, "--out", out]
    its2clr("reproduce", "all", *arguments, "--no-train")
    assert pd.read_csv(out / "tab-mainresult" / "table.csv")["ours"].isna().all()
    assert not (out / "runs").exists()
    its2clr("reproduce", "app:hyperparameter", *arguments, "--workers", 1)
    its2clr("reproduce", "tab:mainresult", "fig:training_process", *arguments, "--no-train")
    found = pd.read_csv(out / "tab-mainresult" / "table.csv").set_index(["row", "column"])
    assert pd.notna(found.loc[("ItS2CLR", "Camelyon16"), "ours"])
    assert found.loc[("ItS2CLR", "EGFR"), "reason"] == "seed 0: not run"
    assert set(pd.read_csv(out / "fig-training_process" / "table.csv")["line"]) == {"ItS2CLR"}


def test_the_list_and_mistakes():
    assert "tab:WR_exp" in its2clr("reproduce", "--list").stdout
    wrong = its2clr("reproduce", "tab:mainresul", check=False)
    assert wrong.returncode == 2
    assert "did you mean tab:mainresult?" in wrong.stderr
    wrong = its2clr("reproduce", "tab:mainresult", "--budget", "paper", check=False)
    assert wrong.returncode == 2
    assert "needs a cohort of yours" in wrong.stderr
