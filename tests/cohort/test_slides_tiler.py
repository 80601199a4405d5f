import numpy as np
import openslide
import pytest
from PIL import Image
from tests.cohort.slide_files import (
    REAL_SLIDES,
    draw,
    halve,
    kept_tiles,
    mean_saturation,
    write_ome,
    write_plain,
    write_pyramid,
)

from its2clr.cohort.slides.slide_image import SlideProblem, open_slide
from its2clr.cohort.slides.tiler import plan_tiles, read_tile
from its2clr.cohort.slides.tissue import TissueTest
from its2clr.errors import InputError

WRITERS = {"pyramid": write_pyramid, "ome": write_ome, "plain": write_plain}


def assert_same_tiles(found, expected):
    assert found.keys() == expected.keys()
    assert expected
    for number, tile in expected.items():
        np.testing.assert_array_equal(found[number], tile)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize(("mpp", "overlap"), [(0.5, 0), (0.5, 9), (1.0, 0), (1.3, 5), (4.0, 0)])
def test_tiles_equal_brute_force_over_the_grid(tmp_path, kind, mpp, overlap):
    pixels = draw(704, 512, seed=3)
    path = WRITERS[kind](tmp_path / "a.tif", pixels)
    size = 32
    with open_slide(path) as slide:
        plan = plan_tiles(slide, 0.5, mpp, size, overlap)
        found, _ = kept_tiles(slide, plan)
    side, step = round(size * mpp / 0.5), round((size - overlap) * mpp / 0.5)
    levels = [pixels]
    while kind != "plain" and len(levels) < (4 if kind == "pyramid" else 3):
        levels.append(halve(levels[-1]))
    level = max(n for n in range(len(levels)) if 2**n <= mpp / 0.5 * 1.01)
    expected, number = {}, 0
    for y in range(0, 512 - side + 1, step):
        for x in range(0, 704 - side + 1, step):
            read = round(side / 2**level)
            piece = levels[level][y >> level :, x >> level :][:read, :read]
            tile = Image.fromarray(np.ascontiguousarray(piece))
            if read != size:
                tile = tile.resize((size, size), Image.Resampling.BILINEAR)
            if mean_saturation(tile) >= 30:
                expected[number] = np.asarray(tile)
            number += 1
    assert number == plan.rows * plan.columns
    assert plan.coords()[:2].tolist() == [[0, 0], [step, 0]]
    assert step % 2**level == 0  # so the pixels of the level line up with the grid
    assert_same_tiles(found, expected)


@pytest.mark.skipif(not REAL_SLIDES.is_dir(), reason="the real slides are not here")
@pytest.mark.parametrize(("name", "slide_mpp"), [("CMU-1-Small-Region.svs", 0.499), ("pyramid.tiff", 0.5)])
@pytest.mark.parametrize(
    ("mpp", "size", "resize"), [(0.5, 224, "bilinear"), (2.0, 64, "nearest"), (1.1, 100, "bilinear")]
)
def test_tiles_of_real_slides_equal_plain_openslide(name, slide_mpp, mpp, size, resize):
    with open_slide(REAL_SLIDES / name) as slide, openslide.OpenSlide(REAL_SLIDES / name) as plain:
        plan = plan_tiles(slide, slide_mpp, mpp, size)
        found, _ = kept_tiles(slide, plan, resize=resize)
        side = round(size * mpp / slide_mpp)
        level = plain.get_best_level_for_downsample(1.01 * side / size)
        read = round(side / plain.level_downsamples[level])
        width, height = plain.dimensions
        number, expected = 0, {}
        for y in range(0, height - side + 1, side):
            for x in range(0, width - side + 1, side):
                region = plain.read_region((x, y), level, (read, read))
                tile = Image.alpha_composite(Image.new("RGBA", region.size, "white"), region).convert("RGB")
                filters = {"bilinear": Image.Resampling.BILINEAR, "nearest": Image.Resampling.NEAREST}
                tile = tile if read == size else tile.resize((size, size), filters[resize])
                if np.asarray(tile.convert("HSV"))[..., 1].mean() >= 30:
                    expected[number] = np.asarray(tile)
                number += 1
    assert (plan.level, plan.side, plan.rows * plan.columns) == (level, side, number)
    assert plan.mpp == pytest.approx(slide_mpp * side / size)
    assert_same_tiles(found, expected)


class Levels:
    """A slide without pixels."""

    def __init__(self, *levels):
        from its2clr.cohort.slides.slide_image import Level

        self.levels = tuple(Level(*one) for one in levels)


def test_plan_chooses_level_side_and_scale():
    slide = Levels((40_000, 30_000, 1.0), (10_000, 7_500, 4.0), (2_500, 1_875, 16.0))
    plan = plan_tiles(slide, 0.25, 2.0, 224)  # 40x slide, tiles at 5x
    assert (plan.side, plan.step, plan.level, plan.read_size) == (1792, 1792, 1, 448)
    assert (plan.columns, plan.rows, plan.mpp) == (22, 16, 2.0)
    plan = plan_tiles(slide, 0.2525, 0.5, 224, overlap=56)
    assert (plan.side, plan.step, plan.level) == (444, 333, 0)
    assert plan.mpp == pytest.approx(0.2525 * 444 / 224)
    coords = plan.coords()
    assert (coords[-1] + plan.side <= (40_000, 30_000)).all()
    assert (coords[-1] + plan.side + plan.step > (40_000, 30_000)).all()


def test_plan_refuses_what_cannot_be_tiled():
    slide = Levels((1000, 800, 1.0))
    with pytest.raises(SlideProblem, match="too coarse"):
        plan_tiles(slide, 1.0, 0.5, 224)
    with pytest.raises(SlideProblem, match="less than one tile"):
        plan_tiles(slide, 0.25, 2.0, 224)
    with pytest.raises(SlideProblem, match="too large to be true"):
        plan_tiles(Levels((2**30, 2**30, 1.0)), 0.5, 0.5, 224)
    with pytest.raises(InputError, match="overlap"):
        plan_tiles(slide, 0.5, 0.5, 224, overlap=224)


def test_saturation_is_that_of_the_slow_reference():
    rng = np.random.default_rng(0)
    for _ in range(20):
        tile = Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))
        mean = mean_saturation(tile)
        assert TissueTest(mean).judge(tile) == "kept"
        assert TissueTest(mean + 1e-6).judge(tile) == "low_saturation"


def test_what_is_sure_without_saturation_is_what_saturation_says():
    high, spread = np.divmod(np.arange(256 * 256), 256)
    low = np.maximum(high - spread, 0)
    every = np.stack([high, low, low], axis=-1).astype(np.uint8)  # each pair of largest and smallest channel
    sure = 0
    for pixel in every[spread <= high]:
        tile = Image.fromarray(pixel.reshape(1, 1, 3))
        saturation = tile.convert("HSV").getpixel((0, 0))[1]
        for least in (30.0, float(saturation), min(saturation + 0.5, 255.0)):
            verdict = TissueTest(least)._surely(tile)
            assert verdict in (None, "kept" if saturation >= least else "low_saturation"), (pixel, least)
            sure += verdict is not None
    assert sure > 25_000
    rng = np.random.default_rng(1)
    for _ in range(300):
        pixels = rng.normal(rng.uniform(60, 250, 3), rng.uniform(0, 40), (24, 24, 3)).clip(0, 255).astype(np.uint8)
        tile = Image.fromarray(pixels)
        mean = np.asarray(tile.convert("HSV"))[..., 1].mean()
        assert TissueTest().judge(tile) == ("kept" if mean >= 30 else "low_saturation")


def test_share_of_tissue():
    pixels = np.full((10, 10, 3), 240, np.uint8)
    pixels[:4] = (200, 50, 120)
    tile = Image.fromarray(pixels)
    assert TissueTest(30, 0.4).judge(tile) == "kept"
    assert TissueTest(30, 0.41).judge(tile) == "low_tissue"
    for wrong in [(-1, 0), (256, 0), (30, -0.1), (30, 1.1)]:
        with pytest.raises(InputError):
            TissueTest(*wrong)


def test_one_resize_of_the_filter_asked_for(tmp_path):
    pixels = draw(512, 512, seed=1)
    with open_slide(write_plain(tmp_path / "a.tif", pixels)) as slide:
        plan = plan_tiles(slide, 0.5, 1.5, 32)
        for resize, method in [("nearest", Image.Resampling.NEAREST), ("bilinear", Image.Resampling.BILINEAR)]:
            expected = Image.fromarray(pixels[96:192, 192:288]).resize((32, 32), method)
            np.testing.assert_array_equal(np.asarray(read_tile(slide, plan, 192, 96, resize)), np.asarray(expected))
