"""Passing over bare glass: whatever the coarse levels of a slide show, no tile may be lost."""

import io

import numpy as np
import pytest
from PIL import Image
from tests.cohort.slide_files import draw, halve, kept_tiles, write_levels, write_plain, write_pyramid

from its2clr.cohort.slides.glass import Glass, Thumbnail
from its2clr.cohort.slides.slide_image import open_slide
from its2clr.cohort.slides.tiler import plan_tiles, read_thumbnail


def checkered(pixels, first, second):
    """Two colours that cancel out in every mean."""
    pixels[:, ::2], pixels[:, 1::2] = first, second


def spoil_pastel(pixels):
    checkered(pixels[64:320, 64:448], (255, 200, 200), (200, 255, 255))


def spoil_vivid(pixels):
    checkered(pixels[96:160, 96:160], (255, 0, 0), (0, 255, 255))


def spoil_specks(pixels):
    rng = np.random.default_rng(5)
    for y, x in rng.integers(0, 480, (300, 2)):
        pixels[y : y + 5, x : x + 5] = rng.integers(0, 200, 3)


def spoil_pale(pixels):
    pixels[200:420, 300:600] = (255, 255, 224)


def spoil_dark(pixels):
    pixels[200:420, 300:600][np.random.default_rng(1).random((220, 300)) < 0.13] = (9, 0, 4)


@pytest.mark.parametrize(
    "spoil", [spoil_pastel, spoil_vivid, spoil_specks, spoil_pale, spoil_dark, lambda pixels: None]
)
@pytest.mark.parametrize("glass", [255, 243, 225])
def test_the_thumbnail_pass_loses_no_tile(tmp_path, spoil, glass):
    pixels = draw(1024, 768, seed=2, glass=glass, blobs=1)
    spoil(pixels)
    path = write_pyramid(tmp_path / "a.tif", pixels, levels=4)
    with open_slide(path) as slide:
        plan = plan_tiles(slide, 0.5, 0.5, 32)
        assert read_thumbnail(slide, plan) is not None
        with_pass, read = kept_tiles(slide, plan)
        without, read_without = kept_tiles(slide, plan, thumbnail=False)
    assert with_pass.keys() == without.keys()
    assert read <= read_without == plan.rows * plan.columns


@pytest.mark.parametrize("glass", [255, 243, 225])
def test_the_thumbnail_pass_skips_most_glass(tmp_path, glass):
    path = write_pyramid(tmp_path / "a.tif", draw(1024, 768, seed=2, glass=glass, blobs=1), levels=4)
    with open_slide(path) as slide:
        plan = plan_tiles(slide, 0.5, 0.5, 32)
        found, read = kept_tiles(slide, plan)
    assert len(found) < read < 0.5 * plan.rows * plan.columns


def test_many_random_slides_lose_no_tile(tmp_path):
    for seed in range(12):
        glass = int(np.random.default_rng(seed).integers(215, 256))
        path = write_pyramid(tmp_path / f"{seed}.tif", draw(640, 512, seed=seed, glass=glass), levels=4)
        with open_slide(path) as slide:
            plan = plan_tiles(slide, 0.5, 0.5, 40, overlap=seed % 3)
            found = [kept_tiles(slide, plan, thumbnail=way)[0].keys() for way in (True, False)]
        assert found[0] == found[1], seed


def pyramid(pixels, levels=5):
    found = [pixels]
    while len(found) < levels:
        found.append(halve(found[-1]))
    return found


def every_second_pixel(pixels):
    return [np.ascontiguousarray(pixels[:: 2**level, :: 2**level]) for level in range(5)]


def of_poor_jpeg(pixels):
    """Coarse levels whose colours are washed out."""
    levels = [pixels]
    for level in pyramid(pixels)[1:]:
        buffer = io.BytesIO()
        Image.fromarray(level).save(buffer, "JPEG", quality=20, subsampling=2)
        levels.append(np.asarray(Image.open(buffer).convert("RGB")))
    return levels


def shifted(pixels):
    return [pixels, *(np.roll(level, (3, 5), (0, 1)) for level in pyramid(pixels)[1:])]


def of_another_picture(pixels):
    return [pixels, *pyramid(draw(1536, 1152, seed=99, blobs=2))[1:]]


def half_missing(pixels):
    levels = pyramid(pixels)
    for level in levels[1:]:
        level[:, level.shape[1] // 2 :] = 255
    return levels


def with_a_hole(pixels):
    levels = pyramid(pixels)
    for level in levels[1:]:
        height, width = level.shape[:2]
        level[height // 3 : 2 * height // 3, width // 3 : 2 * width // 3] = pixels[0, 0]
    return levels


def blank(pixels):
    return [pixels, np.full((144, 192, 3), 243, np.uint8)]


def add_islands(pixels, rng, islands=5, side=64):
    """Squares of lone pixels in a pure colour, just enough for a tile to be kept."""
    colours = [(255, 0, 0), (0, 0, 255), (255, 0, 255), (0, 255, 255)]
    height, width = (length // side for length in pixels.shape[:2])
    for _ in range(islands):
        y, x = rng.integers(height) * side, rng.integers(width) * side
        place = rng.permutation(side * side)[: int(rng.uniform(0.118, 0.16) * side * side)]
        pixels[y + place // side, x + place % side] = colours[rng.integers(4)]


def add_threads(pixels, rng, threads=6):
    """Thin bent lines of tissue."""
    height, width = pixels.shape[:2]
    for _ in range(threads):
        x, y, angle, thick = rng.uniform(0, width), rng.uniform(0, height), rng.uniform(0, 6.3), int(rng.integers(2, 6))
        for _ in range(600):
            angle += rng.normal(0, 0.05)
            x, y = x + np.cos(angle), y + np.sin(angle)
            if x >= 0 and y >= 0:
                pixels[int(y) : int(y) + thick, int(x) : int(x) + thick] = (200, 90, 160)


def same_tiles_as_reading_all(path, tile_size):
    with open_slide(path) as slide:
        plan = plan_tiles(slide, 0.5, 0.5, tile_size)
        assert read_thumbnail(slide, plan) is not None
        found, expected = (kept_tiles(slide, plan, thumbnail=way)[0].keys() for way in (True, False))
    assert expected
    return found == expected


@pytest.mark.parametrize("add", [add_islands, add_threads])
@pytest.mark.parametrize("make", [pyramid, every_second_pixel, of_poor_jpeg, shifted, of_another_picture, blank])
def test_no_tile_is_lost_however_the_coarse_levels_were_made(tmp_path, make, add):
    for seed in range(3):
        rng = np.random.default_rng(seed)
        pixels = draw(1536, 1152, seed=seed, glass=int(rng.choice([255, 243, 225])), blobs=1)
        add(pixels, rng)
        path = write_levels(tmp_path / "a.tif", make(pixels))
        assert same_tiles_as_reading_all(path, int(rng.choice([32, 64]))), seed


@pytest.mark.parametrize("make", [half_missing, with_a_hole])
def test_tissue_that_breaks_off_in_the_coarse_levels_is_not_lost(tmp_path, make):
    for seed in range(2):
        pixels = draw(1536, 1152, seed=seed, blobs=1)
        pixels[500:540, 200:900] = (200, 90, 160)  # a strip into what is missing there
        assert same_tiles_as_reading_all(write_levels(tmp_path / "a.tif", make(pixels)), 32), seed


def test_a_coarse_level_that_shows_nothing_has_every_tile_read(tmp_path):
    with open_slide(write_levels(tmp_path / "a.tif", blank(draw(1536, 1152, seed=2)))) as slide:
        plan = plan_tiles(slide, 0.5, 0.5, 32)
        assert kept_tiles(slide, plan)[1] == plan.rows * plan.columns


def test_an_honest_pyramid_is_believed(tmp_path):
    for make in (pyramid, every_second_pixel, of_poor_jpeg):
        pixels = draw(1536, 1152, seed=2, blobs=1)
        with open_slide(write_levels(tmp_path / "a.tif", make(pixels))) as slide:
            plan = plan_tiles(slide, 0.5, 0.5, 32)
            assert kept_tiles(slide, plan)[1] < 0.3 * plan.rows * plan.columns


@pytest.mark.parametrize(("kept", "beside"), [(0, [0, 1, 5, 6]), (9, [3, 4, 8, 9, 13, 14]), (None, [])])
def test_glass_beside_kept_tiles(kept, beside):
    glass = Glass(Thumbnail(Image.new("RGB", (40, 30), (250, 250, 250)), 8.0), grid(5, 4, 64), 64, 30.0)
    assert glass.blank.all()
    if kept is not None:
        glass.compare(kept, Image.new("RGB", (64, 64), (190, 110, 170)), "kept")
    assert np.flatnonzero([glass.beside(row, 5) for row in range(4)]).tolist() == beside


def grid(columns, rows, step):
    return np.array([(x * step, y * step) for y in range(rows) for x in range(columns)])


def test_tiles_that_look_otherwise_are_noticed():
    shown = Image.new("RGB", (40, 30), (250, 250, 250))
    shown.paste((190, 110, 170), (0, 0, 16, 30))
    same, other = (Image.new("RGB", (64, 64), colour) for colour in [(190, 110, 170), (120, 170, 190)])
    white, grey = (Image.new("RGB", (64, 64), colour) for colour in [(250, 250, 250), (225, 225, 225)])

    def misleads(number, image, verdict):
        glass = Glass(Thumbnail(shown, 8.0), grid(5, 4, 64), 64, 30.0)
        assert glass.blank[number] == (number % 5 == 4)
        glass.compare(number, image, verdict)
        return glass.misleads

    assert not misleads(0, same, "kept")
    assert misleads(0, other, "kept")
    assert not misleads(4, white, "low_saturation")
    assert misleads(4, grey, "low_saturation")
    assert misleads(4, white, "kept")


def test_without_coarse_level_every_tile_is_read(tmp_path):
    with open_slide(write_plain(tmp_path / "a.tif", draw())) as slide:
        assert read_thumbnail(slide, plan_tiles(slide, 0.5, 0.5, 32)) is None


def test_guess_of_a_slide_without_glass_skips_nothing():
    thumbnail = Image.new("RGB", (40, 40), (190, 110, 170))
    coords = np.array([[0, 0], [64, 0], [128, 128]])
    glass = Glass(Thumbnail(thumbnail, 8.0), coords, 64, 30.0)
    assert not glass.blank.any()
    assert len(glass.to_check) == 0
