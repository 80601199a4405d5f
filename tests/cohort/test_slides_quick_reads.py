"""Reading past OpenSlide: whatever the file, the pixels are those of OpenSlide."""

import numpy as np
import pytest
import tifffile
from tests.cohort.slide_files import REAL_SLIDES, draw, write_dicom, write_plain, write_pyramid

from its2clr.cohort.slides.quick_reads import quick_reads
from its2clr.cohort.slides.slide_image import OpenSlideImage, SlideProblem, open_slide
from its2clr.cohort.slides.tiff import TiffImage

STORED = [
    {"compression": "jpeg"},
    {"compression": "jpeg", "photometric": "ycbcr", "subsampling": (2, 2)},
    {"compression": "jpeg", "photometric": "ycbcr", "subsampling": (2, 1), "tile": (240, 240)},
    {"compression": "lzw", "tile": (16, 512)},
    {"compression": "deflate"},
    {"compression": None, "tile": (128, 128)},
]


def regions(levels, rng):
    """Places of level 0 with a level and a size: inside, over the edges, and between the pixels of a level."""
    for number, level in enumerate(levels):
        yield 0, 0, number, level.width + 3, level.height + 5
        for _ in range(12):
            x, y = (int(rng.integers(0, side)) for side in (levels[0].width, levels[0].height))
            whole = int(level.downsample) if rng.random() < 0.6 else 1
            yield x // whole * whole, y // whole * whole, number, *rng.integers(1, 200, 2).tolist()


def assert_reads_as_openslide(path):
    """Give back of how many reads OpenSlide was spared, and how many there were."""
    asked, spared = [], 0
    with open_slide(path) as plain, open_slide(path) as other, quick_reads(other) as quick:
        assert (quick.levels, quick.mpp, quick.identity) == (plain.levels, plain.mpp, plain.identity)
        read = other.read_region
        other.read_region = lambda *region: asked.append(region) or read(*region)
        wanted = list(regions(plain.levels, np.random.default_rng(0)))
        for region in wanted:
            before = len(asked)
            found, expected = quick.read_region(*region), plain.read_region(*region)
            spared += not any(one[3:] == region[3:] for one in asked[before:])
            assert found.mode == expected.mode == "RGB"
            np.testing.assert_array_equal(np.asarray(found), np.asarray(expected), err_msg=str(region))
    return spared, len(wanted)


@pytest.mark.parametrize("stored", STORED, ids=lambda stored: " ".join(map(str, stored.values())))
def test_plain_tiffs(tmp_path, stored):
    spared, all_reads = assert_reads_as_openslide(write_pyramid(tmp_path / "a.tif", draw(704, 512), levels=3, **stored))
    assert all_reads * 0.6 < spared < all_reads  # those between pixels are OpenSlide's
    odd, _ = assert_reads_as_openslide(write_pyramid(tmp_path / "b.tif", draw(701, 523), levels=2, **stored))
    assert odd >= 13  # its first level


@pytest.mark.skipif(not REAL_SLIDES.is_dir(), reason="the real slides are not here")
def test_real_slides():
    for path in sorted(REAL_SLIDES.glob("*.*")):
        assert assert_reads_as_openslide(path)[0] > 0


def test_others_are_left_alone(tmp_path):
    paths = [
        write_plain(tmp_path / "a.tif", draw(200, 150)),
        write_dicom(tmp_path / "dicom", draw(200, 150)) / "level-0.dcm",
    ]
    grey = tmp_path / "grey.tif"
    tifffile.imwrite(grey, draw(200, 150)[..., 0], tile=(64, 64), photometric="minisblack", metadata=None)
    for path in (*paths, grey):
        with open_slide(path) as slide, quick_reads(slide) as quick:
            assert quick is slide


def test_a_file_with_missing_tiles_is_left_to_openslide(tmp_path, monkeypatch):
    path = write_pyramid(tmp_path / "a.tif", draw(300, 200), levels=2)
    with tifffile.TiffFile(path, mode="r+b") as file:
        tag = file.pages[1].tags["TileByteCounts"]
        tag.overwrite([0, *tag.value[1:]])
    with open_slide(path) as slide, quick_reads(slide) as quick:
        assert quick is slide


def test_what_reads_otherwise_is_not_used(tmp_path, monkeypatch):
    path, real = write_pyramid(tmp_path / "a.tif", draw(701, 523), levels=2), TiffImage.read_region
    monkeypatch.setattr(TiffImage, "read_region", lambda *region: real(*region).rotate(180))
    assert assert_reads_as_openslide(path)[0] == 0


def test_what_cannot_be_read_is_asked_of_openslide(tmp_path, monkeypatch):
    path, real = write_pyramid(tmp_path / "a.tif", draw(701, 523), levels=1), TiffImage.read_region

    def read(image, x, y, level, width, height):
        if width > 32:
            raise SlideProblem("is cut short")
        return real(image, x, y, level, width, height)

    monkeypatch.setattr(TiffImage, "read_region", read)
    assert assert_reads_as_openslide(path)[0] == 0


def test_a_slide_is_tiled_without_openslides_pixels(tmp_path, monkeypatch):
    """Tiling reads past OpenSlide: nothing else makes it as quick as a bare loop over the tiles it keeps."""
    from its2clr.cohort.slides import Slide, SlideSettings
    from its2clr.cohort.slides.one_slide import pack_slide

    path = write_pyramid(tmp_path / "a.tif", draw(701, 523), levels=1)
    sizes, read = [], OpenSlideImage.read_region
    monkeypatch.setattr(
        OpenSlideImage, "read_region", lambda image, *region: sizes.append(region[3]) or read(image, *region)
    )
    slide = Slide("a", 1, path, "a.tif")
    assert pack_slide(slide, tmp_path / "out", SlideSettings(mpp=0.5, tile_size=64)).counts.kept
    assert sizes == [32] * 3  # the comparison
