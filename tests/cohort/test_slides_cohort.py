import csv
import json
import os
import resource
from dataclasses import replace

import numpy as np
import pytest
import tifffile
from PIL import Image
from tests.cohort.slide_files import draw, write_levels, write_ome, write_plain, write_pyramid

from its2clr.cluster.place import Cluster
from its2clr.cohort import Cohort, decode, examine, read_tiles, tile_path
from its2clr.cohort.slides import SlideSettings, pack_slides, read_slide_manifest
from its2clr.cohort.slides.one_slide import pack_slide
from its2clr.errors import InputError

pytestmark = pytest.mark.xdist_group("slides")
SETTINGS = SlideSettings(mpp=1.0, tile_size=32, encoding="png")
WRITERS = (write_pyramid, write_ome, write_plain)


@pytest.fixture(scope="module")
def scheduler():
    """The address of a Dask scheduler with two workers."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster:
        yield Cluster(cluster.scheduler_address)


@pytest.fixture
def slides(tmp_path):
    """Six slides of three kinds, one of each class in each split, and their manifest."""
    folder = tmp_path / "slides"
    folder.mkdir()
    rows = ["bag_id,file,label,EGFR,KRAS,patient,split"]
    for number, split in enumerate(("train", "val", "test")):
        for label in (0, 1):
            name = f"{split}-{label}.tif"
            WRITERS[number](folder / name, draw(640, 480, seed=2 * number + label))
            kras = "" if label else str(number % 2)
            rows.append(f"{split}-{label},{name},{label},{1 - label},{kras},p{number}{label},{split}")
    (folder / "slides.csv").write_text("\n".join(rows) + "\n")
    return folder / "slides.csv"


def add_row(manifest, row):
    manifest.write_text(manifest.read_text() + row + "\n")


def problems_of(out):
    with (out / "problems.csv").open(newline="") as file:
        return {row["bag_id"]: row["problem"] for row in csv.DictReader(file)}


def snapshot(out):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.rglob("*") if path.is_file()}


def test_slides_become_a_cohort_and_a_second_run_changes_nothing(slides, tmp_path, scheduler):
    seen = []
    out = tmp_path / "out"
    manifest = read_slide_manifest(slides)
    summary = pack_slides(manifest, out, SETTINGS, cluster=scheduler, progress=lambda *args: seen.append(args))
    assert (summary.n_bags, summary.n_packed, summary.n_skipped) == (6, 6, 0)
    assert [one[:2] for one in seen] == [(number, 6) for number in range(1, 7)]
    assert seen[-1][2] == summary.counts.kept
    cohort = Cohort.open(out)
    assert cohort.bags["bag_id"].tolist() == [
        f"{split}-{label}" for split in ("train", "val", "test") for label in (0, 1)
    ]
    assert cohort.n_instances == summary.counts.kept > 0
    assert (out / "bags.csv").read_text().splitlines()[0] == "bag_id,label,split,group,EGFR,KRAS,n_instances"
    assert [one.level for one in examine(out) if one.level == "error"] == []
    for bag_id in cohort.bags["bag_id"]:
        assert Image.open(out / "overviews" / f"{bag_id}.png").size == (400, 300)  # 40 per tile
    before = snapshot(out)
    again = pack_slides(manifest, out, SETTINGS, cluster=scheduler)
    assert (again.n_packed, again.n_skipped, again.counts) == (0, 6, summary.counts)
    assert snapshot(out) == before
    places = 10 * 7 * 6
    counts = summary.counts
    assert counts.kept + counts.glass + counts.low_saturation + counts.low_tissue == places


def test_tile_files_hold_the_pixels_of_their_place(slides, tmp_path):
    slide = read_slide_manifest(slides).slides[4]  # plain TIFF: every pixel is that of level 0
    result = pack_slide(slide, tmp_path / "out", SETTINGS)
    tiles = read_tiles(tile_path(tmp_path / "out", slide.bag_id))
    assert (tiles.mpp, tiles.tile_size, tiles.tile_size_level0, tiles.source) == (1.0, 32, 64, str(slide.file))
    pixels = tifffile.imread(slide.file)
    assert len(tiles) == result.counts.kept > 0
    for number, (x, y) in enumerate(tiles.coords.tolist()):
        assert x % 64 == y % 64 == 0
        expected = Image.fromarray(pixels[y : y + 64, x : x + 64]).resize((32, 32), Image.Resampling.BILINEAR)
        np.testing.assert_array_equal(decode(tiles.encoded(number)), np.asarray(expected))
        assert tiles.names[number] == f"x{x}_y{y}"
    order = tiles.coords[:, 1] * 10_000 + tiles.coords[:, 0]
    assert (np.diff(order) > 0).all()
    assert tiles.labels is None


def test_tile_files_say_how_far_tiles_overlap(slides, tmp_path):
    slide = read_slide_manifest(slides).slides[4]
    pack_slide(slide, tmp_path / "out", replace(SETTINGS, overlap=5))
    tiles = read_tiles(tile_path(tmp_path / "out", slide.bag_id))
    assert (tiles.overlap, tiles.magnification) == (5, 10)
    by_step = replace(tiles, attributes={key: value for key, value in tiles.attributes.items() if key != "overlap"})
    assert by_step.overlap == 5  # 54 px at level 0 from tile to tile of 64


def test_a_changed_slide_and_a_lost_picture_are_made_again(slides, tmp_path, scheduler):
    out = tmp_path / "out"
    manifest = read_slide_manifest(slides)
    pack_slides(manifest, out, SETTINGS, cluster=scheduler)
    write_pyramid(slides.parent / "train-0.tif", draw(640, 480, seed=77))
    (out / "overviews" / "val-1.png").unlink()
    tile_path(out, "test-0").write_bytes(b"half a file")
    summary = pack_slides(manifest, out, SETTINGS, cluster=scheduler)
    assert (summary.n_packed, summary.n_skipped) == (3, 3)
    Cohort.open(out)


def test_each_bad_slide_is_one_clear_row(slides, tmp_path, scheduler):
    folder = slides.parent
    (folder / "zero.svs").touch()
    (folder / "text.svs").write_text("this is no slide")
    write_pyramid(folder / "whole.tif", draw(640, 480, seed=50), levels=1, compression=None)
    (folder / "truncated.tif").write_bytes((folder / "whole.tif").read_bytes()[:-300_000])
    write_plain(folder / "whole-plain.tif", draw(640, 480, seed=50), rowsperstrip=8)
    (folder / "truncated-plain.tif").write_bytes((folder / "whole-plain.tif").read_bytes()[:500_000])
    for name, write in (("corrupt.tif", write_pyramid), ("corrupt.ome.tif", write_ome)):
        write(folder / name, draw(640, 480, seed=50), levels=1)
        garbled = bytearray((folder / name).read_bytes())
        garbled[len(garbled) // 4 : len(garbled) // 2] = bytes(len(garbled) // 2 - len(garbled) // 4)
        (folder / name).write_bytes(bytes(garbled))
    write_pyramid(folder / "blank.tif", draw(640, 480, blobs=0))
    write_pyramid(folder / "no-mpp.tif", draw(640, 480, seed=51), mpp=None)
    write_pyramid(folder / "absurd.tif", draw(640, 480, seed=52), mpp=896.0)
    write_pyramid(folder / "coarse.tif", draw(640, 480, seed=53), mpp=4.0)
    write_plain(folder / "small.tif", draw(40, 30, seed=54))
    enormous(write_plain(folder / "enormous.tif", draw(128, 64), rowsperstrip=8))
    enormous(write_pyramid(folder / "enormous-tiled.tif", draw(128, 64), levels=1))
    expected = {
        "missing": ("missing.svs", "does not exist"),
        "zero": ("zero.svs", "the file is empty"),
        "text": ("text.svs", "neither OpenSlide nor tifffile"),
        "truncated": ("truncated.tif", "OpenSlide cannot open it"),
        "truncated-plain": ("truncated-plain.tif", "is cut short"),
        "corrupt": ("corrupt.tif", "cannot be read at x"),
        "corrupt-ome": ("corrupt.ome.tif", "cannot be read at x"),
        "blank": ("blank.tif", "has no tissue"),
        "no-mpp": ("no-mpp.tif", "the scale is unknown"),
        "absurd": ("absurd.tif", "says 896 um/px, which cannot be"),
        "coarse": ("coarse.tif", "too coarse"),
        "small": ("small.tif", "less than one tile"),
        "enormous": ("enormous.tif", "too large to be true"),
        "enormous-tiled": ("enormous-tiled.tif", "OpenSlide cannot open it"),
    }
    for bag_id, (name, _) in expected.items():
        add_row(slides, f"{bag_id},{name},1,1,1,q-{bag_id},train")
    out = tmp_path / "out"
    summary = pack_slides(read_slide_manifest(slides), out, SETTINGS, cluster=scheduler)
    assert (summary.n_bags, len(summary.left_out)) == (6, len(expected))
    found = problems_of(out)
    assert found.keys() == expected.keys()
    for bag_id, (_, message) in expected.items():
        assert message in found[bag_id], found[bag_id]
        assert "\n" not in found[bag_id]
        assert len(found[bag_id]) > 10
        assert not tile_path(out, bag_id).exists()
    text = "\n".join(summary.lines())
    assert "6 slides" in text
    assert "slides left out: 14" in text
    assert "and 4 more" in text
    before = snapshot(out)
    pack_slides(read_slide_manifest(slides), out, SETTINGS, cluster=scheduler)
    assert snapshot(out) == before


def enormous(path):
    """Let a file of a few kilobytes say that it has a million pixels a side."""
    with tifffile.TiffFile(path, mode="r+b") as file:
        for name in ("ImageWidth", "ImageLength"):
            file.pages[0].tags[name].overwrite(1_000_000)


def test_scale_from_manifest_and_default(slides, tmp_path):
    folder = slides.parent
    write_pyramid(folder / "train-0.tif", draw(640, 480, seed=51), mpp=896.0)
    slide = read_slide_manifest(slides).slides[0]
    given = pack_slide(replace(slide, mpp=0.5), tmp_path / "given", SETTINGS)
    default = pack_slide(slide, tmp_path / "default", replace(SETTINGS, default_mpp=0.25))
    assert given.left_out == default.left_out == ()
    assert read_tiles(tile_path(tmp_path / "given", "train-0")).tile_size_level0 == 64
    assert read_tiles(tile_path(tmp_path / "default", "train-0")).tile_size_level0 == 128


def test_two_slides_of_one_name(slides, tmp_path, scheduler):
    (slides.parent / "other").mkdir()
    write_plain(slides.parent / "other" / "train-0.tif", draw(640, 480, seed=60))
    add_row(slides, "other-train-0,other/train-0.tif,0,1,0,p9,train")
    out = tmp_path / "out"
    assert pack_slides(read_slide_manifest(slides), out, SETTINGS, cluster=scheduler).n_bags == 7
    sources = {read_tiles(path).source for path in (out / "tiles").iterdir()}
    assert len(sources) == 7
    add_row(slides, "train-0,other/train-0.tif,0,1,0,p9,train")
    with pytest.raises(InputError, match="bag_id 'train-0' was already used in row 2"):
        read_slide_manifest(slides)


def test_one_slide_in_two_bags_is_refused(slides):
    add_row(slides, "again,train-0.tif,0,1,0,p9,train")
    with pytest.raises(InputError, match="already the slide of row 2"):
        read_slide_manifest(slides)


def test_one_file_written_in_two_ways(slides):
    add_row(slides, "again,./train-0.tif,0,1,0,p9,train")
    with pytest.raises(InputError, match=r"row 8: file '\./train-0.tif' is already the slide of row 2"):
        read_slide_manifest(slides)


def test_a_misleading_coarse_level_is_noted_and_the_picture_shows_the_tiles(slides, tmp_path):
    pixels = draw(640, 480, seed=2)
    write_levels(slides.parent / "train-0.tif", [pixels, np.full((120, 160, 3), 243, np.uint8)])
    slide = replace(read_slide_manifest(slides).slides[0], mpp=0.5)
    result = pack_slide(slide, tmp_path / "out", replace(SETTINGS, mpp=0.5))
    assert result.counts.glass == 0
    assert any("every tile was read" in note for note in result.notes)
    tiles = read_tiles(tile_path(tmp_path / "out", "train-0"))
    order = tiles.coords[:, 1] * 10_000 + tiles.coords[:, 0]
    assert (np.diff(order) > 0).all()
    for number, (x, y) in enumerate(tiles.coords.tolist()):
        np.testing.assert_array_equal(decode(tiles.encoded(number)), pixels[y : y + 32, x : x + 32])
    x, y = tiles.coords[len(tiles) // 2].tolist()
    picture = np.asarray(Image.open(tmp_path / "out" / "overviews" / "train-0.png"))
    np.testing.assert_array_equal(picture[y + 1 : y + 31, x + 1 : x + 31], pixels[y + 1 : y + 31, x + 1 : x + 31])


def test_unwritable_output_is_said(slides, tmp_path, scheduler):
    manifest = read_slide_manifest(slides)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file"):
        pack_slides(manifest, tmp_path / "file", SETTINGS, cluster=scheduler)
    out = tmp_path / "out"
    pack_slides(manifest, out, SETTINGS, cluster=scheduler)
    for path in (out / "tiles").iterdir():
        path.unlink()
    (out / "tiles").rmdir()
    (out / "tiles").touch()  # no folder can be made there, not even by the superuser
    with pytest.raises(OSError, match="tiles"):
        pack_slides(manifest, out, SETTINGS, cluster=scheduler)


def test_a_full_disk_is_said_with_its_folder(slides, tmp_path):
    slide = read_slide_manifest(slides).slides[0]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match=rf"{tmp_path / 'out' / 'tiles'}: file too large"):
            pack_slide(slide, tmp_path / "out", SETTINGS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "out").rglob("*.*"))


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_without_write_permission(slides, tmp_path, scheduler):
    (tmp_path / "shut").mkdir(mode=0o500)
    with pytest.raises(PermissionError):
        pack_slides(read_slide_manifest(slides), tmp_path / "shut" / "out", SETTINGS, cluster=scheduler)


def test_all_tiles_can_be_read(slides, tmp_path):
    write_pyramid(slides.parent / "train-0.tif", draw(1024, 768, seed=2, blobs=1))
    slide = read_slide_manifest(slides).slides[0]
    settings = replace(SETTINGS, mpp=0.5)
    quick = pack_slide(slide, tmp_path / "quick", settings).counts
    full = pack_slide(slide, tmp_path / "full", replace(settings, skip_glass=False)).counts
    assert quick.glass > 0
    assert full.glass == 0
    assert quick.kept == full.kept
    assert quick.low_saturation + quick.glass == full.low_saturation


def test_memory_stays_flat_over_many_slides(slides, tmp_path):
    import psutil

    slides_ = read_slide_manifest(slides).slides
    memory = []
    for number in range(90):
        slide = replace(slides_[number % 6], bag_id=str(number))
        assert pack_slide(slide, tmp_path / "out", SETTINGS).left_out == ()
        memory.append(psutil.Process().memory_info().rss)
    assert memory[-1] - memory[29] < 20 * 2**20


def test_other_settings_are_refused(slides, tmp_path, scheduler):
    manifest = read_slide_manifest(slides)
    pack_slides(manifest, tmp_path / "out", SETTINGS, cluster=scheduler)
    with pytest.raises(InputError, match="overlap: 0 there, 4 asked for"):
        pack_slides(manifest, tmp_path / "out", replace(SETTINGS, overlap=4), cluster=scheduler)
    with pytest.raises(InputError, match="label: label there, EGFR asked for"):
        pack_slides(read_slide_manifest(slides, label="EGFR"), tmp_path / "out", SETTINGS, cluster=scheduler)


def test_one_of_several_label_columns(slides, tmp_path, scheduler):
    manifest = read_slide_manifest(slides, label="EGFR")
    assert manifest.bags["label"].tolist() == [1, 0] * 3
    assert "KRAS" in manifest.bags.columns
    assert manifest.left_out == ()
    with pytest.raises(InputError, match="column 'BRAF' is missing"):
        read_slide_manifest(slides, label="BRAF")
    add_row(slides, "more-0,train-0b.tif,,,1,p90,train")
    chosen = read_slide_manifest(slides, label="EGFR")
    assert [one.bag_id for one in chosen.left_out] == ["more-0"]
    assert len(chosen.slides) == 6
    with pytest.raises(InputError, match="label is ''"):
        read_slide_manifest(slides)
    summary = pack_slides(chosen, tmp_path / "out", SETTINGS, cluster=scheduler)
    assert problems_of(tmp_path / "out") == {"more-0": "has no label in column 'EGFR'"}
    assert summary.n_bags == 6
    settings = json.loads((tmp_path / "out" / "cohort.json").read_text())["settings"]
    assert settings["label"] == "EGFR"


def test_slides_without_labels(slides, tmp_path, scheduler):
    slides.write_text("bag_id,file\nnew,train-0.tif\n")
    manifest = read_slide_manifest(slides, labelled=False)
    pack_slides(manifest, tmp_path / "out", SETTINGS, cluster=scheduler)
    cohort = Cohort.open(tmp_path / "out")
    assert not cohort.is_labelled
    assert cohort.bags["split"].tolist() == ["test"]


def test_a_wrong_manifest_is_refused_as_a_whole(slides):
    text = slides.read_text()
    slides.write_text(text.replace("file,", "slide,"))
    with pytest.raises(InputError, match=r"column 'file' is missing, and no slide in .* with --slides-root"):
        read_slide_manifest(slides, slides_root=slides.parent / "elsewhere")
    slides.write_text("bag_id,file,label,mpp\na,train-0.tif,0,fine\nb,train-1.tif,2,896\nc,,1,0.5\n")
    with pytest.raises(InputError) as error:
        read_slide_manifest(slides)
    for part in ("row 2: mpp is 'fine'", "row 3: mpp is '896'", "label is '2'", "row 4: file is empty"):
        assert part in str(error.value)
    slides.write_text("bag_id,file,label\na,x.svs,0\nb,y.svs,1\n")
    with pytest.raises(InputError, match="none of the files exist"):
        read_slide_manifest(slides)
    slides.write_text("bag_id,file,label\n")
    with pytest.raises(InputError, match="no slides below the header"):
        read_slide_manifest(slides)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"overlap": 32}, "overlap"),
        ({"tile_size": 0}, "tile_size"),
        ({"min_covered": 1.5}, "min_covered"),
        ({"default_mpp": 896.0}, "default_mpp"),
        ({"min_saturation": 300.0}, "min_saturation"),
    ],
)
def test_wrong_settings_are_refused(slides, tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        pack_slides(read_slide_manifest(slides), tmp_path / "out", replace(SETTINGS, **change))
    assert not (tmp_path / "out").exists()


def test_nothing_answers_at_the_address(slides, tmp_path, monkeypatch):
    monkeypatch.setattr("its2clr.cluster.workers._CONNECT_SECONDS", 1)
    with pytest.raises(InputError, match=r"no Dask scheduler answers at tcp://127.0.0.1:9"):
        pack_slides(read_slide_manifest(slides), tmp_path / "out", SETTINGS, cluster=Cluster("tcp://127.0.0.1:9"))


def test_margins_that_hold_no_tile_are_seen_in_the_picture(slides, tmp_path, monkeypatch):
    monkeypatch.setattr("its2clr.cohort.slides.overview._LARGEST_TILE", 64)  # so a pixel is one of the slide
    pixels = np.full((250, 330, 3), 120, np.uint8)
    pixels[..., 0] = 200
    write_plain(slides.parent / "train-0.tif", pixels, mpp=0.5)
    slide = read_slide_manifest(slides).slides[0]
    pack_slide(slide, tmp_path / "out", replace(SETTINGS, mpp=0.5, tile_size=64, min_saturation=0.0))
    picture = np.asarray(Image.open(tmp_path / "out" / "overviews" / "train-0.png"))
    assert picture.shape == (250, 330, 3)
    veiled = picture[200, 325]  # right of the last column; below the last row:
    assert (picture[245, :].reshape(-1, 3) == veiled).all()
    assert (picture[:, 325].reshape(-1, 3) == veiled).all()
    assert (veiled < 255).any()
