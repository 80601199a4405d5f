import numpy as np
import openslide
import pytest
import tifffile
from PIL import Image
from tests.cohort.slide_files import REAL_SLIDES, draw, halve, write_ome, write_plain, write_pyramid

from its2clr.cohort.slides import target_mpp
from its2clr.cohort.slides.slide_image import OpenSlideImage, SlideProblem, open_slide, slide_mpp
from its2clr.cohort.slides.tiff import TiffImage
from its2clr.errors import InputError

real = pytest.mark.skipif(not REAL_SLIDES.is_dir(), reason="the real slides are not here")
PLACES = [(0, 0), (64, 128), (37, 211), (650, 470)]


def read(slide, *place):
    image = slide.read_region(*place)
    assert image.mode == "RGB"
    return np.asarray(image)


def with_border(pixels, x, y, size):
    """The place in the pixels, white where it leaves them."""
    out = np.full((size, size, 3), 255, np.uint8)
    held = pixels[y : y + size, x : x + size]
    out[: held.shape[0], : held.shape[1]] = held
    return out


def check_pixels(path, pixels, kind, levels):
    with open_slide(path) as slide:
        assert isinstance(slide, kind)
        assert [(one.width, one.height) for one in slide.levels] == [
            (pixels.shape[1] >> level, pixels.shape[0] >> level) for level in range(levels)
        ]
        assert slide_mpp(slide.mpp, None, None) == pytest.approx(0.5, rel=1e-3)
        for level in range(levels):
            for x, y in [(x >> level, y >> level) for x, y in PLACES]:
                found = read(slide, x << level, y << level, level, 100, 100)
                np.testing.assert_array_equal(found, with_border(pixels, x, y, 100))
            pixels = halve(pixels)


def test_pyramidal_tiff_through_openslide(tmp_path):
    pixels = draw(704, 512)
    check_pixels(write_pyramid(tmp_path / "a.tif", pixels), pixels, OpenSlideImage, 4)


def test_ome_tiff_through_tifffile(tmp_path):
    pixels = draw(704, 512)
    check_pixels(write_ome(tmp_path / "a.ome.tif", pixels), pixels, TiffImage, 3)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"rowsperstrip": 7},
        {"rowsperstrip": 16, "compression": "deflate"},
        {"rowsperstrip": 5, "compression": "lzw", "predictor": True},
        {"bigtiff": True, "rowsperstrip": 500},
    ],
)
def test_plain_tiff_through_tifffile(tmp_path, more):
    pixels = draw(703, 511)
    check_pixels(write_plain(tmp_path / "a.tif", pixels, **more), pixels, TiffImage, 1)


def test_plainly_stored_pixels_are_mapped_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("its2clr.cohort.slides.tiff._LARGEST_DECODED", 250)
    pixels = draw(703, 511)
    path = write_plain(tmp_path / "a.tif", pixels, rowsperstrip=511)
    with open_slide(path) as slide:
        assert slide._planes[0]._mapped is not None
        np.testing.assert_array_equal(read(slide, 37, 211, 0, 100, 100), with_border(pixels, 37, 211, 100))


def test_a_full_cache_of_blocks_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("its2clr.cohort.slides.tiff.cache_bytes", lambda row: 64 * 64 * 3 * 2)
    pixels = draw(704, 512)
    path = write_ome(tmp_path / "a.ome.tif", pixels)
    with open_slide(path) as slide:
        np.testing.assert_array_equal(read(slide, 0, 0, 0, 704, 512), pixels)
        assert slide._planes[0]._cached <= 64 * 64 * 3 * 2


def test_colours_in_planes_and_in_pages(tmp_path):
    pixels = draw(200, 150)
    planes = np.ascontiguousarray(pixels.transpose(2, 0, 1))
    tifffile.imwrite(tmp_path / "planes.tif", planes, photometric="rgb", planarconfig="separate", rowsperstrip=16)
    tifffile.imwrite(tmp_path / "pages.ome.tif", planes, photometric="minisblack", metadata={"axes": "CYX"})
    for name in ("planes.tif", "pages.ome.tif"):
        with open_slide(tmp_path / name) as slide:
            np.testing.assert_array_equal(read(slide, 20, 30, 0, 64, 64), pixels[30:94, 20:84], err_msg=name)


def test_the_largest_of_several_pictures_is_the_slide(tmp_path):
    label, pixels = draw(120, 90, seed=1), draw(704, 512, seed=2)
    sizes = [{"PhysicalSizeX": mpp, "PhysicalSizeY": mpp} for mpp in (4.0, 0.5)]
    with tifffile.TiffWriter(tmp_path / "a.ome.tif", ome=True) as file:
        for picture, size in zip((label, pixels), sizes, strict=True):
            file.write(picture, photometric="rgb", metadata={"axes": "YXS", **size})
    check_pixels(tmp_path / "a.ome.tif", pixels, TiffImage, 1)


def test_compressions_that_openslide_lacks_are_read_with_tifffile(tmp_path):
    pixels = draw(704, 512)
    options = {"tile": (128, 128), "photometric": "rgb", "metadata": None, "compression": "jpeg2000"}
    with pytest.raises(openslide.OpenSlideError):
        openslide.OpenSlide(write_plain(tmp_path / "a.tif", pixels, **options))
    check_pixels(tmp_path / "a.tif", pixels, TiffImage, 1)


def test_jpeg_colours_of_an_ome_tiff_are_those_of_tifffile(tmp_path):
    options = {"tile": (128, 128), "photometric": "rgb", "compression": "jpeg", "metadata": {"axes": "YXS"}}
    tifffile.imwrite(tmp_path / "a.ome.tif", draw(704, 512), **options)
    with open_slide(tmp_path / "a.ome.tif") as slide:
        assert isinstance(slide, TiffImage)
        np.testing.assert_array_equal(read(slide, 0, 0, 0, 704, 512), tifffile.imread(tmp_path / "a.ome.tif"))


def test_transparent_becomes_white(tmp_path):
    pixels = np.concatenate([draw(100, 80), np.zeros((80, 100, 1), np.uint8)], axis=2)
    pixels[40:, :, 3] = 255
    tifffile.imwrite(tmp_path / "a.tif", pixels, photometric="rgb", extrasamples=["unassalpha"])
    with open_slide(tmp_path / "a.tif") as slide:
        found = read(slide, 0, 0, 0, 100, 80)
    assert (found[:40] == 255).all()
    np.testing.assert_array_equal(found[40:], pixels[40:, :, :3])


@real
def test_real_slides_equal_a_plain_openslide_read():
    for path in sorted(REAL_SLIDES.glob("*.*")):
        with open_slide(path) as slide, openslide.OpenSlide(path) as plain:
            assert (slide.levels[0].width, slide.levels[0].height) == plain.dimensions
            for level, (width, height) in enumerate(plain.level_dimensions):
                size = (min(width, 300), min(height, 200))
                expected = np.asarray(plain.read_region((501, 300), level, size).convert("RGB"))
                inside = np.asarray(plain.read_region((501, 300), level, size))[..., 3] == 255
                found = read(slide, 501, 300, level, *size)
                np.testing.assert_array_equal(found[inside], expected[inside])


@real
def test_real_pyramid_equals_a_plain_tifffile_read():
    path = REAL_SLIDES / "pyramid.tiff"
    with tifffile.TiffFile(path) as plain:
        slide = TiffImage(path)
        for level, series in enumerate(plain.series[0].levels):
            pixels = series.asarray()
            x = y = min(pixels.shape[0] // 4, 400)
            scale = slide.levels[level].downsample
            found = read(slide, round(x * scale), round(y * scale), level, 50, 50)
            np.testing.assert_array_equal(found, with_border(pixels, x, y, 50))
        slide.close()


def test_what_is_no_slide_is_said(tmp_path):
    (tmp_path / "empty.svs").touch()
    (tmp_path / "text.svs").write_text("no slide")
    (tmp_path / "folder.svs").mkdir()
    whole = write_pyramid(tmp_path / "cut.tif", draw(300, 200)).read_bytes()
    (tmp_path / "cut.tif").write_bytes(whole[:4] + (10**9).to_bytes(4, "little") + whole[8:])  # nothing is there
    Image.new("RGB", (64, 64)).save(tmp_path / "image.png")
    tifffile.imwrite(tmp_path / "deep.tif", np.zeros((64, 64, 3), np.uint16), photometric="rgb")
    tifffile.imwrite(tmp_path / "many.tif", np.zeros((5, 64, 64), np.uint8), photometric="minisblack")
    expected = {
        "missing.svs": "does not exist",
        "empty.svs": "the file is empty",
        "text.svs": "neither OpenSlide nor tifffile",
        "folder.svs": "is a folder",
        "cut.tif": "holds no picture; was it cut short",
        "image.png": "its2clr cohort images",
        "deep.tif": "no 8-bit RGB",
        "many.tif": "no 8-bit RGB",
    }
    for name, message in expected.items():
        with pytest.raises(SlideProblem, match=message), open_slide(tmp_path / name):
            pass


def test_a_block_too_large_to_decode_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("its2clr.cohort.slides.tiff._LARGEST_BLOCK", 1000)
    path = write_plain(tmp_path / "a.tif", draw(200, 100), rowsperstrip=100, compression="deflate")
    with pytest.raises(SlideProblem, match="convert it to a tiled TIFF"), open_slide(path):
        pass


def test_scale_asked_for():
    assert target_mpp(5, None) == 2.0
    assert target_mpp(20, None) == 0.5
    assert target_mpp(None, 0.25) == 0.25
    for wrong in [(None, None), (5, 2.0), (0, None), (-1, None), (None, 0.0), (None, float("nan"))]:
        with pytest.raises(InputError):
            target_mpp(*wrong)


@pytest.mark.parametrize(
    ("found", "given", "default", "expected"),
    [
        ((0.25, 0.25), 0.5, 1.0, 0.25),
        ((896.1, 896.1), 0.5, 1.0, 0.5),
        ((896.1, 896.1), None, 1.0, 1.0),
        (None, 0.5, None, 0.5),
        (None, None, 0.4, 0.4),
        ((0.0, 0.0), None, 0.4, 0.4),
        ((float("nan"), 0.5), 0.3, None, 0.3),
        ((0.25, 0.251), None, None, 0.2505),
    ],
)
def test_scale_of_a_slide(found, given, default, expected):
    assert slide_mpp(found, given, default) == pytest.approx(expected)


def test_an_unknown_scale_is_a_problem_not_a_guess():
    with pytest.raises(SlideProblem, match="does not say"):
        slide_mpp(None, None, None)
    with pytest.raises(SlideProblem, match=r"says 896.*cannot be.*--default-mpp"):
        slide_mpp((896.0, 896.0), None, None)
    with pytest.raises(SlideProblem, match="not square"):
        slide_mpp((0.25, 0.5), None, None)
