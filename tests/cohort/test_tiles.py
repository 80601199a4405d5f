import io
import math

import h5py
import numpy as np
import pytest
from PIL import Image

from its2clr import __version__
from its2clr.cohort import decode, read_labels, read_tiles, write_tile_file
from its2clr.errors import InputError

DESCRIPTION = {
    "bag_id": "a/b c",
    "tile_size": 8,
    "tile_size_level0": 16,
    "mpp": 0.5,
    "source": "slide.svs",
    "encoding": "png",
}


def encode(pixels, kind="PNG"):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)


@pytest.fixture
def path(tmp_path, pixels):
    path = tmp_path / "tiles" / "one.h5"
    coords = np.arange(10).reshape(5, 2)
    names = [f"bild ü {i}.png" for i in range(5)]
    write_tile_file(path, [encode(p) for p in pixels], coords, names, [1, 0, -1, 0, 1], **DESCRIPTION)
    return path


def test_what_is_written_is_read_back(path, pixels):
    tiles = read_tiles(path)
    assert len(tiles) == 5
    for i, expected in enumerate(pixels):
        assert tiles.encoded(i) == encode(expected)
        np.testing.assert_array_equal(decode(tiles.encoded(i)), expected)
    np.testing.assert_array_equal(tiles.coords, np.arange(10).reshape(5, 2))
    assert tiles.coords.dtype == np.int64
    assert tiles.names == [f"bild ü {i}.png" for i in range(5)]
    assert tiles.labels.tolist() == [1, 0, -1, 0, 1]
    assert tiles.labels.dtype == np.int8
    found = {name: getattr(tiles, name) for name in DESCRIPTION}
    assert found == DESCRIPTION
    assert tiles.its2clr_version == __version__


def test_layout_on_disk_is_the_documented_one(path):
    with h5py.File(path) as file:
        assert file["images"].dtype == np.uint8
        assert file["images"].ndim == 1
        assert file["offsets"].dtype == np.int64
        assert file["offsets"].shape == (6,)
        for holder in (file, file["coords"]):
            assert {name: holder.attrs[name] for name in DESCRIPTION} == DESCRIPTION
            assert holder.attrs["its2clr_version"] == __version__
    assert [p.name for p in path.parent.iterdir()] == ["one.h5"]


def test_labels_are_read_alone_and_can_be_put_out_of_reach(path, tmp_path):
    assert read_labels(path).tolist() == [1, 0, -1, 0, 1]
    blind = read_tiles(path, labels_visible=False)
    assert not blind.has_labels
    assert len(blind.encoded(0)) > 0
    with pytest.raises(InputError, match="out of reach"):
        blind.labels  # noqa: B018


def test_labels_and_mpp_are_optional(tmp_path, pixels):
    path = tmp_path / "x.h5"
    write_tile_file(path, [encode(pixels[0])], [[0, 0]], ["a"], **{**DESCRIPTION, "mpp": math.nan})
    tiles = read_tiles(path)
    assert tiles.labels is None
    assert read_labels(path) is None
    assert not tiles.has_labels
    assert math.isnan(tiles.mpp)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": []}, "at least one image"),
        ({"images": [b"x", b""]}, "none may be empty"),
        ({"coords": [[0, 0]]}, "2 images do not fit coords of shape"),
        ({"names": ["a"]}, "1 names"),
        ({"labels": [1]}, "labels of shape"),
        ({"labels": [1, 2]}, "must be 1, 0 or -1"),
        ({"encoding": "gif"}, "encoding must be one of"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, change, message):
    parts = {"images": [b"x", b"y"], "coords": [[0, 0], [1, 1]], "names": ["a", "b"], **DESCRIPTION, **change}
    with pytest.raises(InputError, match=message) as raised:
        write_tile_file(tmp_path / "x.h5", **parts)
    assert "'a/b c'" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def spoil(path, how):
    if how == "truncate":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        return
    if how == "text":
        path.write_text("not hdf5")
        return
    if how == "missing":
        path.unlink()
        return
    with h5py.File(path, "r+") as file:
        if how == "offsets":
            offsets = file["offsets"][:]
            file["offsets"][:] = offsets[[0, 2, 1, 3, 4, 5]]
        elif how == "short":
            del file["images"]
            file["images"] = np.zeros(3, np.uint8)
        elif how == "dataset":
            del file["coords"]
        elif how == "attribute":
            del file.attrs["tile_size"]
        elif how == "coords":
            del file["coords"]
            file["coords"] = np.zeros((2, 2), np.int64)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncate", "damaged"),
        ("text", "damaged or no HDF5"),
        ("missing", "missing"),
        ("offsets", "offsets must rise"),
        ("short", "images has shape"),
        ("dataset", "has no coords"),
        ("attribute", "tile_size"),
        ("coords", r"expected \(5, 2\)"),
    ],
)
def test_damaged_files_are_named(path, how, message):
    spoil(path, how)
    with pytest.raises(InputError, match=message) as raised:
        read_tiles(path)
    assert str(path) in str(raised.value)


def test_decode_refuses_half_an_image(pixels):
    for kind in ("PNG", "JPEG"):
        content = encode(np.tile(pixels[0], (8, 8, 1)), kind)
        with pytest.raises(InputError, match="cannot be decoded"):
            decode(content[: len(content) // 2])


def test_decode_gives_rgb_of_a_grey_image():
    grey = encode(np.arange(64, dtype=np.uint8).reshape(8, 8))
    assert decode(grey).shape == (8, 8, 3)


@pytest.mark.parametrize(("written", "expected"), [(None, 0.25), (0.2507, 0.2507), (0.0, math.nan), (math.nan,) * 2])
def test_the_scale_of_level_0_is_the_one_written_else_that_of_the_tiles(tmp_path, written, expected):
    attributes = {} if written is None else {"mpp_level0": written}
    write_tile_file(tmp_path / "a.h5", [b"x"], [[0, 0]], ["a"], **DESCRIPTION, attributes=attributes)
    assert read_tiles(tmp_path / "a.h5").mpp_level0 == pytest.approx(expected, nan_ok=True)
