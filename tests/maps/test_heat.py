import numpy as np
import pytest
import shapely
from tests.maps.aligned import HEIGHT, SHAPES, WIDTH, Cutting, cut, iou, scaled

from its2clr.maps.bag_panels import fill
from its2clr.maps.heat import Window, colour, heat
from its2clr.maps.regions import find_regions
from its2clr.run.scores import BagScores

WHOLE = Window(0, 0, WIDTH, HEIGHT)


def make_scores(coords, probabilities, side):
    return BagScores("b", 0.5, np.array(probabilities, float), np.array(coords, np.int64).reshape(-1, 2), side, None)


def slow_heat(scores, window, out):
    """Pixel by pixel, tile by tile."""
    found = np.full((out[1], out[0]), np.nan)
    wide, high = window.width / out[0], window.height / out[1]
    for row in range(out[1]):
        for column in range(out[0]):
            left, top = window.x + column * wide, window.y + row * high
            total = covered = 0.0
            for (x, y), probability in zip(scores.coords.tolist(), scores.instances, strict=True):
                across = min(left + wide, x + scores.side) - max(left, x)
                down = min(top + high, y + scores.side) - max(top, y)
                if across > 0 and down > 0:
                    covered += across * down / (wide * high)
                    total += probability * across * down / (wide * high)
            if covered >= min(0.5, scores.side**2 / (wide * high) / 4) - 1e-9:
                found[row, column] = total / covered
    return found


@pytest.mark.parametrize("out", [(40, 30), (17, 11), (7, 5), (80, 90)])
@pytest.mark.parametrize("side", [3, 8, 16])
def test_heat_is_the_mean_of_tiles_by_area(out, side):
    rng = np.random.default_rng(side)
    scores = make_scores(rng.integers(-10, 45, (30, 2)), rng.random(30), side)
    window = Window(3, -2, 40, 30)
    np.testing.assert_allclose(heat(scores, window, out), slow_heat(scores, window, out), atol=1e-8)


def test_a_pixel_of_level_0_is_in_a_tile_or_not():
    scores = make_scores([(10, 20), (14, 20)], [0.2, 0.8], 4)
    found = heat(scores, Window(8, 19, 12, 6), (12, 6))
    expected = np.full((6, 12), np.nan)
    expected[1:5, 2:6], expected[1:5, 6:10] = 0.2, 0.8
    np.testing.assert_array_equal(found, expected)


def test_no_tile_no_value():
    assert np.isnan(heat(make_scores([(0, 0)], [1], 8), Window(8, 0, 8, 8), (4, 4))).all()


def test_tiles_smaller_than_a_pixel_are_still_seen():
    for x, y in np.random.default_rng(0).integers(0, 950, (50, 2)).tolist():
        found = heat(make_scores([(x, y)], [0.7], 7), Window(0, 0, 1000, 1000), (10, 10))
        assert np.nanmax(found) == 0.7


def test_a_mean_on_the_threshold_is_seen():
    coords = [(x, y) for x in range(0, 60, 3) for y in range(0, 60, 3)]
    for threshold in (0.1, 0.2, 0.3, 0.7):
        found = heat(make_scores(coords, [threshold] * len(coords), 9), Window(0, 0, 60, 60), (23, 23))
        assert (colour(found, threshold)[..., 3] == 255).all()


def test_colours_are_fixed_and_transparent_below_the_threshold():
    values = np.array([np.nan, 0.0, 0.19999, 0.2, 0.6, 1.0])
    found = colour(values, 0.2)
    assert found[:, 3].tolist() == [0, 0, 0, 255, 255, 255]
    assert not found[:3].any()
    brightness = found[3:, :3] @ np.array([0.2126, 0.7152, 0.0722])
    assert (np.diff(brightness) > 0).all()  # brighter is higher, also without colours
    np.testing.assert_array_equal(colour(values[3:], 0.0), found[3:])


@pytest.fixture
def cutting(cut_slide):
    return cut_slide.best.bag("bag")


def test_the_map_lies_on_the_shapes_at_every_scale(cutting):
    for out in [(WIDTH, HEIGHT), (600, 470), (333, 261), (1500, 1174)]:
        shapes = fill(scaled(SHAPES, out[0] / WIDTH, out[1] / HEIGHT), out)
        assert iou(np.nan_to_num(heat(cutting, WHOLE, out)) >= 0.5, shapes) >= 0.95


def test_a_part_of_the_map_is_that_part(cutting):
    whole = heat(cutting, WHOLE, (WIDTH, HEIGHT))
    part = heat(cutting, Window(301, 217, 300, 400), (300, 400))
    np.testing.assert_array_equal(part, whole[217:617, 301:601])


def test_regions_are_the_map_to_the_pixel(cutting):
    found = shapely.multipolygons([region.polygon for region in find_regions(cutting, 0.5)])
    assert found.is_valid
    assert len(found.geoms) == 2
    assert len(found.geoms[0].interiors) + len(found.geoms[1].interiors) == 1
    assert shapely.area(found & SHAPES) / shapely.area(found | SHAPES) >= 0.95
    on_map = np.nan_to_num(heat(cutting, WHOLE, (WIDTH, HEIGHT))) >= 0.5
    np.testing.assert_array_equal(fill(found, (WIDTH, HEIGHT)), on_map)


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.9])
def test_regions_of_many_pieces_are_the_map_to_the_pixel(threshold, monkeypatch):
    rng = np.random.default_rng(1)
    coords = rng.integers(0, 300, (120, 2))
    scores = make_scores(coords, rng.random(120), 24)
    on_map = np.nan_to_num(heat(scores, Window(0, 0, 330, 330), (330, 330))) >= threshold
    whole = find_regions(scores, threshold)
    monkeypatch.setattr("its2clr.maps.regions._MOST_CELLS", 400)
    halved = find_regions(scores, threshold)
    for found in (whole, halved):
        np.testing.assert_array_equal(fill(shapely.multipolygons([one.polygon for one in found]), (330, 330)), on_map)
    assert [(*one.polygon.bounds, one.tiles) for one in whole] == [(*one.polygon.bounds, one.tiles) for one in halved]
    np.testing.assert_allclose([one.mean for one in whole], [one.mean for one in halved])


def test_regions_know_their_tiles_and_probabilities():
    scores = make_scores([(0, 0), (8, 0), (8, 8), (40, 0)], [0.9, 0.6, 0.2, 0.7], 8)
    left, right = find_regions(scores, 0.5)
    assert left.polygon.equals(shapely.box(0, 0, 16, 8))
    assert (left.mean, left.highest, left.tiles) == (0.75, 0.9, 2)
    assert (right.mean, right.highest, right.tiles) == (0.7, 0.7, 1)
    assert find_regions(scores, 0.95) == []


@pytest.mark.parametrize("overlap", [0, 8])
def test_shapes_on_the_grid_are_found_whole(tmp_path, overlap):
    area = shapely.union_all([shapely.box(320, 160, 640, 800), shapely.box(800, 640, 1120, 864)])
    scores = cut(tmp_path, Cutting(0.25, 0.5, 16, overlap), area, min_covered=1.0).best.bag("bag")
    assert scores.side == 32
    found = shapely.union_all([region.polygon for region in find_regions(scores, 1e-6)])
    assert found.equals(area)
    on_map = np.nan_to_num(heat(scores, WHOLE, (WIDTH, HEIGHT))) > 0
    np.testing.assert_array_equal(on_map, fill(area, (WIDTH, HEIGHT)))
    if not overlap:
        assert shapely.union_all([region.polygon for region in find_regions(scores, 1.0)]).equals(area)
