"""A run in MLflow: a real store (SQLite), and servers that are away."""

import shutil
import sqlite3
import sys

import pytest

from its2clr import cli
from its2clr.engine import mlflow_run
from its2clr.engine.devices import Engine
from its2clr.engine.workspace import Workspace
from its2clr.errors import InputError
from its2clr.files import read_json, write_json
from its2clr.run.evaluation import evaluate
from its2clr.run.opening import open_run

client_of = pytest.importorskip("mlflow.tracking", reason="mlflow is not installed: its2clr[mlflow]").MlflowClient
ASKED = ["engine.loggers=[mlflow]"]


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory):
    """Making the tables takes a second."""
    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    client_of(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def store(empty_store, tmp_path, monkeypatch):
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    address = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "smears")
    return client_of(address)


@pytest.fixture
def work(tmp_path):
    (tmp_path / "run").mkdir()
    work = Workspace(tmp_path / "run", Engine())
    work.reopen = lambda: setattr(work, "mlflow", mlflow_run.MlflowRun(work.path, {"seed": 3}, work.engine.say))
    return work


def only_run(store):
    (experiment,) = (one for one in store.search_experiments() if one.name == "smears")
    (found,) = store.search_runs([experiment.experiment_id])
    return found


def history(store, name):
    return [(one.step, one.value) for one in store.get_metric_history(only_run(store).info.run_id, name)]


def test_a_run_in_mlflow_has_settings_folder_scores_and_goes_on(store, evaluated_run, tmp_path):
    shutil.copytree(evaluated_run, tmp_path / "mine")
    for _ in range(2):
        state = read_json(tmp_path / "mine" / "state.json")
        state["stages"].pop("evaluate")
        write_json(tmp_path / "mine" / "state.json", state)
        results = evaluate(open_run(tmp_path / "mine", None, None, ASKED, quiet=True))
    found = only_run(store)
    assert found.info.run_name == "mine"
    assert found.info.status == "FINISHED"
    assert found.data.tags["its2clr.folder"] == str(tmp_path / "mine")
    assert found.data.params["refine.epochs"] == "4"
    assert found.data.params["cohort"] == results["cohort"]["path"]
    assert found.data.metrics["test/refined.bag_auc"] == results["refined"]["test"]["bag_auc"]
    assert found.data.metrics["comparison.bag_auc_difference"] == results["comparison"]["bag_auc_difference"]


def test_epochs_of_a_training_that_was_stopped_and_goes_on_are_one_run(store, work):
    work.reopen()

    def train_an_epoch():
        assert only_run(store).info.status == "RUNNING"
        work.log("refine", 1, 3, {"loss": 0.5}, {"unsaid": 1.0})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), work.lock():
        train_an_epoch()
    assert only_run(store).info.status == "KILLED"
    work.reopen()
    with work.lock():
        work.log("refine", 2, 3, {"loss": 0.25})
    assert history(store, "refine/loss") == [(1, 0.5), (2, 0.25)]
    assert only_run(store).info.status == "FINISHED"
    with pytest.raises(ValueError, match="no"), work.lock():
        raise ValueError("no")
    assert only_run(store).info.status == "FAILED"


def test_a_run_that_was_deleted_there_is_begun_anew(store, work, capsys):
    work.engine.bars.enabled = True
    work.reopen()
    store.delete_run(only_run(store).info.run_id)
    work.reopen()
    assert "any more; a new one is begun" in capsys.readouterr().out
    assert only_run(store).data.params == {"seed": "3"}


def test_a_server_that_goes_away_costs_a_warning_and_gets_the_numbers_later(store, work, tmp_path, capsys, monkeypatch):
    work.engine.bars.enabled = True
    work.reopen()
    capsys.readouterr()

    def rename(old, new):
        with sqlite3.connect(tmp_path / "mlflow.db") as database:
            database.execute(f"ALTER TABLE {old} RENAME TO {new}")

    rename("metrics", "away")
    work.log("refine", 1, 9, {"loss": 0.5})
    work.log("refine", 2, 9, {"loss": 0.25})
    monkeypatch.setattr(mlflow_run.time, "monotonic", lambda: 1e9)
    work.log("refine", 3, 9, {"loss": 0.125})
    assert capsys.readouterr().out.count("warning: mlflow:") == 1
    rename("away", "metrics")
    monkeypatch.setattr(mlflow_run.time, "monotonic", lambda: 2e9)
    work.log("refine", 4, 9, {"loss": 0.0625})
    assert history(store, "refine/loss") == [(1, 0.5), (2, 0.25), (3, 0.125), (4, 0.0625)]


def test_a_server_that_is_not_there_is_one_line_before_any_training(evaluated_run, tmp_path, monkeypatch, capsys):
    cohort = read_json(evaluated_run / "results.json")["cohort"]["path"]
    words = ["its2clr", "pretrain", cohort, "--out", str(tmp_path / "run"), "--recipe", "demo", "--set", ASKED[0]]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for address, said in (
        ("", "MLflow has no server; set MLFLOW_TRACKING_URI"),
        ("http://me:secret@127.0.0.1:1", "MLflow at http://127.0.0.1:1 cannot be used"),
    ):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 2
        error = capsys.readouterr().err
        assert f"error: engine.loggers: {said}" in error
        assert "secret" not in error
        assert not list(tmp_path.glob("run/checkpoints/*"))


def test_mlflow_is_off_by_default_and_names_its_extra(evaluated_run, tmp_path, monkeypatch):
    assert open_run(evaluated_run, quiet=True).run.mlflow is None
    assert not (evaluated_run / mlflow_run.FILE).exists()
    for name in [name for name in sys.modules if name.split(".")[0] == "mlflow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(InputError, match=r"needs mlflow.*, not installed here: .*its2clr\[mlflow\]"):
        mlflow_run.MlflowRun(tmp_path, {}, print)
