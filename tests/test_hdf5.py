"""HDF5 files of others: nothing outside the file is read, however it is asked for."""

import re
from pathlib import Path

import h5py
import numpy as np
import pytest

import its2clr
from its2clr.cohort.features.feature_file import read_feature_file
from its2clr.cohort.features.layouts import read_foreign_features
from its2clr.cohort.layout import tile_path
from its2clr.cohort.tiles import read_coords, read_encoded, read_labels, read_tiles
from its2clr.errors import InputError
from its2clr.hdf5 import open_hdf5
from its2clr.viewer.service import Viewer
from tests.cohort.feature_files import grid, trident
from tests.viewer.viewer_runs import write_cohort, write_run


def external_storage(h5, name, secret):
    h5.create_dataset(name, h5[f"{name}_own"].shape, h5[f"{name}_own"].dtype, external=[(str(secret), 0, 10**6)])


def virtual_dataset(h5, name, secret):
    own = h5[f"{name}_own"]
    layout = h5py.VirtualLayout(own.shape, own.dtype)
    layout[:] = h5py.VirtualSource(str(secret), name, own.shape)
    h5.create_virtual_dataset(name, layout)


def external_link(h5, name, secret):
    h5[name] = h5py.ExternalLink(str(secret), name)


def soft_link_over_an_external_one(h5, name, secret):
    h5.create_group("inner")["out"] = h5py.ExternalLink(str(secret), "/")
    h5[name] = h5py.SoftLink(f"/inner/out/{name}")


REACHING_OUT = [
    (external_storage, "external storage"),
    (virtual_dataset, "virtual dataset"),
    (external_link, "link to another place"),
    (soft_link_over_an_external_one, "link to another place"),
]


def reach_out(path, name, how):
    """Let a dataset of a file take its values from a file beside it."""
    secret = path.with_suffix(".secret")
    secret.write_bytes(path.read_bytes())  # holds a dataset of that name, as the links need
    with h5py.File(path, "r+") as h5:
        h5.move(name, f"{name}_own")
        how(h5, name, secret)
        h5[name].attrs.update(h5[f"{name}_own"].attrs)


@pytest.mark.parametrize(("how", "said"), REACHING_OUT)
@pytest.mark.parametrize("name", ["images", "offsets", "coords", "labels"])
def test_a_tile_file_holds_its_own_values(tmp_path, name, how, said):
    path = tile_path(write_cohort(tmp_path, ["a"]), "a")
    reach_out(path, name, how)
    reads = {
        "images": lambda: read_encoded(path, 0, 1, 9),
        "coords": lambda: read_coords(path),
        "labels": lambda: read_labels(path),
    }
    for read in (lambda: read_tiles(path), reads.get(name, lambda: read_tiles(path))):
        with pytest.raises(InputError, match=f"a.h5: '{name}'.*{said}.*not read"):
            read()


@pytest.mark.parametrize(("how", "said"), REACHING_OUT)
@pytest.mark.parametrize("name", ["features", "coords"])
def test_a_feature_file_holds_its_own_values(tmp_path, name, how, said):
    path = tmp_path / "a.h5"
    trident(path, np.ones((6, 4), np.float32), grid(3, 2))
    assert len(read_feature_file(path).features) == len(read_foreign_features(path).features) == 6
    reach_out(path, name, how)
    for read in (read_feature_file, read_foreign_features):
        with pytest.raises(InputError, match=f"'{name}'.*{said}"):
            read(path)


def test_filters_of_hdf5_alone_are_used(tmp_path):
    values = np.arange(100.0)
    with h5py.File(tmp_path / "a.h5", "w") as h5:
        for number, compression in enumerate(("gzip", "lzf")):
            h5.create_dataset(f"plain_{number}", data=values, compression=compression, shuffle=True, fletcher32=True)
    with open_hdf5(tmp_path / "a.h5") as h5:
        assert all(np.array_equal(h5[name], values) for name in h5)
    with h5py.File(tmp_path / "a.h5", "r+") as h5:
        settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        settings.set_chunk((10,))
        settings.set_filter(32015, h5py.h5z.FLAG_OPTIONAL)
        h5py.h5d.create(h5.id, b"packed", h5py.h5t.IEEE_F64LE, h5py.h5s.create_simple((100,)), settings)
    with pytest.raises(InputError, match="'packed' is compressed by filter 32015"):
        open_hdf5(tmp_path / "a.h5")


def test_a_group_in_the_place_of_a_dataset_is_said(tmp_path):
    path = tile_path(write_cohort(tmp_path, ["a"]), "a")
    with h5py.File(path, "r+") as h5:
        del h5["coords"]
        h5.create_group("coords")
    with pytest.raises(InputError, match="no coords"):
        read_tiles(path)


def test_every_file_that_is_read_is_opened_by_the_function_that_checks():
    source = Path(its2clr.__file__).parent
    calls = {
        f"{path.relative_to(source)}: {call}"
        for path in source.rglob("*.py")
        for call in re.findall(r"h5py\.(?:File|h5f\.open)\(.*?\)", path.read_text(encoding="utf-8"))
        if not call.endswith('"w")')
    }
    assert calls == {'hdf5.py: h5py.File(path, "r")'}


def test_the_viewer_sends_images_alone(tmp_path):
    cohort = write_cohort(tmp_path / "cohort", ["a", "b", "c", "d", "e", "f"])
    viewer = Viewer(write_run(tmp_path / "run", cohort))
    assert viewer.instance_image(0, 1)[0].startswith(b"\x89PNG")
    with h5py.File(tile_path(cohort, "a"), "r+") as h5:
        start, end = h5["offsets"][1:3]
        h5["images"][start:end] = np.frombuffer(b"root:x:0:0:".ljust(end - start, b"."), np.uint8)
    with pytest.raises(InputError, match="cannot be decoded"):
        viewer.instance_image(0, 1)
    viewer.close()


@pytest.mark.parametrize("version", ["earliest", "latest"])
@pytest.mark.parametrize("where", ["root", "dataset", "values", "chunks", "many"])
def test_a_text_longer_than_the_file_is_refused_before_memory_is_taken(version, where, tmp_path):
    """A length of 4 GB in a damaged file of a few kB took 4 GB."""
    path = tmp_path / "a.h5"
    text = "a text of which the length is changed"
    with h5py.File(path, "w", libver=version) as file:
        file["numbers"] = np.arange(12)
        if where == "many":  # they do not fit into the first part of the header
            for number in range(7):
                file["numbers"].attrs[f"number {number}"] = "x" * number
        if where in {"root", "many", "dataset"}:
            (file if where == "root" else file["numbers"]).attrs["told"] = text
        else:
            chunks = (2,) if where == "chunks" else None
            file.create_dataset("told", data=[text, "b"], dtype=h5py.string_dtype(), chunks=chunks)
    with open_hdf5(path) as file:
        assert "numbers" in file
    content = path.read_bytes()
    length = len(text).to_bytes(4, "little")
    heaps = [place for place in range(0, len(content), 8) if content[place : place + 4] == b"GCOL"]
    references = [content.find(length + heap.to_bytes(8, "little")) for heap in heaps]
    place = next(place for place in references if place >= 0)
    path.write_bytes(content[:place] + b"\xff\xff\xff\xf0" + content[place + 4 :])
    with pytest.raises((InputError, KeyError, OSError), match=r"longer than the file|checksum"):
        open_hdf5(path)


def test_a_heap_without_an_end_is_refused(tmp_path):
    """HDF5 never came back from one whose free piece has no length."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.attrs["told"] = "a text"
    content = path.read_bytes()
    heap = content.find(b"GCOL")
    free = heap + 16 + 16 + 8  # after the head of the heap, the head of the text, and the text
    assert content[free : free + 2] == b"\0\0"
    assert int.from_bytes(content[free + 8 : free + 16], "little") > 0
    path.write_bytes(content[: free + 8] + bytes(8) + content[free + 16 :])
    with pytest.raises(InputError, match="the place of its texts is damaged"):
        open_hdf5(path)
