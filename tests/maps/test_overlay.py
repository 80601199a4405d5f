import subprocess
import sys
from xml.etree import ElementTree as ET

import numpy as np
import openslide
import pytest
import tifffile
from tests.end_to_end.commands import environment
from tests.maps.aligned import HEIGHT, SHAPES, WIDTH, iou, scaled

from its2clr.errors import InputError
from its2clr.maps.bag_panels import fill
from its2clr.maps.heat import Window, colour, heat
from its2clr.maps.overlay import Ground, choose_factor, write_overlay, write_probability
from its2clr.run.scores import BagScores

OME = {"ome": "http://www.openmicroscopy.org/Schemas/OME/2016-06"}


def make_scores(columns=40, rows=30, side=96, step=96, bag_id="b"):
    rng = np.random.default_rng(0)
    y, x = np.divmod(np.arange(columns * rows), columns)
    return BagScores(bag_id, 0.875, rng.random(columns * rows), np.stack([x, y], 1) * step, side, None)


def facts(xml):
    root = ET.fromstring(xml)
    return {entry.get("K"): entry.text for entry in root.iterfind(".//ome:MapAnnotation/ome:Value/ome:M", OME)}


def expected_level(scores, ground, level, threshold):
    """One raster for the whole level."""
    width, height = ground.levels()[level]
    step = ground.factor * 2**level
    return colour(heat(scores, Window(0, 0, width * step, height * step), (width, height)), threshold)


def test_every_level_lies_on_the_shapes(cut_slide, tmp_path):
    scores = cut_slide.best.bag("bag")
    for factor in (1, 2, 3):
        ground = Ground((WIDTH, HEIGHT), 0.25, factor)
        write_overlay(tmp_path / "a.ome.tiff", scores, ground, 0.5, "ItS2CLR")
        with tifffile.TiffFile(tmp_path / "a.ome.tiff") as file:
            levels = [level.asarray() for level in file.series[0].levels]
        for number, pixels in enumerate(levels):
            shapes = fill(scaled(SHAPES, 1 / (factor * 2**number)), pixels.shape[1::-1])
            assert iou(pixels[..., 3] > 0, shapes) >= 0.95


def test_tifffile_reads_pyramid_scale_and_facts(tmp_path):
    scores = make_scores()
    ground = Ground((3907, 2881), 0.2528, choose_factor(scores))
    assert ground.factor == 16
    ground = Ground(ground.size, ground.mpp_level0, 2)
    path = tmp_path / "a.ome.tiff"
    write_overlay(path, scores, ground, 0.3, "ItS2CLR without iteration")
    with tifffile.TiffFile(path) as file:
        assert file.is_ome
        assert len(file.series) == 1
        assert file.series[0].is_pyramidal
        assert [level.shape for level in file.series[0].levels] == [(1441, 1954, 4), (721, 977, 4), (361, 489, 4)]
        for number, level in enumerate(file.series[0].levels):
            assert level.keyframe.is_tiled
            assert level.keyframe.compression == tifffile.COMPRESSION.ADOBE_DEFLATE
            assert level.keyframe.subfiletype == int(number > 0)
            np.testing.assert_array_equal(level.asarray(), expected_level(scores, ground, number, 0.3))
            assert level.keyframe.get_resolution("micrometer")[0] == pytest.approx(1 / (0.2528 * 2 * 2**number))
        found = facts(file.ome_metadata)
        pixels = ET.fromstring(file.ome_metadata).find(".//ome:Pixels", OME)
    assert float(pixels.get("PhysicalSizeX")) == float(pixels.get("PhysicalSizeY")) == pytest.approx(0.5056)
    assert pixels.get("PhysicalSizeXUnit") == "µm"
    assert found["level-0 pixels per pixel"] == "2"
    assert (found["level-0 width"], found["level-0 height"]) == ("3907", "2881")
    assert (found["bag"], found["model"], found["threshold"]) == ("b", "ItS2CLR without iteration", "0.3")


def test_openslide_reads_all_levels_and_the_same_pixels(tmp_path):
    scores = make_scores(20, 15)
    ground = Ground((1995, 1503), 0.25, 1)
    write_overlay(tmp_path / "a.ome.tiff", scores, ground, 0.2, "ItS2CLR")
    with openslide.OpenSlide(tmp_path / "a.ome.tiff") as slide:
        assert slide.properties["openslide.vendor"] == "generic-tiff"
        assert slide.level_dimensions == tuple(ground.levels())
        assert len(ground.levels()) == 3
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(0.25)
        # QuPath cuts slides to their bounds if there are any, which would shift the overlay
        assert "openslide.bounds-x" not in slide.properties
        for number, size in enumerate(slide.level_dimensions):
            found = np.asarray(slide.read_region((0, 0), number, size))
            np.testing.assert_array_equal(found, expected_level(scores, ground, number, 0.2))


def test_probabilities_are_kept_as_they_are(tmp_path):
    scores = make_scores(columns=7, rows=5, side=10, step=12)
    write_probability(tmp_path / "a.ome.tiff", scores, Ground((90, 66), float("nan"), 1), "ItS2CLR")
    with tifffile.TiffFile(tmp_path / "a.ome.tiff") as file:
        pixels = file.asarray()
        assert "PhysicalSizeX" not in file.ome_metadata
    assert (pixels.shape, pixels.dtype) == ((66, 90), np.float32)
    np.testing.assert_array_equal(pixels, np.nan_to_num(heat(scores, Window(0, 0, 90, 66), (90, 66))).astype("f4"))
    assert pixels[11, 0] == 0  # between tiles


def test_the_factor_keeps_edges_of_tiles_on_pixels():
    assert choose_factor(make_scores(side=448, step=448)) == 16
    assert choose_factor(make_scores(side=448, step=420)) == 14
    assert choose_factor(make_scores(side=439, step=439)) == 8  # nothing fits but 1
    with pytest.raises(InputError, match="1 or more"):
        Ground((10, 10), 0.25, 0)


def test_the_same_scores_give_the_same_bytes_and_any_name_is_whole_xml(tmp_path):
    scores = make_scores(columns=3, rows=3, bag_id="<b> & \"'é\u2603 \x08")
    for name in "ab":
        write_overlay(tmp_path / name, scores, Ground((288, 288), 0.5, 4), 0.2, "A & B")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with tifffile.TiffFile(tmp_path / "a") as file:
        assert facts(file.ome_metadata)["bag"] == "<b> & \"'é\u2603 \ufffd"


STREAMED = """
import resource, sys
from pathlib import Path
import numpy as np
from its2clr.maps.overlay import Ground, write_overlay
from its2clr.run.scores import BagScores

place = np.arange(0, 2560, 128)
corner = np.stack(np.meshgrid(place, place), -1).reshape(-1, 2)
coords = np.concatenate([corner, corner + 57_344])
scores = BagScores("b", 0.5, np.random.default_rng(0).random(len(coords)), coords, 128, None)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_overlay(Path(sys.argv[1]), scores, Ground((60_000, 60_000), 0.25, 1), 0.2, "m")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_memory_does_not_grow_with_the_slide(tmp_path):
    """The raster alone would be 14.4 GB."""
    words = [sys.executable, "-c", STREAMED, str(tmp_path / "a.ome.tiff")]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True)
    assert float(done.stdout) < 200
    with openslide.OpenSlide(tmp_path / "a.ome.tiff") as slide:
        assert slide.dimensions == (60_000, 60_000)
        assert slide.level_count == 8
        assert np.asarray(slide.read_region((57_344, 57_344), 0, (64, 64)))[..., 3].any()
        assert not np.asarray(slide.read_region((30_000, 30_000), 0, (64, 64))).any()
