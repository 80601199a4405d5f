"""The recipe of a user who names none, on a tiny cohort and a tiny network."""

import json
import shutil

import pandas as pd
import pytest
import timm
import torch

from its2clr.encoder_export import export_encoder
from its2clr.encoders.weights import load_network
from its2clr.engine.training_state import TrainingState
from its2clr.errors import InputError
from its2clr.predict.model_of_run import export_model, model_of_run
from its2clr.predict.new_bags import predict
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
    assert (found["encoder"] == "refined") == (found["confidence"] > 0.5)
    assert RunScores(run).best.encoder == found["encoder"]
    page = write_report(run).read_text()
    assert f"the {found['encoder']} encoder is handed over" in page
    card = (export_encoder(run, tmp_path / "export") / "README.md").read_text()
    assert f"the {found['encoder']} encoder is handed over" in card


@pytest.fixture
def handed_over(run, tmp_path):
    """A copy of the run that hands over the refined encoder, whatever the comparison said."""
    copy = shutil.copytree(run, tmp_path / "handed over")
    found = json.loads((copy / "handover.json").read_text())
    (copy / "handover.json").write_text(json.dumps({**found, "encoder": "refined"}))
    for path in copy.glob("*.its2clr"):
        path.unlink()
    return copy


def encoder_of(run, name):
    return load_network(run / "checkpoints" / f"encoder-{name}.safetensors").encoder.eval()


def test_the_refined_encoder_has_the_start_beside_it(run, handed_over, tmp_path):
    tiles = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    start, refined = encoder_of(run, "start"), encoder_of(run, "refined")
    with torch.no_grad():
        both = refined(tiles)
        assert both.shape[1] == 2 * start.feature_dim
        assert torch.equal(both[:, : start.feature_dim], start(tiles))
        assert not torch.allclose(both[:, start.feature_dim :], start(tiles))
        assert torch.equal(refined.standardised(both), both[:, start.feature_dim :])
        export = export_encoder(handed_over, tmp_path / "export")
        for name, features in zip(("start", "refined"), both.chunk(2, dim=1), strict=True):
            other = timm.create_model(f"local-dir:{export / name}", pretrained=True).eval()
            images = (tiles / 255 - start.mean) / start.std
            assert torch.allclose(other(images), features, atol=1e-5)
    card = (export / "README.md").read_text()
    assert "The encoder is two networks, in `start/` and `refined/`" in card
    assert "local-dir:FOLDER/refined" in card


def test_its_model_file_gives_the_runs_numbers(handed_over, tiny_cohort, tmp_path):
    predict(export_model(handed_over, tmp_path / "model.its2clr"), tiny_cohort, tmp_path / "out", quiet=True)
    found = pd.read_csv(tmp_path / "out" / "predictions.csv", dtype={"bag_id": str}).set_index("bag_id")
    table = pd.read_csv(handed_over / "bag_predictions.csv", dtype={"bag_id": str}).query("encoder == 'refined'")
    own = table.set_index("bag_id")["probability"]
    assert found.loc[own.index, "probability"].to_numpy() == pytest.approx(own.to_numpy(), abs=1e-5)


def test_a_killed_refinement_beside_its_start_goes_on_the_same(run, tiny_cohort, tmp_path, monkeypatch):
    save = TrainingState.save

    def killed(self, epoch, *, last=False):
        save(self, epoch, last=True)
        if epoch == 1:
            raise KeyboardInterrupt

    settings = [*SMALL, f"pretrain.start={run}"]
    open_run(tmp_path / "whole", tiny_cohort, None, settings, quiet=True).refine()
    stages = open_run(tmp_path / "killed", tiny_cohort, None, settings, quiet=True)
    with monkeypatch.context() as patched:
        patched.setattr(TrainingState, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            stages.refine()
    open_run(tmp_path / "killed", quiet=True).refine()
    whole, resumed = (encoder_of(tmp_path / name, "refined").state_dict() for name in ("whole", "killed"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_an_encoder_that_was_refined_keeps_its_own_start(run, handed_over, tiny_cohort, tmp_path):
    """As `correct` does: the refined encoder of a run is the start of the next."""
    shutil.copy(
        handed_over / "checkpoints" / "encoder-refined.safetensors",
        handed_over / "checkpoints" / "encoder-start.safetensors",
    )
    settings = [*SMALL, f"pretrain.start={handed_over}"]
    open_run(tmp_path / "again", tiny_cohort, None, settings, quiet=True).refine()
    first, again = encoder_of(run, "start"), encoder_of(tmp_path / "again", "refined")
    assert again.feature_dim == 2 * first.feature_dim
    kept, before = again.parted()[0].state_dict(), first.state_dict()
    assert all(torch.equal(kept[name], before[name]) for name in before)


def test_two_networks_are_not_set_by_hand():
    with pytest.raises(InputError, match=r"set refine\.beside_start"):
        resolve_config("standard", ["encoder.side_by_side=true"])


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
