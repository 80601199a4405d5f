from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from its2clr.cohort import Cohort
from its2clr.cohort.canvas import open_canvas
from its2clr.cohort.slides import SlideSettings, pack_slides, read_slide_manifest
from its2clr.cohort.slides.slide_image import SlideProblem
from its2clr.cohort.tiles import decode


def test_tiles_are_put_where_they_were(tiny_cohort):
    cohort = Cohort.open(tiny_cohort)
    tiles = cohort.tile_file(cohort.bags["bag_id"][0])
    side = tiles.tile_size_level0
    with open_canvas(tiles) as canvas:
        assert not canvas.is_slide
        assert canvas.size == tuple((tiles.coords.max(axis=0) + side).tolist())
        for number, (x, y) in enumerate(tiles.coords.tolist()):
            found = canvas.read(x, y, side, side, (side, side))
            np.testing.assert_array_equal(found, decode(tiles.encoded(number)))
        outside = canvas.read(-50, -50, 40, 40, (7, 9))
        assert outside.size == (7, 9)
        assert outside.getextrema() == ((255, 255),) * 3


@pytest.fixture(scope="module")
def slide_cohort(tmp_path_factory):
    import tifffile

    folder = tmp_path_factory.mktemp("slides")
    y, x = np.mgrid[:600, :800]
    image = np.stack([200 + 0 * x, x // 4, y // 4], axis=-1).astype(np.uint8)
    rows = ["bag_id,file,label,split"]
    for number, split in enumerate(["train", "train", "val", "val", "test", "test"]):
        with tifffile.TiffWriter(folder / f"{number}.tiff") as file:
            for level in range(3):
                pixels = np.array(Image.fromarray(image).resize((800 >> level, 600 >> level), Image.Resampling.BOX))
                file.write(
                    pixels, photometric="rgb", tile=(128, 128), subfiletype=int(level > 0),
                    resolution=(10000 * 2**-level / 0.5, 10000 * 2**-level / 0.5), resolutionunit="CENTIMETER",
                )  # fmt: skip
        rows.append(f"s{number},{number}.tiff,{number % 2},{split}")
    (folder / "slides.csv").write_text("\n".join(rows))
    settings = SlideSettings(mpp=1.0, tile_size=32, min_saturation=0)
    pack_slides(read_slide_manifest(folder / "slides.csv"), folder / "cohort", settings, workers=1)
    return Cohort.open(folder / "cohort"), image


def test_a_slide_is_read_at_any_scale(slide_cohort):
    cohort, image = slide_cohort
    with open_canvas(cohort.tile_file("s0")) as canvas:
        assert canvas.is_slide
        assert canvas.size == (800, 600)
        np.testing.assert_array_equal(canvas.read(100, 50, 64, 32, (64, 32)), image[50:82, 100:164])
        for out in [(400, 300), (200, 150), (80, 60), (1600, 1200)]:
            expected = Image.fromarray(image).resize(out, Image.Resampling.BOX)
            difference = np.abs(np.asarray(canvas.read(0, 0, 800, 600, out), int) - np.asarray(expected, int))
            assert difference.max() <= 2


def test_a_slide_that_went_away_leaves_its_tiles(slide_cohort):
    cohort, _ = slide_cohort
    tiles = cohort.tile_file("s1")
    Path(tiles.source).unlink()
    with open_canvas(tiles) as canvas:
        assert not canvas.is_slide
        assert canvas.read(0, 0, 64, 64, (32, 32)).size == (32, 32)


def test_a_slide_that_fails_while_it_is_read_says_so(slide_cohort):
    cohort, _ = slide_cohort
    with pytest.raises(SlideProblem, match="torn"), open_canvas(cohort.tile_file("s0")):
        raise SlideProblem("torn")
