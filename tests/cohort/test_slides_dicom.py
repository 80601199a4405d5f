"""Slides in DICOM: read through OpenSlide, in tiles that equal a plain read of the same place."""

import numpy as np
import openslide
import pytest
from tests.cohort.slide_files import draw, halve, write_dicom, write_plain

from its2clr.cohort import decode, read_tiles, tile_path
from its2clr.cohort.slides import SlideSettings, pack_slides, read_slide_manifest
from its2clr.cohort.slides.one_slide import pack_slide
from its2clr.cohort.slides.slide_image import OpenSlideImage, SlideProblem, open_slide
from its2clr.cohort.slides.slide_manifest import Slide

SETTINGS = SlideSettings(mpp=1.0, tile_size=32, encoding="png")


@pytest.mark.parametrize("jpeg", [False, True])
@pytest.mark.parametrize("named", ["level-0.dcm", "level-2.dcm"])
def test_tiles_of_a_dicom_slide_equal_plain_openslide(tmp_path, jpeg, named):
    folder = write_dicom(tmp_path / "slide", draw(700, 500, seed=3), jpeg=jpeg)
    slide = Slide("a", 2, folder / named, named)
    assert pack_slide(slide, tmp_path / "out", SETTINGS).left_out == ()
    tiles = read_tiles(tile_path(tmp_path / "out", "a"))
    assert (tiles.mpp, tiles.tile_size_level0) == (pytest.approx(1.0), 64)
    plain = openslide.OpenSlide(folder / named)
    kept = {}
    for y in range(0, 500 - 63, 64):
        for x in range(0, 700 - 63, 64):
            tile = plain.read_region((x, y), 1, (32, 32)).convert("RGB")
            if np.asarray(tile.convert("HSV"))[..., 1].mean() >= 30:
                kept[x, y] = np.asarray(tile)
    plain.close()
    assert tiles.coords.tolist() == [list(place) for place in kept]
    assert kept
    for number, expected in enumerate(kept.values()):
        np.testing.assert_array_equal(decode(tiles.encoded(number)), expected)


def test_levels_scale_and_pixels(tmp_path):
    pixels = draw(700, 500, seed=3)
    folder = write_dicom(tmp_path / "slide", pixels)
    with open_slide(folder / "level-1.dcm") as slide:
        assert isinstance(slide, OpenSlideImage)
        assert [(one.width, one.height) for one in slide.levels] == [(700, 500), (350, 250), (175, 125)]
        assert slide.mpp == (0.5, 0.5)
        np.testing.assert_array_equal(np.asarray(slide.read_region(0, 0, 0, 700, 500)), pixels)
        np.testing.assert_array_equal(np.asarray(slide.read_region(0, 0, 1, 350, 250)), halve(pixels))


def test_two_slides_in_one_folder_are_told_apart(tmp_path):
    pictures = [draw(300, 200, seed=seed) for seed in (1, 2)]
    for number, pixels in enumerate(pictures):
        for path in write_dicom(tmp_path / str(number), pixels, levels=2).iterdir():
            path.rename(tmp_path / f"{number}-{path.name}")
    for number, pixels in enumerate(pictures):
        with open_slide(tmp_path / f"{number}-level-1.dcm") as slide:
            np.testing.assert_array_equal(np.asarray(slide.read_region(0, 0, 0, 300, 200)), pixels)


def test_what_is_wrong_with_a_dicom_slide_is_said(tmp_path):
    folder = write_dicom(tmp_path / "slide", draw(300, 200, seed=1), levels=1)
    whole = (folder / "level-0.dcm").read_bytes()
    (folder / "level-0.dcm").write_bytes(whole[: len(whole) // 2])
    result = pack_slide(Slide("a", 2, folder / "level-0.dcm", "a"), tmp_path / "out", SETTINGS)
    assert "cannot" in result.left_out[0].problem
    assert not tile_path(tmp_path / "out", "a").exists()
    with pytest.raises(SlideProblem, match="is a folder; name one file"), open_slide(folder):
        pass


def test_files_of_one_slide_in_two_bags_are_noted(tmp_path):
    folder = write_dicom(tmp_path / "slide", draw(700, 500, seed=3))
    write_plain(folder / "other.tif", draw(700, 500, seed=4))
    (folder / "slides.csv").write_text("bag_id,file\na,level-0.dcm\nb,other.tif\nc,level-1.dcm\n")
    manifest = read_slide_manifest(folder / "slides.csv", labelled=False)
    for _ in range(2):  # also where the slides are there already
        summary = pack_slides(manifest, tmp_path / "out", SETTINGS, workers=1)
        assert summary.notes == (("c", "is the same slide as a; remove one of them from the manifest"),)
        assert "note: c: is the same slide as a" in "\n".join(summary.lines())
