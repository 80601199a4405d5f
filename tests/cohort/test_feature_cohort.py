"""Features of TRIDENT, CLAM and STAMP become a cohort, with every tile at its place."""

import math
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from tests.cohort.feature_files import MPP, TILE, clam, grid, stamp, trident

from its2clr.cohort import Cohort, examine, load_tiles
from its2clr.cohort.features.feature_cohort import pack_features
from its2clr.cohort.features.feature_file import FeatureFile, write_feature_file
from its2clr.cohort.features.feature_manifest import read_feature_manifest
from its2clr.cohort.features.layouts import PlacedFeatures, read_foreign_features, read_header
from its2clr.cohort.features.tile_grids import FeatureProblem
from its2clr.errors import InputError

COORDS = grid(4, 3)


@pytest.fixture
def features() -> NDArray[np.float32]:
    return np.random.default_rng(0).normal(size=(len(COORDS), 8)).astype(np.float32)


def check_places(found: PlacedFeatures, mpp: float = MPP) -> None:
    np.testing.assert_array_equal(found.coords, COORDS)
    assert found.tile_size_level0 == TILE
    assert found.mpp_level0 == pytest.approx(mpp, nan_ok=True)


@pytest.mark.parametrize("batched", [False, True])
def test_trident(tmp_path: Path, features: NDArray[np.float32], batched: bool) -> None:
    trident(tmp_path / "a.h5", features, COORDS, batched=batched)
    found = read_foreign_features(tmp_path / "a.h5")
    assert (found.layout, found.tile_size) == ("TRIDENT", 32)
    check_places(found)  # 20x is 0.5 um/px
    np.testing.assert_array_equal(found.features, features)


@pytest.mark.parametrize("pt", [False, True])
def test_clam(tmp_path: Path, features: NDArray[np.float32], pt: bool) -> None:
    path = tmp_path / "features" / ("pt_files/a.pt" if pt else "h5_files/a.h5")
    clam(path, features, COORDS, patches=tmp_path / "features" / "patches", pt=pt)
    found = read_foreign_features(path)
    assert (found.layout, found.tile_size, found.notes) == ("CLAM", 16, ())
    check_places(found, math.nan)  # 16 px at a level four times coarser are 64 px at level 0
    np.testing.assert_array_equal(found.features, features)


def test_clam_with_patches_elsewhere_or_nowhere(tmp_path: Path, features: NDArray[np.float32]) -> None:
    clam(tmp_path / "f" / "a.pt", features, COORDS, patches=tmp_path / "elsewhere" / "patches", pt=True)
    with pytest.raises(FeatureProblem, match=r"without coordinates.*--coords"):
        read_foreign_features(tmp_path / "f" / "a.pt")
    check_places(read_foreign_features(tmp_path / "f" / "a.pt", coords=tmp_path / "elsewhere"), math.nan)
    clam(tmp_path / "g" / "a.h5", features, COORDS, patches=None)
    found = read_foreign_features(tmp_path / "g" / "a.h5")
    check_places(found, math.nan)
    assert "distance of neighbours" in found.notes[0]


@pytest.mark.parametrize("version", ["2.1", "2.0"])
def test_stamp(tmp_path: Path, features: NDArray[np.float32], version: str) -> None:
    stamp(tmp_path / "a.h5", features, COORDS, version)
    found = read_foreign_features(tmp_path / "a.h5", mpp=MPP)
    assert (found.layout, found.tile_size, found.extractor) == ("STAMP", 224, "ctranspath")
    check_places(found)
    np.testing.assert_allclose(found.features, features, rtol=1e-3)
    unscaled = read_foreign_features(tmp_path / "a.h5")
    np.testing.assert_array_equal(unscaled.coords, COORDS * MPP)  # micrometres
    assert (unscaled.tile_size_level0, unscaled.mpp_level0) == (TILE * MPP, 1.0)
    assert "micrometres" in unscaled.notes[-1]


def test_historic_stamp(tmp_path: Path, features: NDArray[np.float32]) -> None:
    stamp(tmp_path / "a.h5", features, COORDS, "1")  # tiles of 256 um, so 64 px of level 0 are 4 um/px
    found = read_foreign_features(tmp_path / "a.h5", mpp=4.0)
    check_places(found, 4.0)
    assert "before STAMP 2" in found.notes[0]


def test_our_own(tmp_path: Path, features: NDArray[np.float32]) -> None:
    file = FeatureFile(features, COORDS, "resnet18 simclr 0123")
    write_feature_file(tmp_path / "a.h5", file, bag_id="a", tile_size=32, tile_size_level0=TILE, mpp=2 * MPP)
    found = read_foreign_features(tmp_path / "a.h5")
    assert (found.layout, found.extractor) == ("its2clr", "resnet18 simclr 0123")
    check_places(found)


def test_overlap_and_magnification_are_said_or_measured(tmp_path: Path, features: NDArray[np.float32]) -> None:
    denser = COORDS - (COORDS // TILE) * 16  # 48 px from tile to tile of 64
    trident(tmp_path / "trident.h5", features, COORDS, magnification=5, overlap=8)
    clam(tmp_path / "clam" / "a.h5", features, denser, patches=tmp_path / "clam" / "patches")
    clam(tmp_path / "bare" / "a.h5", features, denser, patches=None)
    clam(tmp_path / "lone" / "a.h5", features[:1], COORDS[:1], patches=tmp_path / "lone" / "patches")
    stamp(tmp_path / "stamp.h5", features, COORDS)
    file = FeatureFile(features, COORDS, "resnet18")
    write_feature_file(
        tmp_path / "own.h5", file, bag_id="a", tile_size=32, tile_size_level0=TILE, mpp=2 * MPP, overlap=4
    )
    expected = {
        "trident.h5": (5.0, 8),
        "clam/a.h5": (None, 4),  # 16 of 64 px at level 0, in tiles of 16 px
        "bare/a.h5": (None, None),  # its tiles are only taken to be as wide as their distance
        "lone/a.h5": (None, None),
        "stamp.h5": (70.0, 0),  # 32 um of 224 px
        "own.h5": (None, 4),  # it says its mpp
    }
    for name, wanted in expected.items():
        found = read_foreign_features(tmp_path / name)
        assert (found.magnification, found.overlap) == wanted, name


def test_what_cannot_be_used_says_why(tmp_path: Path, features: NDArray[np.float32]) -> None:
    def refused(name: str, said: str) -> None:
        with pytest.raises(FeatureProblem, match=said):
            read_foreign_features(tmp_path / name)

    broken = features.copy()
    broken[3, 2] = np.nan
    trident(tmp_path / "nan.h5", broken, COORDS)
    refused("nan.h5", "1 of 12 rows have features that are not finite")
    trident(tmp_path / "short.h5", features, COORDS[:-1])
    refused("short.h5", "12 rows of features, but 11 coordinates")
    trident(tmp_path / "empty.h5", features[:0], COORDS[:0])
    refused("empty.h5", "holds no instances")
    (tmp_path / "text.h5").write_text("no HDF5")
    refused("text.h5", "damaged or no HDF5 file")
    refused("missing.h5", "does not exist")
    with h5py.File(tmp_path / "slide.h5", "w") as h5:
        h5["feats"] = features[:1]
    refused("slide.h5", "features of a whole slide")
    with h5py.File(tmp_path / "other.h5", "w") as h5:
        h5["imgs"] = features
    refused("other.h5", "neither `features` nor `feats`, but imgs")
    with h5py.File(tmp_path / "unsized.h5", "w") as h5:
        h5["feats"], h5["coords"] = features, np.random.default_rng(0).normal(size=(12, 2))
    refused("unsized.h5", "size of its tiles")
    torch.save({"weights": [1, 2]}, tmp_path / "weights.pt")
    refused("weights.pt", "no tensor of features")
    torch.save(Path, tmp_path / "pickled.pt")
    refused("pickled.pt", "holds Python objects|cannot be read as a file of tensors; it is damaged")


def write_labels(path: Path, rows: list[str], header: str = "bag_id,label,split,group") -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_a_cohort_of_three_layouts(tmp_path: Path, features: NDArray[np.float32]) -> None:
    folder = tmp_path / "features"
    trident(folder / "t0.h5", features, COORDS)
    trident(folder / "t1.h5", features + 1, COORDS)
    clam(folder / "clam" / "h5_files" / "c0.h5", features + 2, COORDS, patches=folder / "clam" / "patches")
    clam(folder / "clam" / "pt_files" / "c0.pt", features + 2, COORDS, patches=None, pt=True)
    clam(folder / "clam" / "pt_files" / "c1.pt", features + 3, COORDS, patches=folder / "clam" / "patches", pt=True)
    stamp(folder / "s0.h5", features + 4, COORDS)
    stamp(folder / "s1.h5", features + 5, COORDS)
    trident(folder / "one" / "twice.h5", features, COORDS)
    trident(folder / "two" / "twice.h5", features, COORDS)
    broken = features.copy()
    broken[0] = np.inf
    trident(folder / "broken.h5", broken, COORDS)
    labels = write_labels(
        tmp_path / "labels.csv",
        [
            "t0,0,train,p0,",
            "t1,1,train,p1,",
            "c0,0,val,p2,",
            "c1,1,val,p3,",
            f"s0,0,test,p4,{MPP}",
            f"s1,1,test,p5,{MPP}",
            "twice,1,train,p6,",
            "broken,1,train,p7,",
            "absent,0,train,p8,",
        ],
        "bag_id,label,split,group,mpp",
    )
    summary = pack_features(read_feature_manifest(labels, folder), tmp_path / "cohort", workers=1)
    assert summary.layouts == {"TRIDENT": 2, "CLAM": 2, "STAMP": 2}
    assert "6 bags, 72 instances of 8 features; files: 2 of CLAM, 2 of STAMP, 2 of TRIDENT" in summary.lines()[0]
    cohort = Cohort.open(tmp_path / "cohort")
    assert (cohort.kind, cohort.instance_shape, len(cohort)) == ("features", (8,), 6)
    for bag_id in cohort.bags["bag_id"]:
        tiles = cohort.tile_file(bag_id)
        np.testing.assert_array_equal(tiles.coords, COORDS)
        assert tiles.tile_size_level0 == TILE
    shifts = np.repeat([0, 1, 2, 3, 4, 5], len(COORDS))[:, None]
    np.testing.assert_allclose(load_tiles(cohort), np.tile(features, (6, 1)) + shifts, atol=5e-3)
    problems = pd.read_csv(tmp_path / "cohort" / "problems.csv").set_index("bag_id")["problem"]
    assert "2 feature files of this bag" in problems["twice"]
    assert "not finite" in problems["broken"]
    assert "no feature file absent.h5" in problems["absent"]
    assert not [one for one in examine(tmp_path / "cohort") if one.level == "error" and "alike" not in one.message]
    with pytest.raises(InputError, match="no picture of its tiles"):
        cohort.tile_file("t0").encoded(0)
    before = (tmp_path / "cohort" / "tiles" / "t0.h5").stat().st_mtime_ns
    pack_features(read_feature_manifest(labels, folder), tmp_path / "cohort", workers=1)
    assert (tmp_path / "cohort" / "tiles" / "t0.h5").stat().st_mtime_ns == before


def test_tables_and_folders_that_are_wrong(tmp_path: Path, features: NDArray[np.float32]) -> None:
    folder = tmp_path / "features"
    labels = write_labels(tmp_path / "labels.csv", ["a,0,p", "b,1,q", "c,0,r", "d,1,s"], "bag_id,label,group")
    with pytest.raises(InputError, match="is no folder"):
        read_feature_manifest(labels, folder)
    folder.mkdir()
    with pytest.raises(InputError, match="no feature files in this folder"):
        read_feature_manifest(labels, folder)
    trident(folder / "other.h5", features, COORDS)
    with pytest.raises(InputError, match=r"no bag of .* there is no feature file a\.h5"):
        read_feature_manifest(labels, folder)
    for name in "abc":
        trident(folder / f"{name}.h5", features, COORDS)
    trident(folder / "d.h5", features[:, :5], COORDS)
    with pytest.raises(InputError, match=r"different numbers of features: 5 in 1 files, such as .*d\.h5; 8 in 3 files"):
        pack_features(read_feature_manifest(labels, folder), tmp_path / "cohort")
    (folder / "d.h5").unlink()
    more = write_labels(
        tmp_path / "more.csv", [f"{name},{name in 'bd':d},p" for name in "abcdef"], "bag_id,label,group"
    )
    with pytest.raises(InputError, match=r"without dividing a group"):
        pack_features(read_feature_manifest(more, folder), tmp_path / "cohort")
    wrong = write_labels(tmp_path / "wrong.csv", ["a,0,2000", "b,1,"], "bag_id,label,mpp")
    with pytest.raises(InputError, match="row 2: mpp is '2000'"):
        read_feature_manifest(wrong, folder)


def test_the_slide_gives_scale_and_is_checked(tmp_path: Path, features: NDArray[np.float32]) -> None:
    tifffile = pytest.importorskip("tifffile")
    size = int(COORDS.max() + TILE)
    picture = np.zeros((size, size, 3), np.uint8)
    pixels_per_cm = 10_000 / MPP
    tifffile.imwrite(
        tmp_path / "right.tiff", picture, tile=(64, 64), resolution=(pixels_per_cm,) * 2, resolutionunit="CENTIMETER"
    )
    tifffile.imwrite(
        tmp_path / "small.tiff", picture[:128, :128], tile=(64, 64), resolution=(pixels_per_cm,) * 2,
        resolutionunit="CENTIMETER",
    )  # fmt: skip
    for name in "abcdefg":
        stamp(tmp_path / "features" / f"{name}.h5", features, COORDS)
    splits = zip("abcdef", ("train", "train", "val", "val", "test", "test"), strict=True)
    rows = [f"{name},{number % 2},{split},right.tiff" for number, (name, split) in enumerate(splits)]
    labels = write_labels(tmp_path / "labels.csv", [*rows, "g,1,train,small.tiff"], "bag_id,label,split,file")
    pack_features(read_feature_manifest(labels, tmp_path / "features"), tmp_path / "cohort")
    cohort = Cohort.open(tmp_path / "cohort")
    assert cohort.bags["bag_id"].tolist() == list("abcdef")
    tiles = cohort.tile_file("a")
    np.testing.assert_array_equal(tiles.coords, COORDS)
    assert Path(tiles.source).name == "right.tiff"
    problem = pd.read_csv(tmp_path / "cohort" / "problems.csv")["problem"].item()
    assert "its slide has 128 x 128 px" in problem


def test_what_is_no_feature_file_is_called_what_it_is(tmp_path: Path, features: NDArray[np.float32]) -> None:
    torch.save({"features": features}, tmp_path / "numpy.pt")
    with pytest.raises(FeatureProblem, match=r"holds NumPy arrays, .* never read; .*torch\.save") as refused:
        read_foreign_features(tmp_path / "numpy.pt")
    assert "weights_only" not in str(refused.value)
    (tmp_path / "damaged.pt").write_bytes(b"PK")
    with pytest.raises(FeatureProblem, match=r"damaged, or not written by torch\.save"):
        read_header(tmp_path / "damaged.pt")
    for name, what in (("case.svs", "a slide or an image"), ("case.png", "an image")):
        (tmp_path / name).write_bytes(b"II*\0")
        with pytest.raises(FeatureProblem, match=f"is {what}, and features are expected .* first extract them"):
            read_header(tmp_path / name)
