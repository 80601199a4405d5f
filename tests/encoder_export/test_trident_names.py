"""Folders of exported features are named as TRIDENT names them, and no number is made up."""

from pathlib import Path

import h5py
import numpy as np
import pytest
from tests.cohort.feature_files import clam, grid, stamp, trident

from its2clr.cohort import Cohort
from its2clr.cohort.features.feature_cohort import pack_features
from its2clr.cohort.features.feature_manifest import read_feature_manifest
from its2clr.encoder_export import export_encoder
from its2clr.encoder_export.trident import tiling_name, write_trident
from its2clr.run.feature_cohorts import pack_run_features
from its2clr.run.features import open_run_features
from its2clr.run.opening import open_run

COORDS = grid(4, 3)
FEATURES = np.random.default_rng(0).normal(size=(len(COORDS), 8)).astype(np.float32)
BAGS = [("a", 0, "train"), ("b", 1, "train"), ("c", 0, "val"), ("d", 1, "val"), ("e", 0, "test"), ("f", 1, "test")]


def make_cohort(folder: Path, *writers, mpps: tuple[str, ...] = ("",)) -> Cohort:
    """A cohort of features; writers and scales of level 0 take turns."""
    rows = ["bag_id,label,split,mpp"]
    for number, (bag, label, split) in enumerate(BAGS):
        writers[number % len(writers)](folder / "features" / f"{bag}.h5", FEATURES, COORDS)
        rows.append(f"{bag},{label},{split},{mpps[number % len(mpps)]}")
    (folder / "labels.csv").write_text("\n".join(rows))
    pack_features(read_feature_manifest(folder / "labels.csv", folder / "features"), folder / "cohort", workers=1)
    return Cohort.open(folder / "cohort")


def trident_at(magnification: float, overlap: int = 0):
    return lambda path, features, coords: trident(path, features, coords, magnification=magnification, overlap=overlap)


def clam_file(path: Path, features, coords) -> None:
    clam(path, features, coords, patches=path.parent / "patches")


def bare_clam_file(path: Path, features, coords) -> None:
    clam(path, features, coords, patches=None)


@pytest.mark.parametrize(
    ("writers", "mpps", "name", "said"),
    [
        ([trident_at(10)], ("",), "10x_32px_0px_overlap", []),
        ([trident_at(2.5, 8)], ("",), "2.5x_32px_8px_overlap", []),
        ([trident_at(10)], ("0.5047", "0.4931"), "10x_32px_0px_overlap", []),  # what the files say goes first
        ([clam_file], ("0.1262", "0.1240"), "20x_16px_0px_overlap", []),  # two scanners, one objective
        ([clam_file], ("0.125",), "20x_16px_0px_overlap", []),
        ([clam_file], ("0.16",), "15.625x_16px_0px_overlap", []),
        ([stamp], ("",), "70x_224px_0px_overlap", []),
        ([clam_file], ("",), "16px_0px_overlap", ["no magnification: the cohort does not know the scale"]),
        ([clam_file], ("0.125", ""), "16px_0px_overlap", ["no magnification: the cohort does not know the scale"]),
        ([clam_file], ("0.125", "0.25"), "16px_0px_overlap", ["no magnification: bags differ, from 10x to 20x"]),
        ([trident_at(10), trident_at(10, 8)], ("",), "10x_32px", ["no overlap: neighbouring tiles share 0, 8 px"]),
        ([bare_clam_file], ("1.0",), "10x_64px", ["no overlap: the cohort does not know how far"]),
        (
            [trident_at(10, 4), bare_clam_file, trident_at(10, 8)],
            ("", ""),
            "unknown_tiling",
            ["no magnification: the cohort", "no size: tiles of 32, 64 px", "no overlap: neighbouring tiles share 4,"],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_cohort_of_features_is_named_as_far_as_it_is_known(tmp_path, writers, mpps, name, said):
    found, notes = tiling_name(make_cohort(tmp_path, *writers, mpps=mpps))
    assert found == name
    assert len(notes) == len(said)
    for note, start in zip(notes, said, strict=True):
        assert note.startswith(start)


def test_tridents_own_files_come_back_as_they_were(tmp_path):
    cohort = make_cohort(tmp_path, trident_at(10, 8))
    base, notes = write_trident(tmp_path / "out", cohort, "start", lambda part: np.ones((part.n_instances, 8)))
    assert (base.name, notes) == ("10x_32px_8px_overlap", ())
    with h5py.File(tmp_path / "features" / "a.h5") as given, h5py.File(base / "features_start" / "a.h5") as made:
        for key in ("patch_size", "patch_size_level0", "level0_magnification", "target_magnification", "overlap"):
            assert made["coords"].attrs[key] == given["coords"].attrs[key], key
        assert np.array_equal(made["coords"][()], given["coords"][()])


def test_features_of_a_run_keep_the_tiling_of_its_tiles(evaluated_run, tiny_cohort, tmp_path):
    pack_run_features(open_run_features(evaluated_run, quiet=True), "start", tmp_path / "own")
    assert tiling_name(Cohort.open(tmp_path / "own")) == tiling_name(Cohort.open(tiny_cohort))


def test_the_command_and_the_card_say_what_the_name_does_not(tmp_path, capsys):
    cohort = make_cohort(tmp_path, clam_file)
    settings = ["aggregator.name=max", "refine.epochs=1", "refine.warmup_epochs=0", "refine.aggregator_seeds=1"]
    open_run(tmp_path / "run", cohort.path, None, settings, quiet=True).pretrain()
    export_encoder(tmp_path / "run", tmp_path / "out", "start", ["features"], quiet=False)
    assert (tmp_path / "out" / "16px_0px_overlap" / "features_start" / "a.h5").is_file()
    said = "no magnification: the cohort does not know the scale (mpp) of all its tiles"
    assert said in " ".join(capsys.readouterr().out.split())
    assert f"Its name has {said}." in (tmp_path / "out" / "README.md").read_text()
