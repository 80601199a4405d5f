import numpy as np
import pytest
import torch

from its2clr import tile_store as module
from its2clr.cohort import Cohort, load_tiles
from its2clr.config import EngineConfig
from its2clr.engine.devices import Engine
from its2clr.errors import InputError
from its2clr.tile_store import TileStore, available_memory, choose_tier


def engine(**settings):
    made = Engine(EngineConfig(accelerator="cpu", **settings))
    made.bars.enabled = False
    return made


@pytest.fixture(scope="module")
def cohort(tiny_cohort):
    return Cohort.open(tiny_cohort).split("val").without_labels()


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_tiles_are_the_same_wherever_they_are(cohort, tmp_path, place):
    expected = load_tiles(cohort)
    store = TileStore.from_cohort(cohort, engine(tiles=place, tile_folder=str(tmp_path / "decoded")))
    assert len(store) == cohort.n_instances
    rows = torch.tensor([5, 0, 5, 17])
    assert np.array_equal(store.gather(rows, torch.device("cpu")).numpy(), expected[rows.numpy()])
    feed = store.feed(2, torch.device("cpu"))
    fed = [feed.tiles[places].numpy() for places in feed(rows.view(2, 2))]
    assert np.array_equal(np.concatenate(fed), expected[rows.numpy()])
    assert (tmp_path / "decoded").exists() == (place == "disk")


def test_tiles_on_disk_are_decoded_once(cohort, tmp_path, monkeypatch):
    settings = {"tiles": "disk", "tile_folder": str(tmp_path)}
    TileStore.from_cohort(cohort, engine(**settings))
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size == cohort.n_instances * 3 * 32 * 32
    monkeypatch.setattr(module, "load_tiles", None)
    TileStore.from_cohort(cohort, engine(**settings))


def test_an_interrupted_decoding_leaves_no_file(cohort, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "load_tiles", stop)
    with pytest.raises(KeyboardInterrupt):
        TileStore.from_cohort(cohort, engine(tiles="disk", tile_folder=str(tmp_path)))
    assert not list(tmp_path.glob("*.uint8"))


def test_the_place_is_chosen_by_size(monkeypatch):
    monkeypatch.setattr(module, "available_memory", lambda: 1000.0)
    assert choose_tier(599, engine()) == "memory"
    assert choose_tier(601, engine()) == "disk"
    assert choose_tier(601, engine(tiles="memory")) == "memory"
    with pytest.raises(InputError, match="the run is on a CPU"):
        choose_tier(1, engine(tiles="gpu"))


def test_available_memory_is_a_number_of_bytes():
    assert available_memory() > 2**20
