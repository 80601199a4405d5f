import json
import subprocess
import sys

import h5py
import numpy as np
import pytest

from its2clr.cohort import Cohort, load_tiles, tile_path
from its2clr.errors import InputError


def test_instance_arrays_follow_the_bags(cohort):
    assert len(cohort) == 12
    assert cohort.name == "cohort"
    assert cohort.tile_size == 16
    assert cohort.n_instances == 42
    assert cohort.offsets().tolist()[:5] == [0, 2, 5, 9, 14]
    assert cohort.bag_index().tolist()[:6] == [0, 0, 1, 1, 1, 2]
    labels, names, coords = cohort.instance_labels(), cohort.names(), cohort.coords()
    assert (len(labels), len(names), coords.shape) == (42, 42, (42, 2))
    assert labels.dtype == np.int8
    starts = cohort.offsets()
    for row, bag_id in enumerate(cohort.bags["bag_id"].tolist()):
        tiles = cohort.tile_file(bag_id)
        part = slice(starts[row], starts[row + 1])
        assert labels[part].tolist() == tiles.labels.tolist()
        assert names[part] == tiles.names
        assert coords[part].tolist() == tiles.coords.tolist()
        assert set(cohort.bag_index()[part]) == {row}
    positive = cohort.bags["label"].to_numpy()[cohort.bag_index()]
    assert labels.sum() == 6
    assert (labels <= positive).all()


@pytest.mark.parametrize("workers", [1, 3, None])
def test_load_tiles_in_order(cohort, source, make_picture, workers):
    seen = []
    tiles = load_tiles(cohort, workers=workers, progress=lambda done, total: seen.append((done, total)))
    assert tiles.shape == (42, 3, 16, 16)
    assert tiles.dtype == np.uint8
    for name, tile in zip(cohort.names(), tiles, strict=True):
        number = int(name.removeprefix("img/").removesuffix(".png"))
        np.testing.assert_array_equal(tile, np.asarray(make_picture(number)).transpose(2, 0, 1))
    assert seen[-1] == (42, 42)


def test_load_tiles_of_a_part_into_a_given_array(cohort, monkeypatch):
    whole = load_tiles(cohort)
    monkeypatch.setattr("its2clr.cohort.cohort._LARGEST_PART", 2)  # bags are cut into parts
    part = cohort.split("val")
    out = np.zeros((14, 3, 16, 16), np.uint8)
    assert load_tiles(part, out=out) is out
    np.testing.assert_array_equal(out, whole[14:28])
    with pytest.raises(InputError, match="out must be uint8"):
        load_tiles(part, out=out[:3])


def test_load_tiles_names_the_image_that_is_wrong(cohort):
    path = tile_path(cohort.path, "val-002")
    with h5py.File(path, "r+") as file:
        start, end = file["offsets"][2:4]
        file["images"][start + 8 : end] = 0
    with pytest.raises(InputError, match=r"val-002\.h5, image 2: the image cannot be decoded"):
        load_tiles(cohort)
    small = cohort.path / "cohort.json"
    small.write_text(json.dumps({**json.loads(small.read_text()), "tile_size": 8}))
    with pytest.raises(InputError, match="image 0: is 16 x 16 pixels, the cohort's tiles are 8 x 8"):
        load_tiles(Cohort.open(cohort.path))


def test_restricted_cohorts_hold_nothing_else(cohort):
    train = cohort.split("train")
    assert set(train.bags["split"]) == {"train"}
    assert train.bags.index.tolist() == [0, 1, 2, 3]
    assert train.n_instances == 14
    seen = cohort.without_test()
    assert len(seen) == 8
    assert "test" not in seen.bags.to_csv()
    assert seen.n_instances == len(seen.instance_labels()) == 28
    with pytest.raises(InputError, match="'test-000' is not in this cohort"):
        seen.tile_file("test-000")
    with pytest.raises(InputError, match="no bags of split test"):
        seen.split("test")
    with pytest.raises(InputError, match="unknown split 'dev'"):
        cohort.split("dev")


def test_without_labels_no_label_can_be_reached(cohort):
    blind = cohort.without_labels()
    assert blind.bags.columns.tolist() == ["bag_id", "split", "group", "n_instances"]
    assert blind.bags["bag_id"].tolist() == cohort.bags["bag_id"].tolist()
    for part in (blind, blind.split("test"), blind.without_test()):
        assert not part.has_instance_labels
        assert "label" not in part.bags.columns
        with pytest.raises(InputError, match="out of reach"):
            part.instance_labels()
        tiles = part.tile_file(part.bags["bag_id"].tolist()[0])
        assert not tiles.has_labels
        with pytest.raises(InputError, match="out of reach"):
            tiles.labels  # noqa: B018
    np.testing.assert_array_equal(load_tiles(blind), load_tiles(cohort))
    assert cohort.has_instance_labels


def test_cohort_without_instance_labels_says_so(cohort):
    path = cohort.path / "cohort.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "has_instance_labels": False}))
    plain = Cohort.open(cohort.path)
    assert not plain.has_instance_labels
    with pytest.raises(InputError, match="has no instance labels"):
        plain.instance_labels()


def test_counts_that_differ_are_an_error(cohort):
    path = cohort.path / "bags.csv"
    path.write_text(path.read_text().replace("ward 0,2", "ward 0,3", 1))
    other = Cohort.open(cohort.path)
    calls = (other.coords, other.names, other.instance_labels, lambda: load_tiles(other))
    for call in (*calls, lambda: other.tile_file("train-000")):
        with pytest.raises(InputError, match=r"train-000\.h5: holds 2 images, bags\.csv says 3"):
            call()


def edit(name, old, new):
    def change(folder):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return change


BAD = [
    (
        "no info",
        lambda folder: (folder / "cohort.json").unlink(),
        r"is not a cohort \(it has no cohort\.json",
    ),
    (
        "no bags",
        lambda folder: (folder / "bags.csv").unlink(),
        r"bags\.csv is missing: the cohort is incomplete",
    ),
    ("no tiles", lambda folder: tile_path(folder, "val-002").unlink(), r"val-002\.h5: the tile file of bag"),
    ("broken info", lambda folder: (folder / "cohort.json").write_text("{"), r"cohort\.json: cannot be read"),
    (
        "incomplete info",
        edit("cohort.json", '"tile_size": 16,', ""),
        r"cohort\.json: tile_size: Field required",
    ),
    ("newer", edit("cohort.json", '"format": 1', '"format": 2'), r"format 2.*update its2clr"),
    ("label", edit("bags.csv", "train-001,1", "train-001,7"), r"bags\.csv, row 3: label is '7'"),
    ("count", edit("bags.csv", "ward 0,2", "ward 0,two"), r"bags\.csv, row 2: n_instances is 'two'"),
    (
        "twice",
        edit("bags.csv", "train-001,", "train-000,"),
        r"bags\.csv, row 3: bag_id 'train-000' was already",
    ),
    (
        "leak",
        edit("bags.csv", "val,pval0", "val,ptrain0"),
        r"bags\.csv, row 6: group 'ptrain0' is in split 'val'",
    ),
    ("column", edit("bags.csv", "split", "splits"), r"bags\.csv, row 1: column 'split' is missing"),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_what_is_no_cohort_is_refused(cohort, change, message):
    change(cohort.path)
    with pytest.raises(InputError, match=message) as raised:
        Cohort.open(cohort.path)
    assert str(cohort.path) in str(raised.value)


def test_paths_that_are_no_folder(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        Cohort.open(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        Cohort.open(str(tmp_path / "file"))


def test_importing_the_package_does_not_load_torch():
    code = "import sys, its2clr.cohort; sys.exit('torch' in sys.modules or 'sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
