"""Rows in mapped files: what they hold stays, and the memory of pages that were read is given back."""

import mmap
import sys

import numpy as np
import pytest
import torch

from its2clr.aggregators.stacked import bag_outputs, bag_passes, build, stack
from its2clr.bag_features import BagFeatures
from its2clr.config import AdapterConfig
from its2clr.encoders.adapter import FeatureAdapter
from its2clr.engine import mapped_rows
from its2clr.engine.mapped_rows import give_back, map_rows, new_rows, resident_pages
from its2clr.tile_store import TileStore

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say what is resident")
BAGS, SIZE, DIM = 64, 256, 512
MEGABYTES = BAGS * SIZE * DIM * 4 / 1e6
CPU = torch.device("cpu")


@pytest.fixture
def features(tmp_path, monkeypatch):
    """33 MB in a mapped file, all of them in memory now; from here on little more may be."""
    rows = torch.from_numpy(new_rows((BAGS * SIZE, DIM), np.float32, tmp_path))
    give_back()
    rows.copy_(torch.arange(BAGS * SIZE)[:, None])
    for held in list(mapped_rows._mapped):
        held.madvise(mmap.MADV_DONTNEED)
    monkeypatch.setattr(mapped_rows, "MOST_RESIDENT", resident_pages() * mmap.PAGESIZE)
    return rows


def bags(features):
    return BagFeatures(features, torch.arange(0, len(features) + 1, SIZE))


def read_bag_by_bag(features):
    of_bags = bags(features)
    for number in range(BAGS):
        values, _ = of_bags.batch(torch.tensor([number]))
        assert (values[0, :, 0] == torch.arange(number * SIZE, (number + 1) * SIZE)).all()


def read_by_aggregators(features):
    of_bags, module = bags(features), build("max", {}, DIM).eval()
    for part in bag_passes(of_bags, 1):
        bag_outputs(module, stack([module], CPU)[0], of_bags, part)


def feed(features):
    every = torch.arange(len(features)).view(BAGS, SIZE)
    store = TileStore(features).feed(SIZE, CPU)
    assert sum(float(store.tiles[rows].sum()) for rows in store(every)) > 0


def gather(features):
    for part in torch.arange(len(features)).split(SIZE):
        TileStore(features).gather(part, CPU)


def learn(features):
    adapter = FeatureAdapter(DIM, AdapterConfig())
    adapter.learn_statistics(features)
    assert adapter.mean[0] == (len(features) - 1) / 2


@pytest.mark.parametrize("read", [read_bag_by_bag, read_by_aggregators, feed, gather, learn, bags])
def test_memory_of_rows_that_were_read_is_given_back(features, read, monkeypatch):
    monkeypatch.setattr("its2clr.bag_features.ROWS_AT_ONCE", SIZE)
    monkeypatch.setattr("its2clr.encoders.adapter.ROWS_AT_ONCE", SIZE)
    before = resident_pages()
    read(features)
    assert (resident_pages() - before) * mmap.PAGESIZE / 1e6 < MEGABYTES / 4


def test_little_is_not_given_back(features, monkeypatch):
    monkeypatch.setattr(mapped_rows, "MOST_RESIDENT", 2**40)
    before = resident_pages()
    features.sum()
    give_back()
    assert (resident_pages() - before) * mmap.PAGESIZE / 1e6 > MEGABYTES / 2


def test_new_rows_are_zeros_and_leave_no_file(tmp_path):
    rows = new_rows((3, 2), np.float32, tmp_path / "new")
    assert (rows == 0).all()
    assert not list((tmp_path / "new").iterdir())


def test_rows_of_a_file_are_read_but_never_changed(tmp_path):
    path = tmp_path / "rows"
    np.arange(6, dtype=np.float32).tofile(path)
    rows = map_rows(path, np.float32, (3, 2))
    assert rows.tolist() == [[0, 1], [2, 3], [4, 5]]
    rows[0] = 7
    assert np.fromfile(path, dtype=np.float32)[0] == 0
