"""What a cohort is: hashes that follow its content and nothing else, and are cheap to ask for again."""

import hashlib
import json
import os
import shutil

import h5py
import numpy as np
import pandas as pd
import pytest
from tests.viewer.viewer_runs import png, write_cohort

from its2clr.cohort import Cohort, examine, identity
from its2clr.cohort.identity import CONTENT_FILE, bag_contents, only_test_labels, recorded_contents, said_changes
from its2clr.cohort.layout import tile_path
from its2clr.cohort.tiles import read_content, written_content

BAGS = [f"bag {number}" for number in range(6)]  # 0 and 1 are train, 2 and 3 val, 4 and 5 test; odd ones positive


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settle(write_cohort(tmp_path / "cohort", BAGS))
    return tmp_path / "cohort"


def settle(folder):
    """Give the tile files a time that is long over, so that their hashes are kept."""
    for path in folder.glob("tiles/*.h5"):
        os.utime(path, ns=(10**18, 10**18))


def found(folder):
    return Cohort.open(folder).identity()


def edit(path, name, change):
    """Change data of a tile file behind the package's back."""
    with h5py.File(path, "r+") as file:
        file[name][...] = change(file[name][:])


def change_pixels(folder, bag_id):
    """Another picture in one tile, with as many bytes."""

    def other(images):
        images = images.copy()
        images[-20] ^= 1  # in the last tile
        return images

    edit(tile_path(folder, bag_id), "images", other)


def changed(folder, before):
    return [(change.what, change.bag_id) for change in found(folder).changes_since(before)]


def test_a_hash_is_of_all_that_a_tile_file_holds(folder):
    path = tile_path(folder, "bag 1")
    with h5py.File(path) as file:
        data = {name: file[name][:] for name in ("images", "offsets", "coords", "names", "labels")}
        names = ("encoding", "tile_size", "tile_size_level0", "mpp")
        facts = [(name, file.attrs[name].item() if name != "encoding" else file.attrs[name]) for name in names]
    text = repr(facts).encode()
    for name in ("images", "offsets", "coords"):
        text += f"\n{name} {data[name].shape}\n".encode() + data[name].tobytes()
    text += f"\nnames {data['names'].shape}\n".encode()
    text += b"".join(len(one).to_bytes(8, "little") + one for one in data["names"])
    assert read_content(path).tiles == hashlib.sha256(text).hexdigest()[:32]
    labels = f"\nlabels {data['labels'].shape}\n".encode() + data["labels"].tobytes()
    assert read_content(path).labels == hashlib.sha256(labels).hexdigest()[:32]


def test_large_data_is_hashed_piece_by_piece(folder, monkeypatch):
    whole = read_content(tile_path(folder, "bag 1"))
    monkeypatch.setattr("its2clr.cohort.tiles._BYTES_AT_ONCE", 48)
    assert read_content(tile_path(folder, "bag 1")) == whole


@pytest.mark.parametrize("name", ["images", "coords", "names"])
def test_every_part_of_the_tiles_counts(folder, name):
    before = found(folder)
    changes = {"coords": lambda places: places + 1, "names": lambda names: names[::-1]}
    if name == "images":
        change_pixels(folder, "bag 3")
    else:
        edit(tile_path(folder, "bag 3"), name, changes[name])
    assert changed(folder, before) == [("tiles", "bag 3")]
    assert found(folder).tiles != before.tiles


def test_labels_count_apart_from_tiles_and_only_where_they_are_visible(folder):
    before, unlabelled = found(folder), Cohort.open(folder).without_labels().identity()
    edit(tile_path(folder, "bag 5"), "labels", lambda labels: 1 - labels)
    bags = pd.read_csv(folder / "bags.csv", dtype=str)
    bags.loc[4, "label"] = "1"
    bags.to_csv(folder / "bags.csv", index=False)
    changes = found(folder).changes_since(before)
    assert [(change.what, change.bag_id) for change in changes] == [("labels", "bag 4"), ("labels", "bag 5")]
    assert only_test_labels(changes)
    assert found(folder).tiles == before.tiles
    assert found(folder).digest != before.digest
    assert Cohort.open(folder).without_labels().identity().digest == unlabelled.digest
    edit(tile_path(folder, "bag 3"), "labels", lambda labels: 1 - labels)
    assert not only_test_labels(found(folder).changes_since(before))  # a validation bag chooses models


def test_a_change_of_the_tables_is_named(folder):
    before = found(folder)
    bags = pd.read_csv(folder / "bags.csv", dtype=str)
    bags.loc[0, "split"], bags.loc[2, "group"] = "test", "another"
    bags.drop(index=5).to_csv(folder / "bags.csv", index=False)
    info = json.loads((folder / "cohort.json").read_text())
    info |= {"settings": {"label": "metastasis"}, "its2clr_version": "9.9"}
    (folder / "cohort.json").write_text(json.dumps(info))
    changes = found(folder).changes_since(before)
    assert said_changes(changes) == [
        "another settings of cohort.json",
        "not there any more: bag bag 5",
        "another split: bag bag 0",
        "another group: bag bag 2",
    ]
    assert not only_test_labels(changes)


def test_the_order_of_bags_counts_and_other_columns_do_not(folder):
    before = found(folder)
    bags = pd.read_csv(folder / "bags.csv", dtype=str)
    bags.assign(scanner="b").to_csv(folder / "bags.csv", index=False)
    assert changed(folder, before) == []
    assert found(folder).digest == before.digest
    bags.iloc[::-1].to_csv(folder / "bags.csv", index=False)
    assert changed(folder, before) == [("order", "")]
    assert found(folder).digest != before.digest


def test_files_whose_stamp_stays_are_not_read_again(folder, monkeypatch):
    before = found(folder)
    monkeypatch.setattr(identity, "read_content", None)
    assert found(folder).digest == before.digest
    os.utime(tile_path(folder, "bag 2"))
    with pytest.raises(TypeError):
        found(folder)


def test_a_file_that_was_just_written_is_read_again(folder):
    change_pixels(folder, "bag 2")
    found(folder)
    assert "bag 2" not in json.loads((folder / CONTENT_FILE).read_text())["bags"]  # it may change within this tick
    assert "bag 3" in json.loads((folder / CONTENT_FILE).read_text())["bags"]


def test_a_copy_is_the_same_cohort(folder, tmp_path, monkeypatch):
    before = found(folder)
    shutil.copytree(folder, tmp_path / "copy")
    settle(tmp_path / "copy")
    assert found(tmp_path / "copy").digest == before.digest
    monkeypatch.setattr(identity, "read_content", None)
    assert found(tmp_path / "copy").digest == before.digest  # and its hashes are kept


def test_a_folder_that_cannot_be_written_is_hashed_once(folder, tmp_path, monkeypatch):
    write = identity.write_json

    def write_elsewhere(path, value):
        if path.parent == folder:
            raise PermissionError("read only")
        write(path, value)

    monkeypatch.setattr(identity, "write_json", write_elsewhere)
    before = found(folder)
    assert not (folder / CONTENT_FILE).exists()
    assert len(list((tmp_path / "cache" / "its2clr").iterdir())) == 1
    monkeypatch.setattr(identity, "read_content", None)
    assert found(folder).digest == before.digest


def test_hashes_that_cannot_be_kept_anywhere_are_no_error(folder, monkeypatch):
    def fail(path, value):
        raise PermissionError("read only")

    monkeypatch.setattr(identity, "write_json", fail)
    assert found(folder).digest == found(folder).digest


@pytest.mark.parametrize("content", ["{", "[]", '{"bags": {"bag 0": [1, 2]}}', '{"bags": 3}'])
def test_damaged_notes_are_as_good_as_none(folder, content):
    before = found(folder)
    (folder / CONTENT_FILE).write_text(content)
    assert found(folder).digest == before.digest


def test_a_cohort_of_an_older_version_has_an_identity_too(folder):
    before = found(folder)
    for path in folder.glob("tiles/*.h5"):
        with h5py.File(path, "r+") as file:
            for name in ("content_tiles", "content_labels"):
                del file.attrs[name]
        assert written_content(path) is None
    assert found(folder).digest == before.digest
    assert not any("packed" in finding.message for finding in examine(folder))


def test_the_doctor_finds_what_the_stamp_hides(folder):
    found(folder)
    assert not [finding for finding in examine(folder) if "packed" in finding.message]
    change_pixels(folder, "bag 2")
    edit(tile_path(folder, "bag 5"), "labels", lambda labels: 0 * labels)
    settle(folder)
    assert bag_contents(folder, BAGS)["bag 2"] == written_content(
        tile_path(folder, "bag 2")
    )  # the cheap look is fooled
    said = [(one.level, one.where) for one in examine(folder) if "packed" in one.message or "touch" in one.message]
    bags = [str(tile_path(folder, name)) for name in ("bag 2", "bag 5")]
    assert sorted(said) == [("error", bags[0]), ("error", bags[0]), ("error", bags[1]), ("warning", bags[1])]


def test_ten_thousand_bags_are_compared_in_a_moment(folder):
    before = found(folder)
    bags = tuple(before.bags[0]._replace(bag_id=f"bag {number:05d}") for number in range(10_000))
    large = identity.Identity(before.info, bags)
    again = identity.Identity.from_dict(json.loads(json.dumps(large.as_dict())))
    assert again.digest == large.digest
    assert again.changes_since(large) == []
    other = identity.Identity(before.info, (*bags[:-1], bags[-1]._replace(tiles="other")))
    assert said_changes(other.changes_since(large)) == ["other tiles: bag bag 09999"]


def test_packing_keeps_the_hashes_and_packs_edited_bags_again(tmp_path):
    from its2clr.cohort import pack_images, read_manifest

    rows = ["bag_id,label,split,path"]
    for number, split in enumerate(("train", "train", "val", "val", "test", "test")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "one.png").write_bytes(png((30 * number, 9, 200), 8))
        rows.append(f"bag {number},{number % 2},{split},{number}")
    (tmp_path / "bags.csv").write_text("\n".join(rows))

    def pack():
        return pack_images(read_manifest(tmp_path / "bags.csv"), tmp_path / "cohort", tile_size=8, workers=1)

    pack()
    settle(tmp_path / "cohort")
    assert pack().n_packed == 0
    assert recorded_contents(tmp_path / "cohort").keys() == set(BAGS)
    before = found(tmp_path / "cohort")
    edit(tile_path(tmp_path / "cohort", "bag 3"), "coords", lambda places: places + 1)
    assert changed(tmp_path / "cohort", before) == [("tiles", "bag 3")]
    assert pack().n_packed == 1
    assert changed(tmp_path / "cohort", before) == []
    np.testing.assert_array_equal(Cohort.open(tmp_path / "cohort").tile_file("bag 3").coords, [[0, 0]])
