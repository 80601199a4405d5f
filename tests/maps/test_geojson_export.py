import json
import math
from itertools import pairwise

import geopandas
import numpy as np
import pytest
import shapely
from tests.maps.aligned import SHAPES

from its2clr.cohort.slides.annotations import read_annotations
from its2clr.errors import InputError
from its2clr.maps.geojson_export import write_geojson, write_geojsons
from its2clr.run.scores import BagScores


def make_scores(coords, probabilities, side=8, bag_id="b"):
    return BagScores(bag_id, 0.5, np.array(probabilities, float), np.array(coords, np.int64), side, None)


def signed_area(ring):
    return sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in pairwise(ring)) / 2


def check_rfc7946(document):
    """What RFC 7946 says of a FeatureCollection of polygons, rule by rule."""
    assert set(document) == {"type", "features"}  # no `crs`, section 4; no members of other types, section 7.1
    assert document["type"] == "FeatureCollection"
    assert isinstance(document["features"], list)
    for feature in document["features"]:
        assert feature["type"] == "Feature"
        assert isinstance(feature["properties"], dict)
        assert not {"coordinates", "geometries", "features"} & set(feature)
        geometry = feature["geometry"]
        assert set(geometry) == {"type", "coordinates"}
        assert geometry["type"] == "Polygon"
        assert geometry["coordinates"]
        for number, ring in enumerate(geometry["coordinates"]):
            assert len(ring) >= 4
            assert ring[0] == ring[-1]
            for position in ring:
                assert len(position) == 2
                assert all(type(value) in (int, float) and math.isfinite(value) for value in position)
            area = signed_area(ring)
            assert area > 0 if number == 0 else area < 0  # the right-hand rule: outside is counterclockwise
        assert shapely.geometry.shape(geometry).is_valid


def check_qupath(document):
    """What QuPath 0.4 to 0.6 reads of a feature."""
    for feature in document["features"]:
        properties = feature["properties"]
        assert properties["objectType"] in {"annotation", "tile"}
        assert properties["classification"]["name"] in {"Positive", "Negative"}
        colour = properties["classification"]["color"]
        assert len(colour) == 3
        assert all(type(part) is int and 0 <= part <= 255 for part in colour)
        for name, value in properties["measurements"].items():
            assert isinstance(name, str)
            assert type(value) in (int, float)


def no_constants(name):
    raise AssertionError(f"{name} is no JSON")


def load(path):
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=no_constants)


def parts(document, kind):
    return [feature for feature in document["features"] if feature["properties"]["objectType"] == kind]


def union(features):
    return shapely.union_all([shapely.geometry.shape(feature["geometry"]) for feature in features])


def test_regions_lie_on_the_shapes_and_come_back_from_geopandas_and_our_own_reader(cut_slide, tmp_path):
    write_geojsons(cut_slide, ["bag"], cut_slide.models, tmp_path, threshold=0.5)
    path = tmp_path / "bag.geojson"
    document = load(path)
    check_rfc7946(document)
    check_qupath(document)
    regions, tiles = parts(document, "annotation"), parts(document, "tile")
    scores = cut_slide.best.bag("bag")
    found = union(regions)
    assert shapely.area(found & SHAPES) / shapely.area(found | SHAPES) >= 0.95
    assert len(tiles) == len(scores.coords)

    table = geopandas.read_file(path)
    assert table.geometry.is_valid.all()
    areas = [shapely.geometry.shape(feature["geometry"]).area for feature in document["features"]]
    np.testing.assert_array_equal(shapely.area(table.geometry.array), areas)
    table.to_file(tmp_path / "again.geojson", driver="GeoJSON")
    again = geopandas.read_file(tmp_path / "again.geojson")
    np.testing.assert_array_equal(shapely.area(again.geometry.array), areas)

    mpp = float(cut_slide.places["bag"].tiles().attributes["mpp_level0"])
    for feature in regions:
        microns = shapely.geometry.shape(feature["geometry"]).area * mpp**2
        assert feature["properties"]["measurements"]["area um^2"] == pytest.approx(microns, abs=1e-3)

    write_geojsons(cut_slide, ["bag"], cut_slide.models, tmp_path / "regions", threshold=0.5, only="regions")
    read = read_annotations(tmp_path / "regions" / "bag.geojson", classes=["Positive"]).tumour
    assert read.equals(found)


def test_tiles_carry_every_model_and_the_first_one_decides(tmp_path):
    coords = [(0, 0), (8, 0), (16, 0)]
    models = {"refined": make_scores(coords, [0.9, 0.5, 0.1]), "start": make_scores(coords, [0.1, 0.2, 0.75])}
    write_geojson(tmp_path / "a.geojson", models, 0.5)
    document = load(tmp_path / "a.geojson")
    check_rfc7946(document)
    check_qupath(document)
    (region,) = parts(document, "annotation")
    assert region["properties"]["measurements"] == {
        "refined mean probability": 0.7,
        "refined max probability": 0.9,
        "tiles": 2,
    }
    assert region["properties"]["classification"]["name"] == "Positive"
    tiles = [feature["properties"] for feature in parts(document, "tile")]
    assert [tile["classification"]["name"] for tile in tiles] == ["Positive", "Positive", "Negative"]
    assert [tile["measurements"] for tile in tiles] == [
        {"refined probability": 0.9, "start probability": 0.1},
        {"refined probability": 0.5, "start probability": 0.2},
        {"refined probability": 0.1, "start probability": 0.75},
    ]


def test_holes_are_kept_and_corners_do_not_join(tmp_path):
    ring = [(x, y) for x in (0, 8, 16) for y in (0, 8, 16) if (x, y) != (8, 8)]
    coords = [*ring, (24, 24), (32, 32)]
    write_geojson(tmp_path / "a.geojson", {"m": make_scores(coords, [1] * len(coords))}, 0.5, only="regions")
    document = load(tmp_path / "a.geojson")
    check_rfc7946(document)
    first, *others = (feature["geometry"]["coordinates"] for feature in document["features"])
    assert len(first) == 2
    assert signed_area(first[0]) == 24 * 24
    assert signed_area(first[1]) == -8 * 8
    assert [signed_area(rings[0]) for rings in others] == [64, 64]


def test_the_same_scores_give_the_same_bytes_in_any_order_of_time(tmp_path):
    rng = np.random.default_rng(0)
    models = {"m": make_scores(rng.integers(0, 400, (200, 2)), rng.random(200), 24)}
    for name in "ab":
        write_geojson(tmp_path / name, models, 0.5, 0.25)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    check_rfc7946(load(tmp_path / "a"))


def test_nothing_positive_is_still_a_file(tmp_path):
    write_geojson(tmp_path / "a.geojson", {"m": make_scores([(0, 0)], [0.1])}, 0.5, only="regions")
    assert load(tmp_path / "a.geojson") == {"type": "FeatureCollection", "features": []}


def test_a_threshold_is_a_probability(tmp_path):
    with pytest.raises(InputError, match="from 0 to 1, got 50"):
        write_geojson(tmp_path / "a.geojson", {"m": make_scores([(0, 0)], [0.1])}, 50)
    assert not list(tmp_path.iterdir())
