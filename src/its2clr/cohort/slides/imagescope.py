"""Annotations of Aperio ImageScope: XML, layers of regions in pixels of level 0."""

import re
import xml.etree.ElementTree as ET
from typing import Any

import shapely
import shapely.affinity

from its2clr.cohort.slides.shapes import Ring, Shapes, finite, polygonal, union

ROOT = "Annotations"

_AREA, _RECTANGLE, _ELLIPSE = "0", "1", "2"
_TWO_CORNERS = 2
_DEFAULT_NAME = re.compile(r"(layer|annotation)\s*\d*", re.IGNORECASE)
_ADVICE = "correct or remove that region in ImageScope and save again"


def read_imagescope(root: ET.Element, shapes: Shapes) -> None:
    """Collect the layers of an ImageScope file: the regions of each, less its negative regions.

    The class is the name of the layer; a layer without a name, or with ImageScope's own such as "Layer 1", has none.
    Rectangles and ellipses that are given by two corners are drawn out; rulers and arrows are noted.

    Raises:
        InputError: If a region has no vertices or they are no numbers.
    """
    for number, layer in enumerate(root.iter("Annotation"), start=1):
        areas: dict[bool, list[Any]] = {False: [], True: []}
        for count, region in enumerate(layer.iter("Region"), start=1):
            place = f"layer {layer.get('Id', number)}, region {region.get('Id', count)}"
            negative = region.get("NegativeROA", "0").strip().lower() in ("1", "true")
            areas[negative].append(_region(region, place, shapes))
        if areas[False]:
            geometry = polygonal(shapely.difference(union(areas[False]), union(areas[True])))
            shapes.named.append((_name(layer), geometry))
        elif areas[True]:
            shapes.notes.append(f"layer {layer.get('Id', number)} has negative regions only; passed over")


def _name(layer: ET.Element) -> str:
    name = layer.get("Name", "").strip()
    return "" if _DEFAULT_NAME.fullmatch(name) else name


def _region(region: ET.Element, place: str, shapes: Shapes) -> Any:
    kind = region.get("Type", _AREA)
    if kind not in (_AREA, _RECTANGLE, _ELLIPSE):
        shapes.notes.append(f"{place} is a line (type {kind}), which has no area; passed over")
        return shapely.Polygon()
    points = _points(region, place, shapes)
    if len(points) == _TWO_CORNERS and kind != _AREA:
        (left, top), (right, bottom) = points
        return _ellipse(left, top, right, bottom) if kind == _ELLIPSE else shapely.box(left, top, right, bottom)
    return shapes.polygon(place, points)


def _points(region: ET.Element, place: str, shapes: Shapes) -> Ring:
    vertices = region.find("Vertices")
    if vertices is None:
        raise shapes.error(place, "has no Vertices", _ADVICE)
    points: list[tuple[float, float]] = []
    for number, vertex in enumerate(vertices.iter("Vertex"), start=1):
        try:
            points.append((finite(vertex.attrib["X"]), finite(vertex.attrib["Y"])))
        except (KeyError, ValueError) as error:
            raise shapes.error(f"{place}, vertex {number}", f"X or Y is no number ({error})", _ADVICE) from error
    return points


def _ellipse(left: float, top: float, right: float, bottom: float) -> Any:
    circle = shapely.Point((left + right) / 2, (top + bottom) / 2).buffer(1.0, quad_segs=64)
    return shapely.affinity.scale(circle, abs(right - left) / 2, abs(bottom - top) / 2)
