"""Bags without labels: read, packed, opened and examined, and no label reachable anywhere."""

import json
import shutil

import h5py
import numpy as np
import pytest

from its2clr.cohort import (
    Cohort,
    CohortInfo,
    check_manifest,
    examine,
    load_tiles,
    pack_images,
    read_manifest,
    read_tiles,
    tile_path,
)
from its2clr.cohort import images as images_module
from its2clr.errors import InputError

BAGS = "bag_id,site\nn1,ward\nn2,ward\nn3,lab\n"
INSTANCES = "bag_id,file\n" + "".join(f"n{bag},img/{3 * bag + i}.png\n" for bag in (1, 2, 3) for i in range(bag))


class Patients:
    """Three new patients of one, two and three images; a table of bags and one of instances."""

    def __init__(self, folder, make_picture):
        (folder / "img").mkdir(parents=True)
        for number in range(3, 12):
            make_picture(number).save(folder / "img" / f"{number}.png")
        self.bags, self.instances = folder / "bags.csv", folder / "instances.csv"
        self.write()

    def write(self, bags=BAGS, instances=INSTANCES):
        self.bags.write_text(bags)
        self.instances.write_text(instances)

    def read(self, **options):
        return read_manifest(self.bags, self.instances, **{"labelled": False, **options})

    def pack(self, out, **options):
        return pack_images(self.read(), out, **{"tile_size": 16, "encoding": "png", "workers": 2, **options})


@pytest.fixture
def patients(tmp_path, make_picture):
    return Patients(tmp_path / "new", make_picture)


@pytest.fixture
def unlabelled(patients, tmp_path):
    patients.pack(tmp_path / "unlabelled")
    return Cohort.open(tmp_path / "unlabelled")


@pytest.fixture
def folders(tmp_path, make_picture):
    for number in (1, 2, 3):
        (tmp_path / f"n{number}").mkdir()
        make_picture(number).save(tmp_path / f"n{number}" / "a.png")
    (tmp_path / "folders.csv").write_text("bag_id,path\nn1,n1\nn2,n2\nn3,n3\n")
    return tmp_path / "folders.csv"


def found(findings, level):
    return [f"{one.where}: {one.message}" for one in findings if one.level == level]


def test_a_manifest_needs_identifiers_alone(patients):
    manifest = patients.read()
    assert not manifest.labelled
    assert not manifest.has_instance_labels
    assert manifest.bags.columns.tolist() == ["bag_id", "split", "group", "site"]
    assert manifest.bags["split"].tolist() == ["test"] * 3
    assert manifest.bags["group"].tolist() == ["n1", "n2", "n3"]
    assert manifest.bags.index.tolist() == [2, 3, 4]
    assert set(manifest.instances["label"]) == {-1}


def test_a_manifest_of_folders_needs_no_more(folders):
    manifest = read_manifest(folders, labelled=False)
    assert manifest.bags.columns.tolist() == ["bag_id", "split", "group"]
    assert manifest.instances["name"].tolist() == ["a.png"] * 3


def test_labels_and_splits_that_are_there_are_ignored(patients):
    patients.write(
        "bag_id,label,patient,split\nn1,benign?,p1,train\nn2,,p2,nowhere\nn3,1,p2,\n",
        INSTANCES.replace("\n", ",maybe\n").replace("file,maybe", "file,label"),
    )
    manifest = patients.read()
    assert manifest.bags.columns.tolist() == ["bag_id", "split", "group"]
    assert manifest.bags["split"].tolist() == ["test"] * 3
    assert manifest.bags["group"].tolist() == ["p1", "p2", "p2"]
    assert not manifest.has_instance_labels


BAD_BAGS = [
    ("no identifiers", BAGS.replace("bag_id", "bag"), 1, "column 'bag_id' is missing.*did you mean 'bag'"),
    ("empty", BAGS.replace("n2,", ","), 3, "bag_id is empty"),
    ("twice", BAGS.replace("n2", "n1"), 3, "bag_id 'n1' was already used in row 2"),
    ("too long", BAGS.replace("n2", "n" * 300), 3, "is too long to name a file"),
    ("group", "bag_id,group\nn1,p\nn2,\nn3,p\n", 3, "group is empty while other rows have one"),
    ("no instances", BAGS + "n4,lab\n", 5, "bag 'n4' has no instances in "),
    ("more cells", BAGS.replace("n2,ward", "n2,ward,x"), 3, "3 values under 2 columns"),
]


@pytest.mark.parametrize(
    ("bags", "row", "message"), [case[1:] for case in BAD_BAGS], ids=[case[0] for case in BAD_BAGS]
)
def test_wrong_bags_are_still_named_by_file_and_row(patients, bags, row, message):
    patients.write(bags=bags)
    with pytest.raises(InputError, match=message) as raised:
        patients.read()
    assert f"{patients.bags}, row {row}: " in str(raised.value)


BAD_INSTANCES = [
    ("no files", INSTANCES.replace("file", "filename"), 1, "column 'file' is missing"),
    ("unknown bag", INSTANCES + "zz,img/3.png\n", 8, "bag_id 'zz' is not in "),
    ("empty bag", INSTANCES + ",img/3.png\n", 8, "bag_id is empty"),
    ("empty file", INSTANCES + "n1,\n", 8, "file is empty"),
    ("wrong root", INSTANCES.replace("img/", "pictures/"), 2, "none of the files exist"),
]


@pytest.mark.parametrize(
    ("instances", "row", "message"), [case[1:] for case in BAD_INSTANCES], ids=[case[0] for case in BAD_INSTANCES]
)
def test_wrong_instances_are_still_named_by_file_and_row(patients, instances, row, message):
    patients.write(instances=instances)
    with pytest.raises(InputError, match=message) as raised:
        patients.read()
    assert f"{patients.instances}, row {row}: " in str(raised.value)


def test_wrong_folders_are_still_named_by_row(folders):
    shutil.rmtree(folders.parent / "n1")
    (folders.parent / "n2" / "a.png").unlink()
    folders.write_text(folders.read_text().replace("n3,n3", "n3,"))
    manifest, problems = check_manifest(folders, labelled=False)
    messages = {problem.where: problem.message for problem in problems}
    assert manifest is None
    assert "does not exist" in messages[f"{folders}, row 2"]
    assert "bag 'n2' has no images" in messages[f"{folders}, row 3"]
    assert "path is empty" in messages[f"{folders}, row 4"]


@pytest.mark.parametrize(
    ("bags", "message"),
    [("bag_id,site\n", "no bags below the header"), ("", "first row must name the columns")],
)
def test_whole_file_problems_still_name_the_file(patients, bags, message):
    patients.write(bags=bags)
    with pytest.raises(InputError, match=message) as raised:
        patients.read()
    assert str(patients.bags) in str(raised.value)


def test_a_table_of_bags_alone_is_explained(patients):
    with pytest.raises(InputError, match=r"row 1: column 'path' is missing.*give a table of instances"):
        read_manifest(patients.bags, labelled=False)


def test_a_missing_label_column_leads_to_the_flag(patients, folders):
    with pytest.raises(InputError, match=r"row 1: column 'label' is missing.*packed with --unlabelled"):
        patients.read(labelled=True)
    (error,) = found(examine(folders), "error")
    assert "--unlabelled" in error
    patients.write(bags="bag,label\n")
    with pytest.raises(InputError) as raised:
        patients.read(labelled=True)
    assert "--unlabelled" not in str(raised.value)


def test_round_trip(unlabelled, patients, make_picture):
    header = (unlabelled.path / "bags.csv").read_text().splitlines()[0]
    assert header == "bag_id,split,group,site,n_instances"
    info = json.loads((unlabelled.path / "cohort.json").read_text())
    assert info["labelled"] is False
    assert info["has_instance_labels"] is False
    assert not unlabelled.is_labelled
    assert unlabelled.bags.columns.tolist() == ["bag_id", "split", "group", "n_instances", "site"]
    assert unlabelled.bags["bag_id"].tolist() == ["n1", "n2", "n3"]
    assert unlabelled.bags["n_instances"].dtype == np.int64
    assert unlabelled.offsets().tolist() == [0, 1, 3, 6]
    assert unlabelled.bag_index().tolist() == [0, 1, 1, 2, 2, 2]
    assert unlabelled.coords().shape == (6, 2)
    tiles = load_tiles(unlabelled)
    for name, tile in zip(unlabelled.names(), tiles, strict=True):
        number = int(name.removeprefix("img/").removesuffix(".png"))
        np.testing.assert_array_equal(tile, np.asarray(make_picture(number)).transpose(2, 0, 1))
    np.testing.assert_array_equal(load_tiles(unlabelled.split("test")), tiles)
    assert len(unlabelled.tile_file("n3")) == 3


def test_there_is_nothing_to_train_with(unlabelled):
    for ask in (unlabelled.without_test, lambda: unlabelled.split("train"), lambda: unlabelled.split("val")):
        with pytest.raises(InputError, match=r"no bags of split .* here \(only test\)"):
            ask()


def expect_no_label(cohort):
    assert not cohort.labels_visible
    assert not cohort.is_labelled
    assert not cohort.has_instance_labels
    assert "label" not in cohort.bags.columns
    with pytest.raises(InputError, match="out of reach"):
        cohort.instance_labels()
    tiles = cohort.tile_file("n2")
    assert not tiles.has_labels
    with pytest.raises(InputError, match="out of reach"):
        tiles.labels  # noqa: B018


def test_no_label_can_be_reached(unlabelled):
    for cohort in (unlabelled, unlabelled.split("test"), unlabelled.without_labels()):
        expect_no_label(cohort)


def test_ignored_labels_are_not_written_either(patients, tmp_path):
    patients.write(
        "bag_id,label,split\nn1,0,train\nn2,1,val\nn3,1,test\n",
        INSTANCES.replace("\n", ",1\n").replace("file,1", "file,label"),
    )
    patients.pack(tmp_path / "out")
    cohort = Cohort.open(tmp_path / "out")
    expect_no_label(cohort)
    assert cohort.bags["split"].tolist() == ["test"] * 3
    assert (tmp_path / "out" / "bags.csv").read_text().splitlines()[0] == "bag_id,split,group,n_instances"
    assert [read_tiles(path).labels for path in (tmp_path / "out" / "tiles").iterdir()] == [None] * 3


def test_labels_put_there_afterwards_stay_out_of_reach(unlabelled):
    with h5py.File(tile_path(unlabelled.path, "n2"), "r+") as file:
        file["labels"] = np.array([0, 1], np.int8)
    expect_no_label(Cohort.open(unlabelled.path))
    assert any(
        "cohort.json says there are no instance labels" in one for one in found(examine(unlabelled.path), "error")
    )
    path = unlabelled.path / "bags.csv"
    path.write_text(path.read_text().replace("site", "label"))
    with pytest.raises(InputError, match=r"bags\.csv, row 1: column 'label' in a cohort that was packed without"):
        Cohort.open(unlabelled.path)
    assert any("row 1: column 'label'" in one for one in found(examine(unlabelled.path), "error"))


def test_cohorts_of_before_are_labelled(cohort):
    path = cohort.path / "cohort.json"
    info = json.loads(path.read_text())
    assert info.pop("labelled") is True
    path.write_text(json.dumps(info))
    again = Cohort.open(cohort.path)
    assert again.is_labelled
    assert again.labels_visible
    assert again.bags["label"].tolist() == cohort.bags["label"].tolist()
    assert again.without_labels().is_labelled
    assert CohortInfo(tile_size=1, encoding="png").labelled


def test_a_labelled_cohort_still_needs_its_label_column(cohort):
    path = cohort.path / "bags.csv"
    path.write_text(path.read_text().replace("label", "lable", 1))
    with pytest.raises(InputError, match=r"bags\.csv, row 1: column 'label' is missing") as raised:
        Cohort.open(cohort.path)
    assert "--unlabelled" not in str(raised.value)


def test_again_skips_what_is_there(patients, unlabelled):
    bags = (unlabelled.path / "bags.csv").read_text()
    summary = patients.pack(unlabelled.path)
    assert (summary.n_bags, summary.n_packed, summary.n_skipped) == (3, 0, 3)
    assert (unlabelled.path / "bags.csv").read_text() == bags
    # which bags are train is no question here, so neither are the settings that would answer it
    assert patients.pack(unlabelled.path, seed=5, fractions=(0.8, 0.1, 0.1)).n_skipped == 3


def test_stopped_half_way_goes_on(patients, tmp_path, monkeypatch):
    real, calls = images_module.write_tile_file, []

    def stops_at_the_third(*args, **kwargs):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(args[0])
        real(*args, **kwargs)

    monkeypatch.setattr(images_module, "write_tile_file", stops_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        patients.pack(tmp_path / "out", workers=1)
    with pytest.raises(InputError, match="incomplete"):
        Cohort.open(tmp_path / "out")
    monkeypatch.setattr(images_module, "write_tile_file", real)
    summary = patients.pack(tmp_path / "out", workers=1)
    assert (summary.n_packed, summary.n_skipped) == (1, 2)
    expect_no_label(Cohort.open(tmp_path / "out"))


def content_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("has_splits", [True, False])
def test_labels_neither_come_nor_go(source, tmp_path, first, has_splits):
    if not has_splits:
        source.bags.write_text(source.bags.read_text().replace("split", "part", 1))

    def pack(labelled):
        manifest = read_manifest(source.bags, source.instances, labelled=labelled)
        pack_images(manifest, tmp_path / "out", tile_size=16, encoding="png", workers=2)

    pack(first)
    before = content_of(tmp_path / "out")
    with pytest.raises(InputError, match=f"labelled: {first} there, {not first} asked for"):
        pack(not first)
    assert content_of(tmp_path / "out") == before
    assert Cohort.open(tmp_path / "out").is_labelled is first


def test_a_bag_without_usable_images_is_left_out(patients, tmp_path):
    (patients.bags.parent / "img" / "3.png").write_text("x")
    out = tmp_path / "out"
    assert patients.pack(out).bags_left_out == ("n1",)
    assert Cohort.open(out).bags["bag_id"].tolist() == ["n2", "n3"]
    assert any("whole bag was left out" in one for one in found(examine(out), "warning"))
    for image in (patients.bags.parent / "img").iterdir():
        image.write_text("x")
    with pytest.raises(InputError, match=r"after leaving out 3 bags.*no bag is left"):
        patients.pack(out)
    assert not (out / "bags.csv").exists()


def test_a_healthy_cohort_is_examined(unlabelled):
    findings = examine(unlabelled.path)
    assert found(findings, "error") == found(findings, "warning") == []
    notes = "\n".join(found(findings, "note"))
    assert "bags have no labels" in notes
    assert "test: 3 bags, 6 instances, 3 groups" in notes
    assert "witness" not in notes


def test_what_is_wrong_in_a_cohort_is_still_an_error(unlabelled):
    with h5py.File(tile_path(unlabelled.path, "n2"), "r+") as file:
        start, end = file["offsets"][1:3]
        file["images"][start + 8 : end] = 0
    tile_path(unlabelled.path, "n1").unlink()
    errors = "\n".join(found(examine(unlabelled.path), "error"))
    assert "n1.h5: the tile file is missing" in errors
    assert "n2.h5, image 1: the image cannot be decoded" in errors


def test_a_manifest_is_examined(patients, folders):
    findings = examine(patients.bags, instances=patients.instances, labelled=False)
    assert found(findings, "error") == found(findings, "warning") == []
    notes = "\n".join(found(findings, "note"))
    assert "bags have no labels" in notes
    assert "test: 3 bags, 6 instances, 3 groups" in notes
    assert "assigned" not in notes
    (patients.bags.parent / "img" / "3.png").write_text("x")
    (warning,) = found(examine(patients.bags, instances=patients.instances, labelled=False), "warning")
    assert f"{patients.instances}, row 2: " in warning
    assert found(examine(folders, labelled=False), "error") == []
    patients.write(bags=BAGS.replace("n2", "n1"))
    errors = found(examine(patients.bags, instances=patients.instances, labelled=False), "error")
    assert any("row 3: bag_id 'n1' was already used in row 2" in error for error in errors)
