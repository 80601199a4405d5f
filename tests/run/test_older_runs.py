"""Runs of older versions: the names of then become those of now, and everything opens as before."""

import json
import shutil

import pandas as pd
import pytest
import yaml

from its2clr.errors import InputError
from its2clr.predict.model_of_run import model_of_run
from its2clr.run.evaluation import evaluate
from its2clr.run.opening import open_run
from its2clr.run.saved import read_run_config
from its2clr.run.scores import Model, RunScores

OLD = {"start": "simclr", "refined": "its2clr"}


def make_older(run):
    """What an older version would have left."""
    for new, old in OLD.items():
        (run / "checkpoints" / f"encoder-{new}.safetensors").rename(run / "checkpoints" / f"encoder-{old}.safetensors")
        (run / "aggregators" / f"{new}.safetensors").rename(run / "aggregators" / f"{old}.safetensors")
        (run / "features" / new).rename(run / "features" / old)
    results = json.loads((run / "results.json").read_text())
    names = results.pop("names")
    results = {OLD.get(key, key): value for key, value in results.items()}
    (run / "results.json").write_text(json.dumps({**results, "start": names["start"], "method": names["refined"]}))
    for name, read, write in (
        ("bag_predictions.csv", lambda p: pd.read_csv(p, dtype=str), lambda t, p: t.to_csv(p, index=False)),
        ("predictions.parquet", pd.read_parquet, lambda t, p: t.to_parquet(p, index=False)),
    ):
        table = read(run / name)
        write(table.assign(encoder=table["encoder"].replace(OLD)), run / name)
    state = json.loads((run / "state.json").read_text())
    for stage in list(state["stages"]):
        words = stage.split(" ")
        state["stages"][" ".join(OLD.get(word, word) for word in words)] = state["stages"].pop(stage)
    models = state["stages"]["evaluate"]["models"]
    state["stages"]["evaluate"]["models"] = [" ".join(OLD.get(word, word) for word in m.split(" ")) for m in models]
    (run / "state.json").write_text(json.dumps(state))
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["refine"] |= {"selection": "bag_auc", "tolerance": 0.01}
    options = {"instance_dropout": 0.2, "sharpness": 2.0}
    config["refine"]["reader"] = {"name": "smooth_max", "options": options, "epochs": 2}
    config["pretrain"]["start"] = "/elsewhere/checkpoints/encoder-its2clr.safetensors"
    (run / "config.yaml").write_text(yaml.safe_dump(config))


@pytest.fixture
def older(evaluated_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(evaluated_run, run)
    make_older(run)
    return run


def test_an_older_run_opens_with_everything_it_had(evaluated_run, older):
    before, after = RunScores(evaluated_run), RunScores(older)
    assert after.models == before.models == [Model("start", "dsmil"), Model("refined", "dsmil")]
    pd.testing.assert_frame_equal(before.bags, after.bags)
    assert before.results == after.results
    bag_id = before.bags["bag_id"][0]
    assert (before.bag(bag_id).instances == after.bag(bag_id).instances).all()
    for model in after.models:
        one, other = (model_of_run(run, model).description for run in (older, evaluated_run))
        assert (one.threshold, one.encoder_name) == (other.threshold, other.encoder_name)
    assert not list(older.rglob("*simclr*")) + list((older / "features").glob("its2clr"))
    config, _ = read_run_config(older)
    assert config.refine.reader.options == {"sharpness": 2.0}
    assert config.pretrain.start == "/elsewhere/checkpoints/encoder-refined.safetensors"


def test_what_is_trained_is_not_trained_again(older):
    stages = open_run(older, quiet=True)
    said = []
    stages.engine.say = said.append
    stages.fit()
    for stage in ("pretrain", "refine", "aggregate start", "aggregate refined"):
        assert f"{stage}: already done" in said
    assert evaluate(stages)["names"]["refined"] == "ItS2CLR"


def test_an_upgrade_may_be_killed_at_any_step(evaluated_run, older, monkeypatch):
    from its2clr.run import older_runs

    for step in ("_rename_files", "_rename_in_tables", "_rename_in_state"):
        with monkeypatch.context() as patch:
            patch.setattr(older_runs, step, lambda run: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                read_run_config(older)
    assert RunScores(older).results == RunScores(evaluated_run).results
    assert open_run(older, quiet=True).trained() == [("start", "dsmil"), ("refined", "dsmil")]


def test_files_of_a_training_that_was_under_way_are_found(older):
    for old in ("refine-candidate-003", "pretrain-candidate-0012", "end_to_end-aggregator-007"):
        (older / "checkpoints" / f"{old}.safetensors").touch()
    read_run_config(older)
    names = {path.stem for path in (older / "checkpoints").iterdir()}
    assert {"refine-best-encoder-0003", "pretrain-best-encoder-0012", "end_to_end-best-aggregator-0007"} <= names


def test_a_refinement_begun_with_a_setting_that_is_gone_is_refused(older):
    state = json.loads((older / "state.json").read_text())
    del state["stages"]["refine"]
    (older / "state.json").write_text(json.dumps(state))
    with pytest.raises(InputError, match=r"begun with refine.tolerance=0.01, which no longer exists"):
        read_run_config(older)


def test_a_run_of_now_is_left_alone(evaluated_run):
    before = {path: path.stat().st_mtime_ns for path in evaluated_run.rglob("*") if path.is_file()}
    read_run_config(evaluated_run)
    assert before == {path: path.stat().st_mtime_ns for path in evaluated_run.rglob("*") if path.is_file()}


def test_a_damaged_state_is_said_in_a_line(evaluated_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(evaluated_run, run, ignore=shutil.ignore_patterns("features", "rounds"))
    content = bytearray((run / "state.json").read_bytes())
    content[len(content) // 2] = 0xFF  # no UTF-8
    (run / "state.json").write_bytes(content)
    with pytest.raises(InputError, match=r"state\.json"):
        open_run(run, quiet=True).pretrain()
