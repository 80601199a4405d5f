"""A run that starts from weights of a file: constants, report, resuming without the file, and no silent scratch."""

import json

import pytest
import timm
import torch
from tests.conftest import TINY

from its2clr.encoders.weights import load_network
from its2clr.errors import InputError
from its2clr.run.directory import RunDirectory
from its2clr.run.opening import open_run
from its2clr.run.saved import read_run_config

OPTIONS = {"channels": [8, 8, 16, 16], "stem_width": 8}


@pytest.fixture
def folder(tmp_path):
    """A timm folder with other constants than the usual ones."""
    torch.manual_seed(5)
    source = timm.create_model("resnet18", num_classes=3, pretrained_cfg_overlay={"mean": (0.6, 0.5, 0.4)}, **OPTIONS)
    timm.models.save_for_hf(source, tmp_path / "timm", safe_serialization=True)
    return tmp_path / "timm"


def begin(run, cohort, folder, *settings):
    return open_run(run, cohort, "demo", [*TINY, f"encoder.weights={folder}", *settings], quiet=True)


def test_refinement_starts_straight_from_the_weights(tiny_cohort, folder, tmp_path):
    stages = begin(tmp_path / "run", tiny_cohort, folder, "pretrain.epochs=0", "refine.epochs=2")
    stages.refine()
    start = load_network(stages.run.checkpoint("encoder-start"))
    source = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=0, **OPTIONS)
    for name, tensor in source.state_dict().items():
        assert torch.equal(start.encoder.backbone.state_dict()[name], tensor), name
    assert torch.allclose(start.encoder.mean.flatten(), torch.tensor([0.6, 0.5, 0.4]))
    refined = load_network(stages.run.checkpoint("encoder-refined"))
    assert torch.equal(refined.encoder.mean, start.encoder.mean)

    report = json.loads((tmp_path / "run" / "weights.json").read_text())
    assert report["missing"] == []
    assert set(report["unused"]) == {"fc.weight", "fc.bias"}
    config, _ = read_run_config(tmp_path / "run")
    assert config.encoder.mean == (0.6, 0.5, 0.4)
    assert config.encoder.weights == str(folder)


def test_a_stopped_pretraining_goes_on_without_the_file(tiny_cohort, folder, tmp_path, monkeypatch):
    begin(tmp_path / "whole", tiny_cohort, folder).pretrain()
    whole = load_network(tmp_path / "whole" / "checkpoints" / "encoder-start.safetensors")

    class StoppedError(Exception):
        pass

    log = RunDirectory.log

    def stop(self, stage, epoch, *values):
        log(self, stage, epoch, *values)
        if epoch == 2:
            raise StoppedError

    monkeypatch.setattr(RunDirectory, "log", stop)
    with pytest.raises(StoppedError):
        begin(tmp_path / "stopped", tiny_cohort, folder).pretrain()
    monkeypatch.undo()
    folder.rename(tmp_path / "moved")
    begin(tmp_path / "stopped", tiny_cohort, folder).pretrain()
    stopped = load_network(tmp_path / "stopped" / "checkpoints" / "encoder-start.safetensors")
    for name, tensor in whole.state_dict().items():
        assert torch.equal(stopped.state_dict()[name], tensor), name
    fresh = timm.create_model(f"local-dir:{tmp_path / 'moved'}", pretrained=True, num_classes=0, **OPTIONS)
    assert not torch.equal(fresh.conv1.weight, whole.encoder.backbone.conv1.weight)  # it was trained on


def test_wrong_weights_stop_the_run_before_it_begins(tiny_cohort, folder, tmp_path):
    wrong = begin(tmp_path / "run", tiny_cohort, folder, "encoder.options={channels: [8, 8, 8, 8], stem_width: 8}")
    with pytest.raises(InputError, match=r"(?s)not weights of this encoder.*of another shape"):
        wrong.pretrain()
    assert not (tmp_path / "run" / "checkpoints").exists()
    begin(tmp_path / "run", tiny_cohort, folder, "pretrain.epochs=0").pretrain()  # corrected
    assert (tmp_path / "run" / "weights.json").is_file()
