"""`its2clr tune` with real trainings: killed and resumed, side by side, and blind to test labels."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
import yaml
from tests.conftest import TINY
from tests.end_to_end.commands import command, environment

from its2clr.cli.program import app
from its2clr.cluster.place import Cluster
from its2clr.errors import InputError
from its2clr.run.opening import open_run
from its2clr.tune.search import tune
from its2clr.tune.study import Study

QUICK = [*TINY, "pretrain.epochs=1", "aggregator.epochs=2", "refine.epochs=2", "refine.refresh_every=1"]
QUICK += ["refine.aggregator_seeds=1", "refine.steps_per_epoch=2"]
OPTIONS = ["--recipe", "demo", *(part for setting in QUICK for part in ("--set", setting))]
TRIALS = 3
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("tune")]  # what they share is made once


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    path = tmp_path_factory.mktemp("space") / "space.yaml"
    path.write_text("refine.learning_rate: {low: 0.001, high: 0.1, log: true}\nrefine.threshold: [0.3, 0.5]\n")
    return path


@pytest.fixture(scope="module")
def searched(tiny_cohort, space, tmp_path_factory):
    """A study that nothing disturbed."""
    study = Study.begin(tmp_path_factory.mktemp("study") / "study", tiny_cohort, "demo", QUICK, space)
    tune(study, trials=TRIALS)
    return study


def table(study):
    return pd.read_csv(study / "trials.csv").drop(columns="seconds")


def test_a_killed_search_goes_on_and_equals_one_that_was_not(tiny_cohort, space, searched, tmp_path):
    killed = tmp_path / "killed"
    words = ["tune", tiny_cohort, "--out", killed, "--space", space, "--trials", TRIALS, *OPTIONS]
    process = subprocess.Popen(command(*words), env=environment(), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not (killed / "trials/001/rounds/001").is_dir():
        assert process.poll() is None, "the search ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    study = Study.begin(killed)
    assert [trial.state for trial in study.trials()] == ["finished", "unfinished"]
    tune(study, trials=TRIALS)
    pd.testing.assert_frame_equal(table(killed), table(searched.path))


def test_test_labels_change_nothing(tiny_cohort, space, searched, tmp_path):
    other = tmp_path / "cohort"
    shutil.copytree(tiny_cohort, other)
    bags = pd.read_csv(other / "bags.csv", dtype=str)
    of_test = bags["split"] == "test"
    bags.loc[of_test, "label"] = (1 - bags.loc[of_test, "label"].astype(int)).astype(str)
    bags.to_csv(other / "bags.csv", index=False)
    study = Study.begin(tmp_path / "study", other, "demo", QUICK, space)
    tune(study, trials=TRIALS)
    pd.testing.assert_frame_equal(table(study.path), table(searched.path))
    assert (study.path / "best.yaml").read_text() == (searched.path / "best.yaml").read_text()


def test_two_workers_share_a_study(tiny_cohort, space, tmp_path, capsys):
    study = Study.begin(tmp_path / "study", tiny_cohort, "demo", QUICK, space)
    best = tune(study, trials=TRIALS, cluster=Cluster(workers=2))
    trials = study.trials()
    assert [(trial.number, trial.state) for trial in trials] == [(number, "finished") for number in range(TRIALS)]
    assert best.value == min(trial.value for trial in trials)
    assert len(list((tmp_path / "study/starts").iterdir())) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("trial ")]
    assert sorted(line.split()[1].rstrip(":") for line in lines) == ["0", "1", "2"]


def test_the_best_recipe_can_be_fitted(tiny_cohort, searched, tmp_path):
    best = searched.best()
    start = next((searched.path / "starts").iterdir())
    stages = open_run(
        tmp_path / "run", tiny_cohort, str(searched.path / "best.yaml"), {"pretrain.start": str(start)}, quiet=True
    )
    assert stages.config.refine.learning_rate == best.settings["refine.learning_rate"]
    stages.refine()
    found = [yaml.safe_load(path.read_text()) for path in sorted((tmp_path / "run").glob("rounds/*/metrics.json"))]
    assert [one["validation_loss"] for one in found if one["improved"]][-1] == best.value


def test_a_finished_trial_keeps_its_numbers_and_not_its_weights(searched):
    for trial in searched.trials():
        folder = searched.path / "trials" / f"{trial.number:03d}"
        assert (folder / "metrics.jsonl").is_file()
        assert not (folder / "checkpoints").exists()


def test_the_space_can_be_printed(tiny_cohort, capsys):
    app(["tune", str(tiny_cohort), "--recipe", "demo", "--show-space"], standalone_mode=False)
    found = yaml.safe_load(capsys.readouterr().out)
    assert found["refine.learning_rate"] == {"low": 0.001, "high": 0.3, "log": True}
    assert found["refine.views.crop_scale"] == [None, [0.5, 1.0], [0.25, 1.0]]


def test_without_optuna_one_line_says_what_to_install(tiny_cohort, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "its2clr.tune.study")
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InputError) as raised:
        app(["tune", str(tiny_cohort), "--out", str(tmp_path / "study")], standalone_mode=False)
    assert str(raised.value) == "`its2clr tune` needs Optuna: pip install 'its2clr[tune]'"
    assert not (tmp_path / "study").exists()
