import shutil

import h5py
import numpy as np
import pytest
from PIL import Image

from its2clr.cohort import examine, pack_images, tile_path


def found(findings, level):
    return [f"{one.where}: {one.message}" for one in findings if one.level == level]


def replace(path, name, values):
    with h5py.File(path, "r+") as file:
        del file[name]
        file[name] = values


def edit(name, old, new):
    def change(folder):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return change


def test_a_healthy_cohort_has_notes_and_the_small_validation_warning(cohort):
    findings = examine(cohort.path)
    assert found(findings, "error") == []
    warnings = found(findings, "warning")
    assert len(warnings) == 2
    assert "val has only 2 bags with label 0" in warnings[0]
    notes = "\n".join(found(findings, "note"))
    assert "train: 4 bags (2 positive, 2 negative), 14 instances, 2 groups" in notes
    assert "witness rate 0.250: 6 of 24 labelled instances" in notes


def break_image(folder):
    with h5py.File(tile_path(folder, "val-001"), "r+") as file:
        start, end = file["offsets"][1:3]
        file["images"][start + 8 : end] = 0


def cut(folder):
    path = tile_path(folder, "val-001")
    path.write_bytes(path.read_bytes()[:-200])


def swap_offsets(folder):
    with h5py.File(tile_path(folder, "val-001"), "r+") as file:
        file["offsets"][1:3] = file["offsets"][1:3][::-1]


def leak(folder):
    """The images of a training bag are put under a test bag of the same size."""
    target = tile_path(folder, "test-001")
    shutil.copy(tile_path(folder, "train-001"), target)
    with h5py.File(target, "r+") as file:
        file.attrs["bag_id"] = "test-001"


BROKEN = [
    ("no cohort", lambda f: (f / "cohort.json").unlink(), "is not a cohort"),
    ("incomplete", lambda f: (f / "bags.csv").unlink(), "bags.csv is missing"),
    ("no file", lambda f: tile_path(f, "val-001").unlink(), "val-001.h5: the tile file is missing"),
    ("no hdf5", lambda f: tile_path(f, "val-001").write_text("x"), "val-001.h5: cannot be read"),
    ("cut", cut, "val-001.h5: "),
    ("offsets", swap_offsets, "val-001.h5: offsets must rise"),
    ("image", break_image, "val-001.h5, image 1: the image cannot be decoded"),
    ("count", edit("bags.csv", "ward 0,2", "ward 0,9"), "train-000.h5: holds 2 images, bags.csv says 9"),
    (
        "size",
        edit("cohort.json", '"tile_size": 16', '"tile_size": 8'),
        "its tile size is 16, that of the cohort 8",
    ),
    (
        "bag",
        lambda f: shutil.copy(tile_path(f, "val-001"), tile_path(f, "val-003")),
        "belongs to bag 'val-001'",
    ),
    ("twice", edit("bags.csv", "train-001,", "train-000,"), "row 3: bag_id 'train-000' was already used"),
    ("label", edit("bags.csv", "train-001,1", "train-001,x"), "row 3: label is 'x'"),
    ("group", edit("bags.csv", "val,pval0", "val,ptrain0"), "row 6: group 'ptrain0' is in split 'val'"),
    (
        "positive in negative",
        edit("bags.csv", "train-001,1", "train-001,0"),
        "'train-001' is negative but 1 of",
    ),
    ("no positive", edit("bags.csv", "train-000,0", "train-000,1"), "'train-000' is positive but all"),
    ("leak", leak, "3 images are the same in train and test"),
    ("says labels", edit("cohort.json", "true", "false"), "cohort.json says there are no instance labels"),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_each_thing_that_is_wrong_is_an_error(cohort, change, message):
    change(cohort.path)
    errors = found(examine(cohort.path), "error")
    assert errors
    assert message in "\n".join(errors)


def test_split_without_a_class(cohort):
    text = (cohort.path / "bags.csv").read_text()
    lines = [line for line in text.splitlines() if not line.startswith(("val-001", "val-003"))]
    (cohort.path / "bags.csv").write_text("\n".join(lines))
    findings = examine(cohort.path)
    assert any("split 'val' has no bag with label 1" in message for message in found(findings, "error"))
    assert any("2 tile files belong to no bag" in message for message in found(findings, "warning"))


def test_unknown_instances_do_not_contradict_a_positive_bag(cohort):
    replace(tile_path(cohort.path, "train-001"), "labels", np.array([0, -1, 0], np.int8))
    assert found(examine(cohort.path), "error") == []


def test_without_decoding_structure_and_content_are_still_checked(cohort):
    break_image(cohort.path)
    assert "not those that were packed" in found(examine(cohort.path, decode=False), "error")[0]
    swap_offsets(cohort.path)
    assert "not those that were packed" not in found(examine(cohort.path, decode=False), "error")[0]


def test_images_of_another_size_are_found(cohort, make_picture, tmp_path):
    make_picture(7, size=20).save(tmp_path / "x.png")
    content = np.frombuffer((tmp_path / "x.png").read_bytes(), np.uint8)
    path = tile_path(cohort.path, "val-000")
    with h5py.File(path) as file:
        second = file["images"][file["offsets"][1] :]
    replace(path, "images", np.concatenate([content, second]))
    replace(path, "offsets", np.array([0, len(content), len(content) + len(second)]))
    assert any("image 0: is 20 x 20 pixels" in message for message in found(examine(cohort.path), "error"))


def test_flat_background_shared_between_splits_is_no_leak(source, tmp_path):
    for name in ("img/0000.png", "img/0020.png", "img/0040.png"):
        Image.new("RGB", (16, 16), (240, 240, 240)).save(source.folder / name)
    pack_images(source.manifest, tmp_path / "out", tile_size=16, encoding="png")
    assert found(examine(tmp_path / "out"), "error") == []


def test_left_out_images_and_unequal_bags_are_warnings(source, tmp_path, make_picture):
    (source.folder / "img/0000.png").write_text("x")
    with source.instances.open("a") as file:
        for i in range(100):
            make_picture(1000 + i).save(source.folder / f"img/more{i}.png")
            file.write(f"train-000,img/more{i}.png,0\n")
    pack_images(source.manifest, tmp_path / "out", tile_size=16, encoding="png")
    warnings = "\n".join(found(examine(tmp_path / "out"), "warning"))
    assert "problems.csv, row 2: bag 'train-000', img/0000.png: cannot be decoded" in warnings
    assert "bags are very unequal: 2 to 101 instances" in warnings


def test_a_manifest_is_examined(source):
    findings = examine(source.bags, instances=source.instances)
    assert found(findings, "error") == []
    assert any("witness rate 0.250" in message for message in found(findings, "note"))
    (source.folder / "img/0003.png").write_text("x")
    source.instances.write_text(source.instances.read_text().replace("img/0000.png,0", "img/0000.png,1"))
    findings = examine(source.bags, instances=source.instances)
    assert any("row 5" in m and "will be left out" in m for m in found(findings, "warning"))
    assert any("row 2: bag 'train-000' is negative but 1" in m for m in found(findings, "error"))
    source.bags.write_text(source.bags.read_text().replace("train-000,0", "train-000,x"))
    errors = found(examine(source.bags, instances=source.instances), "error")
    assert errors == [f"{source.bags}, row 2: label is 'x', expected 0 or 1"]
