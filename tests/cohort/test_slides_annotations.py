import json
import struct

import numpy as np
import pytest
import shapely
import tifffile
from PIL import Image

from its2clr.cohort.slides import masks
from its2clr.cohort.slides.annotations import read_annotations
from its2clr.cohort.slides.ground_truth import covered_share, instance_labels
from its2clr.errors import InputError

SQUARE = [(0, 0), (100, 0), (100, 100), (0, 100)]
INNER = [(25, 25), (75, 25), (75, 75), (25, 75)]
FAR = [(1000, 0), (1050, 0), (1050, 50), (1000, 50)]
BOW_TIE = [(0, 0), (100, 100), (100, 0), (0, 100)]  # two triangles of 2500 each


def asap(tmp_path, *annotations, groups=""):
    """`annotations` are (group, points) or (group, points, type)."""
    parts = []
    for group, points, *kind in annotations:
        listed = "".join(f'<Coordinate Order="{i}" X="{x}" Y="{y}" />' for i, (x, y) in enumerate(points))
        attributes = f'Name="A" Type="{kind[0] if kind else "Polygon"}" PartOfGroup="{group}" Color="#F4FA58"'
        parts.append(f"<Annotation {attributes}><Coordinates>{listed}</Coordinates></Annotation>")
    text = f"<Annotations>{''.join(parts)}</Annotations><AnnotationGroups>{groups}</AnnotationGroups>"
    return write(tmp_path / "a.xml", f'<?xml version="1.0"?>\n<ASAP_Annotations>{text}</ASAP_Annotations>')


def imagescope(tmp_path, *layers):
    """`layers` are (name, regions), `regions` (points, negative) or (points, negative, type)."""
    parts = []
    for number, (name, regions) in enumerate(layers, start=1):
        listed = ""
        for count, (points, negative, *kind) in enumerate(regions, start=1):
            vertices = "".join(f'<Vertex X="{x}" Y="{y}" Z="0" />' for x, y in points)
            attributes = f'Id="{count}" Type="{kind[0] if kind else 0}" NegativeROA="{negative}"'
            listed += f"<Region {attributes}><Attributes/><Vertices>{vertices}</Vertices></Region>"
        parts.append(f'<Annotation Id="{number}" Name="{name}"><Attributes/><Regions>{listed}</Regions></Annotation>')
    return write(tmp_path / "a.xml", f'<Annotations MicronsPerPixel="0.25">{"".join(parts)}</Annotations>')


def feature(kind, coordinates, classification=None):
    properties = {"objectType": "annotation"}
    if classification is not None:
        properties["classification"] = classification
    return {"type": "Feature", "geometry": {"type": kind, "coordinates": coordinates}, "properties": properties}


def ring(points):
    return [list(point) for point in [*points, points[0]]]


def geojson(tmp_path, value):
    return write(tmp_path / "a.geojson", json.dumps(value))


def write(path, text):
    path.write_text(text)
    return path


TUMOUR = {"name": "Tumor", "color": [200, 0, 0]}


class TestAsap:
    def test_camelyon16_groups_less_exclusion(self, tmp_path):
        path = asap(tmp_path, ("_0", SQUARE), ("_1", FAR), ("_2", INNER))
        assert read_annotations(path).tumour.area == 100**2 + 50**2 - 50**2
        path = asap(tmp_path, ("Exclusion", INNER), ("Tumor", SQUARE))
        tumour = read_annotations(path).tumour
        assert tumour.area == 7500
        assert len(tumour.interiors) == 1
        assert not tumour.contains(shapely.Point(50, 50))

    def test_camelyon17_groups(self, tmp_path):
        path = asap(tmp_path, ("metastases", SQUARE), ("normal", INNER))
        assert read_annotations(path).tumour.area == 7500

    def test_overlapping_outlines_count_once(self, tmp_path):
        shifted = [(x + 50, y) for x, y in SQUARE]
        assert read_annotations(asap(tmp_path, ("Tumor", SQUARE), ("Tumor", shifted))).tumour.area == 15000

    def test_exclusion_reaching_outside(self, tmp_path):
        shifted = [(x + 50, y) for x, y in SQUARE]
        assert read_annotations(asap(tmp_path, ("_0", SQUARE), ("_2", shifted))).tumour.area == 5000

    def test_points_are_taken_by_their_order(self, tmp_path):
        text = asap(tmp_path, ("Tumor", SQUARE)).read_text()
        swapped = text.replace('Order="1"', 'Order="x"').replace('Order="2"', 'Order="1"').replace('"x"', '"2"')
        tumour = read_annotations(write(tmp_path / "a.xml", swapped))
        assert any("crosses" in note for note in tumour.notes)  # 0, 2, 1, 3 is a bow tie

    def test_a_group_takes_the_meaning_of_its_parent(self, tmp_path):
        groups = '<Group Name="macro" PartOfGroup="Tumor"/><Group Name="Tumor" PartOfGroup="None"/>'
        assert read_annotations(asap(tmp_path, ("macro", SQUARE), groups=groups)).tumour.area == 10000

    def test_groups_in_a_circle_end(self, tmp_path):
        groups = '<Group Name="a" PartOfGroup="b"/><Group Name="b" PartOfGroup="a"/>'
        with pytest.raises(InputError, match="'a'"):
            read_annotations(asap(tmp_path, ("a", SQUARE), groups=groups))

    def test_unknown_groups_are_named(self, tmp_path):
        path = asap(tmp_path, ("Tumor", SQUARE), ("Stroma", FAR), ("None", INNER))
        with pytest.raises(InputError, match=r"a\.xml: .*'Stroma', \(no class\); name the classes"):
            read_annotations(path)

    def test_classes_say_what_counts(self, tmp_path):
        path = asap(tmp_path, ("DCIS", SQUARE), ("Stroma", FAR), ("Exclusion", INNER))
        annotations = read_annotations(path, classes=["dcis"])
        assert annotations.tumour.area == 7500
        assert any("'Stroma'" in note for note in annotations.notes)
        assert read_annotations(path, classes=["Exclusion"]).tumour.area == 2500

    def test_what_has_no_area_is_noted(self, tmp_path):
        path = asap(tmp_path, ("Tumor", SQUARE), ("Tumor", [(1, 1)], "Dot"), ("Tumor", [(1, 1), (2, 2)]))
        annotations = read_annotations(path)
        assert annotations.tumour.area == 10000
        assert len(annotations.notes) == 2

    def test_a_file_without_annotations(self, tmp_path):
        annotations = read_annotations(asap(tmp_path))
        assert annotations.tumour.is_empty
        assert annotations.notes == ("there are no annotated areas",)

    def test_self_intersection_is_repaired_and_noted(self, tmp_path):
        annotations = read_annotations(asap(tmp_path, ("Tumor", BOW_TIE)))
        assert annotations.tumour.is_valid
        assert annotations.tumour.area == pytest.approx(5000)
        assert "annotation 1 ('A') crosses or touches itself" in annotations.notes[0]

    def test_utf16(self, tmp_path):
        path = asap(tmp_path, ("Tumor", SQUARE))
        path.write_bytes(path.read_text().replace('"1.0"', '"1.0" encoding="utf-16"', 1).encode("utf-16"))
        assert read_annotations(path).tumour.area == 10000


class TestImageScope:
    def test_negative_regions_are_taken_away(self, tmp_path):
        path = imagescope(tmp_path, ("", [(SQUARE, 0), (INNER, 1)]))
        assert read_annotations(path).tumour.area == 7500

    def test_negative_regions_act_in_their_layer(self, tmp_path):
        path = imagescope(tmp_path, ("Tumor", [(SQUARE, 0)]), ("Tumour", [(FAR, 0), (INNER, 1)]))
        assert read_annotations(path).tumour.area == 12500

    def test_unnamed_layers_all_count(self, tmp_path):
        path = imagescope(tmp_path, ("", [(SQUARE, 0)]), ("Layer 2", [(FAR, 0)]), ("", []))
        annotations = read_annotations(path)
        assert annotations.tumour.area == 12500
        assert "all count as tumour" in annotations.notes[-1]

    def test_layers_by_name(self, tmp_path):
        path = imagescope(tmp_path, ("Tumor", [(SQUARE, 0)]), ("Necrosis", [(FAR, 0)]))
        with pytest.raises(InputError, match="'Necrosis'"):
            read_annotations(path)
        assert read_annotations(path, classes=["Necrosis"]).tumour.area == 2500

    def test_rectangles_and_ellipses_by_two_corners(self, tmp_path):
        corners = [(10, 20), (110, 70)]
        assert read_annotations(imagescope(tmp_path, ("", [(corners, 0, 1)]))).tumour.area == 5000
        ellipse = read_annotations(imagescope(tmp_path, ("", [(corners, 0, 2)]))).tumour
        assert ellipse.area == pytest.approx(np.pi * 50 * 25, rel=1e-3)
        assert ellipse.bounds == pytest.approx((10, 20, 110, 70))

    def test_lines_are_noted(self, tmp_path):
        annotations = read_annotations(imagescope(tmp_path, ("", [(SQUARE, 0), (INNER, 0, 4), ([(0, 0)], 0, 3)])))
        assert annotations.tumour.area == 10000
        assert sum("line" in note for note in annotations.notes) == 2


class TestGeoJson:
    @pytest.mark.parametrize(
        "wrap", [lambda f: f, lambda f: [f], lambda f: {"type": "FeatureCollection", "features": [f]}]
    )
    @pytest.mark.parametrize("name", [TUMOUR, "Tumor", {"names": ["Tumor"]}, None])
    def test_wrappings_and_class_names(self, tmp_path, wrap, name):
        path = geojson(tmp_path, wrap(feature("Polygon", [ring(SQUARE), ring(INNER)], name)))
        assert read_annotations(path).tumour.area == 7500

    def test_multipolygons_with_holes(self, tmp_path):
        path = geojson(tmp_path, feature("MultiPolygon", [[ring(SQUARE), ring(INNER)], [ring(FAR)]], TUMOUR))
        assert read_annotations(path).tumour.area == 10000

    def test_classes(self, tmp_path):
        features = [
            feature("Polygon", [ring(SQUARE)], TUMOUR),
            feature("Polygon", [ring(FAR)], {"name": "Stroma"}),
            feature("Polygon", [ring(INNER)], {"name": "Ignore*"}),
        ]
        path = geojson(tmp_path, features)
        with pytest.raises(InputError, match="'Stroma'"):
            read_annotations(path)
        assert read_annotations(path, classes=["Tumor"]).tumour.area == 7500
        assert read_annotations(path, classes=["tumor", "stroma"]).tumour.area == 10000

    def test_unclassified_beside_classified_is_an_error(self, tmp_path):
        path = geojson(tmp_path, [feature("Polygon", [ring(SQUARE)], TUMOUR), feature("Polygon", [ring(FAR)])])
        with pytest.raises(InputError, match=r"\(no class\)"):
            read_annotations(path)

    def test_collections_and_what_has_no_area(self, tmp_path):
        members = [
            {"type": "Polygon", "coordinates": [ring(SQUARE)]},
            {"type": "LineString", "coordinates": [[0, 0], [5, 5]]},
            {"type": "GeometryCollection", "geometries": [{"type": "Polygon", "coordinates": [ring(FAR)]}]},
        ]
        collection = feature("GeometryCollection", [], TUMOUR)
        collection["geometry"] = {"type": "GeometryCollection", "geometries": members}
        nothing = {"type": "Feature", "geometry": None, "properties": None}
        points = feature("MultiPoint", [[1, 1], [2, 2]], {"name": "Other"})
        annotations = read_annotations(geojson(tmp_path, [collection, points, points, nothing]))
        assert annotations.tumour.area == 12500
        assert any(note.startswith("2 x MultiPoint") for note in annotations.notes)

    def test_open_rings_and_third_coordinates(self, tmp_path):
        path = geojson(tmp_path, feature("Polygon", [[[x, y, 0] for x, y in SQUARE]], "tumour"))
        assert read_annotations(path).tumour.area == 10000

    def test_touching_repair(self, tmp_path):
        annotations = read_annotations(geojson(tmp_path, feature("Polygon", [ring(BOW_TIE)], TUMOUR)))
        assert annotations.tumour.area == pytest.approx(5000)
        assert "feature crosses" in annotations.notes[0]


BOMB = '<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "c">]><ASAP_Annotations>&b;</ASAP_Annotations>'


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.xml", "<ASAP_Annotations><Annotations>", "line 1, column 32: is not whole XML"),
        ("a.xml", "no xml", "line 1, column 1: is not whole XML"),
        ("a.xml", BOMB, r"document type \(a\)"),
        ("a.xml", "<svg/>", "its root is 'svg', expected ASAP_Annotations"),
        (
            "a.xml",
            '<ASAP_Annotations><Annotation Name="x" Type="Polygon"/></ASAP_Annotations>',
            r"annotation 1 \('x'\)",
        ),
        ("a.geojson", '{"type": "Feature", ', "line 1, column 21: is not whole JSON"),
        ("a.geojson", '{"kind": 1}', "the file: is no GeoJSON object"),
        ("a.geojson", "[1]", "feature 1: is no GeoJSON object"),
        ("a.geojson", '{"type": "FeatureCollection"}', "'features' is not a list"),
        ("a.geojson", '[{"type": "Feature", "geometry": {"type": "Blob"}}]', "feature 1: is no GeoJSON geometry"),
        ("a.geojson", '{"type": "Polygon", "coordinates": 3}', "Polygon has no list of coordinates"),
        ("a.geojson", '{"type": "Polygon", "coordinates": [[[0, 0], [1]]]}', "ring 1: is no list of x, y pairs"),
        ("a.geojson", '{"type": "Polygon", "coordinates": [[[0, 0], [1, NaN]]]}', "not finite"),
        ("a.geojson", '{"type": "MultiPolygon", "coordinates": [1]}', "part 1: is no list of rings"),
        ("a.geojson", '{"type": "Polygon", "properties": {"classification": 3}}', "'classification' is no name"),
        ("a.txt", "hello", "no file of annotations that is known"),
        ("a.xml", "", "the file is empty"),
        ("a.png", "\x89PNG broken", "is no file of annotations|cannot be decoded"),
    ],
)
def test_malformed_files_say_where(tmp_path, name, text, message):
    with pytest.raises(InputError, match=message) as caught:
        read_annotations(write(tmp_path / name, text))
    assert str(tmp_path / name) in str(caught.value)
    assert ";" in str(caught.value)  # what to do


@pytest.mark.parametrize("value", ["nan", "inf", "12,5", ""])
def test_coordinates_that_are_no_numbers(tmp_path, value):
    path = asap(tmp_path, ("Tumor", [*SQUARE[:3], (value, 1)]))
    with pytest.raises(InputError, match=r"annotation 1 \('A'\), coordinate 4"):
        read_annotations(path)
    path = imagescope(tmp_path, ("", [([*SQUARE[:3], (1, value)], 0)]))
    with pytest.raises(InputError, match="layer 1, region 1, vertex 4"):
        read_annotations(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        read_annotations(tmp_path / "no.xml")


def random_mask(seed=0, shape=(40, 60), density=0.5):
    return np.random.default_rng(seed).random(shape) < density


class TestMasks:
    @pytest.mark.parametrize("seed", range(5))
    def test_outline_is_exact(self, seed):
        mask = random_mask(seed, density=0.2 + 0.15 * seed)
        outline = masks.mask_polygons(mask)
        assert outline.is_valid
        assert outline.area == mask.sum()
        y, x = np.mgrid[: mask.shape[0], : mask.shape[1]]
        covered = covered_share(outline, np.stack([x.ravel(), y.ravel()], 1), 1.0)
        np.testing.assert_array_equal(covered.reshape(mask.shape), mask)

    def test_rings_in_rings(self):
        mask = np.zeros((11, 11), bool)
        mask[1:10, 1:10] = True
        mask[3:8, 3:8] = False
        mask[5, 5] = True
        outline = masks.mask_polygons(mask)
        assert sorted(len(part.interiors) for part in outline.geoms) == [0, 1]
        assert outline.area == 81 - 25 + 1

    @pytest.mark.parametrize("value", [1, 255])
    def test_png_scale(self, tmp_path, value):
        mask = np.zeros((20, 30), np.uint8)
        mask[5:10, 10:20] = value
        Image.fromarray(mask).save(tmp_path / "m.png")
        annotations = read_annotations(tmp_path / "m.png", 32)
        assert annotations.tumour.bounds == (320, 160, 640, 320)
        assert annotations.tumour.area == 50 * 32**2
        assert annotations.notes == ()
        sized = read_annotations(tmp_path / "m.png", level0_size=(30 * 32 - 5, 20 * 32 + 7))
        assert sized.tumour.equals(annotations.tumour)

    @pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA"])
    def test_kinds_of_png(self, tmp_path, mode):
        mask = random_mask(3)
        Image.fromarray((mask * 255).astype(np.uint8)).convert(mode).save(tmp_path / "m.png")
        assert read_annotations(tmp_path / "m.png", 1.0).tumour.area == mask.sum()

    def test_pyramid_reads_one_level(self, tmp_path, monkeypatch):
        mask = np.kron(random_mask(1, (32, 48)), np.ones((8, 8))).astype(np.uint8)
        path = tmp_path / "m.tif"
        with tifffile.TiffWriter(path, bigtiff=True) as file:
            options = {"tile": (64, 64), "compression": "deflate", "photometric": "minisblack"}
            file.write(mask, subifds=2, **options)
            file.write(mask[::2, ::2], subfiletype=1, **options)
            file.write(mask[::4, ::4], subfiletype=1, **options)
        full = read_annotations(path, 2.0)
        assert full.tumour.area == mask.sum() * 4
        monkeypatch.setattr(masks, "_LARGEST_LEVEL", mask.size // 16)
        coarse = read_annotations(path, 2.0)
        assert "level 2 of the mask was read, 96 x 64" in coarse.notes[0]
        assert coarse.tumour.equals(full.tumour)
        monkeypatch.setattr(masks, "_LARGEST_LEVEL", 10)
        with pytest.raises(InputError, match="too many to read; save it with a pyramid"):
            read_annotations(path, 2.0)

    def test_pyramid_of_plain_pages(self, tmp_path, monkeypatch):
        """As ASAP writes them: levels one after the other, none below another."""
        mask = np.kron(random_mask(1, (32, 48)), np.ones((8, 8))).astype(np.uint8)
        with tifffile.TiffWriter(tmp_path / "m.tif") as file:
            for step in (1, 2, 4):
                file.write(mask[::step, ::step], tile=(64, 64), photometric="minisblack", metadata=None)
        monkeypatch.setattr(masks, "_LARGEST_LEVEL", mask.size // 4)
        annotations = read_annotations(tmp_path / "m.tif", level0_size=(384, 256))
        assert "level 1" in annotations.notes[0]
        assert annotations.tumour.area == mask.sum()

    @pytest.mark.parametrize("options", [{}, {"tile": (16, 16)}, {"tile": (16, 16), "compression": "deflate"}])
    def test_a_truncated_tiff(self, tmp_path, options):
        path = tmp_path / "m.tif"
        tifffile.imwrite(path, random_mask(0, (200, 300)).astype(np.uint8), **options)
        path.write_bytes(path.read_bytes()[:-200])
        with pytest.raises(InputError, match="cannot be decoded"):
            read_annotations(path, 1.0)

    def test_a_tiff_that_lacks_tiles(self, tmp_path):
        path = tmp_path / "m.tif"
        tifffile.imwrite(path, np.zeros((64, 64), np.uint8), tile=(16, 16))
        with tifffile.TiffFile(path, mode="r+") as file:
            file.pages[0].tags["ImageLength"].overwrite(256)
        with pytest.raises(InputError, match="has 16 of 64 parts"):
            read_annotations(path, 1.0)

    def test_the_mask_is_read_once(self, tmp_path, monkeypatch):
        path = tmp_path / "m.tif"
        tifffile.imwrite(path, random_mask(2).astype(np.uint8))
        calls = []
        asarray = tifffile.TiffPageSeries.asarray
        monkeypatch.setattr(
            tifffile.TiffPageSeries, "asarray", lambda *a, **k: calls.append(1) or asarray(*a, **k), raising=True
        )
        assert read_annotations(path, 1.0).tumour.area == random_mask(2).sum()
        assert len(calls) == 1

    def test_values(self, tmp_path):
        mask = np.zeros((10, 10), np.uint8)
        mask[:2], mask[5] = 1, 2
        path = tmp_path / "m.png"
        Image.fromarray(mask).save(path)
        with pytest.raises(InputError, match="holds the values 0, 1, 2"):
            read_annotations(path, 1.0)
        assert read_annotations(path, 1.0, classes=["1"]).tumour.area == 20
        assert read_annotations(path, 1.0, classes=["1", "2"]).tumour.area == 30
        with pytest.raises(InputError, match="classes of a mask are values, got Tumor"):
            read_annotations(path, 1.0, classes=["Tumor"])

    @pytest.mark.parametrize(("fill", "note"), [(0, "empty"), (1, "inverted")])
    def test_suspicious_masks_are_noted(self, tmp_path, fill, note):
        Image.fromarray(np.full((9, 9), fill, np.uint8)).save(tmp_path / "m.png")
        annotations = read_annotations(tmp_path / "m.png", 4.0)
        assert annotations.tumour.area == fill * 36**2
        assert note in annotations.notes[0]

    def test_errors(self, tmp_path):
        path = tmp_path / "m.png"
        Image.fromarray(np.eye(8, dtype=np.uint8)).save(path)
        with pytest.raises(InputError, match="say how many slide pixels"):
            read_annotations(path)
        with pytest.raises(InputError, match="not the same shape"):
            read_annotations(path, level0_size=(800, 400))
        with pytest.raises(InputError, match="must be a positive number"):
            read_annotations(path, -1.0)
        Image.fromarray(random_mask(0).astype(np.uint8)).save(path)
        path.write_bytes(path.read_bytes()[:200])
        with pytest.raises(InputError, match="cannot be decoded"):
            read_annotations(path, 1.0)
        colours = np.zeros((8, 8, 3), np.uint8)
        colours[0, 0] = 255, 0, 0
        Image.fromarray(colours).save(path)
        with pytest.raises(InputError, match="is in colour"):
            read_annotations(path, 1.0)
        tifffile.imwrite(tmp_path / "m.tif", np.zeros((8, 8), np.float32))
        with pytest.raises(InputError, match="its pixels are float32"):
            read_annotations(tmp_path / "m.tif", 1.0)
        tifffile.imwrite(tmp_path / "m.tif", np.zeros((4, 8, 8), np.uint8), photometric="minisblack")
        with pytest.raises(InputError, match="holds several pictures"):
            read_annotations(tmp_path / "m.tif", 1.0)
        (tmp_path / "m.tif").write_bytes(b"II*\0" + struct.pack("<I", 4000))
        with pytest.raises(InputError, match="cannot be decoded"):
            read_annotations(tmp_path / "m.tif", 1.0)


class TestCoveredShare:
    @pytest.mark.parametrize("seed", range(20))
    def test_random_rectangles(self, seed):
        rng = np.random.default_rng(seed)
        corners, side = rng.uniform(0, 1000, (2, 2)), rng.uniform(5, 300)
        (left, top), (right, bottom) = corners.min(0), corners.max(0)
        coords = rng.integers(-200, 1200, (300, 2))
        width = np.clip(np.minimum(right, coords[:, 0] + side) - np.maximum(left, coords[:, 0]), 0, None)
        height = np.clip(np.minimum(bottom, coords[:, 1] + side) - np.maximum(top, coords[:, 1]), 0, None)
        shares = covered_share(shapely.box(left, top, right, bottom), coords, side)
        assert shares.dtype == np.float64
        np.testing.assert_allclose(shares, width * height / side**2, atol=1e-8)

    def test_long_outlines_are_divided_without_loss(self):
        star = shapely.Point(500, 500).buffer(400, quad_segs=2000).difference(shapely.Point(500, 500).buffer(100))
        grid = np.stack(np.meshgrid(np.arange(0, 1000, 50), np.arange(0, 1000, 50)), -1).reshape(-1, 2)
        expected = [star.intersection(shapely.box(x, y, x + 50, y + 50)).area / 2500 for x, y in grid]
        shares = covered_share(star, grid, 50)
        np.testing.assert_allclose(shares, expected, atol=1e-8)
        assert shares.sum() * 2500 == pytest.approx(star.area)

    def test_a_mask_gives_the_shares_of_its_integral_image(self):
        mask = random_mask(7, (64, 64), 0.4)
        sums = np.pad(mask.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
        coords = np.random.default_rng(1).integers(0, 57, (200, 2))
        x, y = coords.T
        expected = (sums[y + 7, x + 7] - sums[y, x + 7] - sums[y + 7, x] + sums[y, x]) / 49
        np.testing.assert_allclose(covered_share(masks.mask_polygons(mask), coords, 7), expected, atol=1e-8)

    def test_touching_is_not_covering(self):
        shares = covered_share(shapely.box(0, 0, 10, 10), [(10, 0), (0, 10), (-10, 0), (0, 0), (9, 9)], 10)
        np.testing.assert_array_equal(shares, [0, 0, 0, 1, 0.01])

    def test_nothing(self):
        assert covered_share(shapely.Polygon(), [(0, 0)], 10).tolist() == [0]
        assert covered_share(shapely.box(0, 0, 1, 1), np.zeros((0, 2), np.int64), 10).shape == (0,)

    def test_errors(self):
        with pytest.raises(InputError, match=r"\(N, 2\)"):
            covered_share(shapely.box(0, 0, 1, 1), [1, 2, 3], 10)
        with pytest.raises(InputError, match="side_level0"):
            covered_share(shapely.box(0, 0, 1, 1), [(0, 0)], 0)


def test_instance_labels():
    shares = np.array([0, 1e-6, 0.49, 0.5, 1])
    assert instance_labels(shares).tolist() == [0, 1, 1, 1, 1]
    assert instance_labels(shares, 0.5).tolist() == [0, -1, -1, 1, 1]
    assert instance_labels(shares).dtype == np.int8
    with pytest.raises(InputError, match="minimum_share"):
        instance_labels(shares, 50)


class TestChoosing:
    """Layers and objects that have no class of their own are chosen by what the program calls them."""

    @pytest.mark.parametrize("wanted", ["Layer 2", "layer 2", "2", "Id 2"])
    def test_a_layer_by_the_name_of_the_program_or_its_id(self, tmp_path, wanted):
        path = imagescope(tmp_path, ("Layer 1", [(SQUARE, 0)]), ("Layer 2", [(FAR, 0)]))
        assert read_annotations(path, classes=[wanted]).tumour.area == 2500

    def test_a_layer_without_a_name_by_its_id(self, tmp_path):
        path = imagescope(tmp_path, ("", [(SQUARE, 0)]), ("", [(FAR, 0)]))
        annotations = read_annotations(path, classes=["2"])
        assert annotations.tumour.area == 2500
        assert annotations.notes == ("classes that do not count as tumour: Id 1",)
        assert read_annotations(path).notes == ("no annotation has a class; all count as tumour (Id 1, Id 2)",)

    def test_a_name_goes_before_an_id(self, tmp_path):
        path = imagescope(tmp_path, ("2", [(SQUARE, 0)]), ("Necrosis", [(FAR, 0)]))
        assert read_annotations(path, classes=["2"]).tumour.area == 10000

    def test_the_error_says_how_to_choose(self, tmp_path):
        path = imagescope(tmp_path, ("Layer 1", [(SQUARE, 0)]), ("Necrosis", [(FAR, 0)]))
        with pytest.raises(InputError, match=r"'Layer 1' \(Id 1\), 'Necrosis' \(Id 2\); .* with --class"):
            read_annotations(path)

    def test_a_group_of_asap_by_its_own_name_or_its_parents(self, tmp_path):
        groups = '<Group Name="macro" PartOfGroup="Tumor"/><Group Name="Tumor" PartOfGroup="None"/>'
        path = asap(tmp_path, ("macro", SQUARE), ("Tumor", FAR), groups=groups)
        assert read_annotations(path, classes=["macro"]).tumour.area == 10000
        assert read_annotations(path, classes=["Tumor"]).tumour.area == 12500

    def test_objects_of_qupath_without_a_class(self, tmp_path):
        named = feature("Polygon", [ring(FAR)])
        named["properties"]["name"] = "lesion A"
        bare = feature("Polygon", [ring(INNER)])
        path = geojson(tmp_path, [feature("Polygon", [ring(SQUARE)], "Stroma"), named, bare])
        assert read_annotations(path, classes=["Lesion a"]).tumour.area == 2500
        assert read_annotations(path, classes=["(no class)"]).tumour.area == 2500
        assert read_annotations(path, classes=["(no class)", "lesion A"]).tumour.area == 5000
