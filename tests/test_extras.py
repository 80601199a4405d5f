"""Without an extra, its2clr works; a command that needs one says which, before any work."""

import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from its2clr import cli
from its2clr.cluster.place import Cluster
from its2clr.cohort.slides import SlideSettings, pack_slides, read_slide_manifest
from its2clr.cohort.slides.stain import StainNormaliser
from its2clr.engine.devices import Engine
from its2clr.engine.workspace import Workspace
from its2clr.errors import InputError, extra_needed
from tests.viewer.viewer_runs import write_overlapping

ROOT = Path(__file__).parents[1]


@pytest.fixture
def without(monkeypatch):
    """Makes packages look as if they were not installed."""

    def block(*names):
        for loaded in list(sys.modules):
            if loaded.split(".")[0] in {*names}:
                monkeypatch.delitem(sys.modules, loaded)
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)

    return block


@pytest.mark.parametrize("package", ["fastapi", "uvicorn"])
def test_the_viewer_names_its_extra(without, monkeypatch, capsys, tmp_path, package):
    without(package)
    for name in ("its2clr.viewer.app", "its2clr.viewer.serve"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "argv", ["its2clr", "view", "model.its2clr", "slide.svs", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert f"needs {package}, not installed here: pip install 'its2clr[viewer]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_cluster_names_its_extra(without, tmp_path):
    write_overlapping(tmp_path / "slides")
    manifest = read_slide_manifest(tmp_path / "slides" / "slides.csv")
    without("distributed")
    with pytest.raises(InputError, match=r"--cluster tcp:.* needs distributed.*its2clr\[cluster\]"):
        pack_slides(
            manifest, tmp_path / "out", SlideSettings(mpp=0.5, tile_size=64), cluster=Cluster("tcp://127.0.0.1:1")
        )


def test_stain_normalisation_names_its_extra(without):
    without("torchstain")
    tiles = torch.from_numpy(np.random.default_rng(0).integers(30, 200, (2, 3, 32, 32), dtype=np.uint8))
    with pytest.raises(InputError, match=r"--stain macenko needs torchstain.*its2clr\[stain\]"):
        StainNormaliser("macenko").fit(tiles)


def test_an_address_names_its_extra(without, monkeypatch, capsys, tmp_path):
    without("obstore")
    monkeypatch.setattr(sys, "argv", ["its2clr", "fit", "s3://bucket/cohort", "--out", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    said = "reading from an address needs obstore, not installed here: pip install 'its2clr[remote]'"
    assert said in capsys.readouterr().err


def test_training_logs_without_tensorboard(without, tmp_path):
    without("tensorboard")
    work = Workspace(tmp_path, Engine())
    work.log("pretrain", 1, 2, {"loss": 3.0})
    assert '"loss": 3.0' in (tmp_path / "metrics.jsonl").read_text()
    assert not (tmp_path / "tensorboard").exists()


def test_a_fault_of_our_own_is_not_taken_for_a_missing_package():
    with pytest.raises(ModuleNotFoundError), extra_needed("this", "that"):
        import its2clr.no_such_module  # noqa: F401


def test_all_has_every_extra_and_the_lock_has_all():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set(extras["all"][0].removeprefix("its2clr[").removesuffix("]").split(","))
    assert named == set(extras) - {"all", "dev", "docs"}
    locked = {line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "requirements.lock").open()}
    for extra in (*named, "docs"):
        for wanted in extras[extra]:
            assert re.match(r"[\w-]+", wanted)[0] in locked
