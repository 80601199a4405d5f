"""The recipe of a user who names none, on a tiny cohort and a tiny network."""

import json
import shutil

import pandas as pd
import pytest

from its2clr.encoder_export import export_encoder
from its2clr.errors import InputError
from its2clr.predict.model_of_run import model_of_run
from its2clr.report import write_report
from its2clr.run.evaluation import evaluate
from its2clr.run.opening import open_run
from its2clr.run.scores import RunScores
from its2clr.settings import resolve_config

pytestmark = pytest.mark.xdist_group("standard")  # what they share is made once
SMALL = [
    "encoder.options={channels: [8, 8, 16, 16], stem_width: 8}",
    "pretrain.epochs=1",
    "pretrain.least_steps=30",
    "pretrain.batch_size=32",
    "refine.epochs=2",
    "refine.least_steps=20",
    "refine.batch_size=32",
    "aggregator.epochs=30",
    "evaluation.bootstrap=20",
]


@pytest.fixture(scope="module")
def run(tiny_cohort, tmp_path_factory):
    folder = tmp_path_factory.mktemp("standard") / "run"
    stages = open_run(folder, tiny_cohort, None, SMALL, quiet=True)
    assert stages.config.aggregator.name == "log_mean_exp"
    stages.fit()
    evaluate(stages)
    return folder


def test_it_trains_in_steps(run):
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    tiles = {
        stage: [line["tiles_per_second"] * line["seconds"] for line in logged if line["stage"] == stage]
        for stage in ("pretrain", "refine")
    }
    assert tiles["pretrain"] == pytest.approx([30 * 32])  # one epoch of its 12 steps, and as many again as it takes
    assert tiles["refine"] == pytest.approx([20 * 32] * 2)


def test_the_better_encoder_is_handed_over_and_said(run, tmp_path):
    found = json.loads((run / "handover.json").read_text())
    results = json.loads((run / "results.json").read_text())
    assert results["hand_over"] == found
    assert (found["encoder"] == "refined") == (found["confidence"] >= 0.7)
    assert RunScores(run).best.encoder == found["encoder"]
    page = write_report(run).read_text()
    assert f"the {found['encoder']} encoder is handed over" in page
    card = (export_encoder(run, tmp_path / "export") / "README.md").read_text()
    assert f"the {found['encoder']} encoder is handed over" in card


@pytest.mark.parametrize("encoder", ["start", "refined"])
def test_what_is_handed_over_is_what_predicts(run, encoder, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    found = json.loads((copy / "handover.json").read_text())
    (copy / "handover.json").write_text(json.dumps({**found, "encoder": encoder}))
    for path in copy.glob("*.its2clr"):
        path.unlink()
    assert model_of_run(copy).description.encoder_name == encoder
    card = (export_encoder(copy, tmp_path / "export") / "README.md").read_text()
    assert f"{ {'start': 'SimCLR', 'refined': 'ItS2CLR'}[encoder] } (this one)" in card


def test_labels_may_come_from_readers_that_never_saw_the_bag(run, tiny_cohort, tmp_path):
    settings = [*SMALL, "refine.out_of_fold=true", f"pretrain.start={run}"]
    stages = open_run(tmp_path / "run", tiny_cohort, None, settings, quiet=True)
    stages.refine()
    table = pd.read_parquet(tmp_path / "run" / "rounds" / "000" / "pseudo_labels.parquet")
    readers = table.filter(regex=r"^probability_\d+$").to_numpy()
    assert (abs(readers - table["probability"].to_numpy()[:, None]).min(axis=1) == 0).all()
    assert not (readers.mean(axis=1) == table["probability"]).all()


def test_out_of_fold_labels_need_folds():
    with pytest.raises(InputError, match="folds=true"):
        resolve_config("standard", ["refine.out_of_fold=true", "aggregator.folds=false"])
