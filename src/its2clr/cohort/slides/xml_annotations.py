"""Annotations in XML, in pixels of level 0: ASAP (groups of polygons) and Aperio ImageScope (layers of regions)."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import shapely
import shapely.affinity

from its2clr.cohort.slides.shapes import EXCLUDED_NAMES, TUMOUR_NAMES, Ring, Shape, Shapes, finite, polygonal, union
from its2clr.errors import InputError

_ASAP, _IMAGESCOPE = "ASAP_Annotations", "Annotations"
_ASAP_AREAS = ("polygon", "spline", "rectangle")
_NO_GROUP = "None"
_AREA, _RECTANGLE, _ELLIPSE = "0", "1", "2"  # ImageScope's types of regions
_TWO_CORNERS = 2
_DEFAULT_NAME = re.compile(r"(layer|annotation)\s*\d*", re.IGNORECASE)
_SAVE_AGAIN = "save the annotations again"
_CORRECT_ASAP = "correct or remove that annotation in ASAP and save again"
_CORRECT_IMAGESCOPE = "correct or remove that region in ImageScope and save again"


def read_xml_annotations(path: Path, shapes: Shapes) -> None:
    """Collect the annotated areas of an ASAP or ImageScope file.

    Raises:
        InputError: If it is no whole XML, of another program, or its coordinates are no numbers.
    """
    root = _read_xml(path)
    if root.tag == _ASAP:
        _read_asap(root, shapes)
    elif root.tag == _IMAGESCOPE:
        _read_imagescope(root, shapes)
    else:
        known = f"{_ASAP} (ASAP) or {_IMAGESCOPE} (ImageScope)"
        raise InputError(
            f"{path}: its root is {root.tag!r}, expected {known}; export the annotations from one of these"
        )


class _NoDocumentType(ET.TreeBuilder):
    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        """Refuse it: only there can entities be declared."""
        del pubid, system
        raise InputError(f"has a document type ({name}), which annotation files never need")


def _read_xml(path: Path) -> ET.Element:
    """The root of an XML file; a document type, which could expand or fetch anything, is refused."""
    try:
        return ET.fromstring(path.read_bytes(), parser=ET.XMLParser(target=_NoDocumentType()))  # noqa: S314
    except InputError as error:
        raise InputError(f"{path}: {error}; remove it, or {_SAVE_AGAIN}") from error
    except ET.ParseError as error:
        line, column = error.position
        raise InputError(
            f"{path}: line {line}, column {column + 1}: is not whole XML ({error}); {_SAVE_AGAIN}"
        ) from error
    except (LookupError, ValueError) as error:
        raise InputError(f"{path}: its text cannot be decoded ({error}); {_SAVE_AGAIN}") from error


def _read_asap(root: ET.Element, shapes: Shapes) -> None:
    """Collect the polygons of an ASAP file, each under the name of its group.

    A group that lies in a group of known meaning takes that meaning. Splines are taken as the polygon of their
    points; dots and other shapes without area are noted.
    """
    parents = {group.get("Name", ""): group.get("PartOfGroup", _NO_GROUP) for group in root.iter("Group")}
    for number, annotation in enumerate(root.iter("Annotation"), start=1):
        place = f"annotation {number} ({annotation.get('Name', '')!r})"
        kind = annotation.get("Type", "Polygon")
        if kind.lower() not in _ASAP_AREAS:
            shapes.notes.append(f"{place} is a {kind}, which has no area; passed over")
            continue
        ring = _asap_ring(annotation, place, shapes)
        own = annotation.get("PartOfGroup", _NO_GROUP)
        also = () if own == _NO_GROUP else (own,)
        shapes.named.append(Shape(_asap_group(own, parents), shapes.polygon(place, ring), also))


def _asap_ring(annotation: ET.Element, place: str, shapes: Shapes) -> Ring:
    points = annotation.find("Coordinates")
    if points is None:
        raise shapes.error(place, "has no Coordinates", _CORRECT_ASAP)
    ordered: list[tuple[float, float, float]] = []
    for number, point in enumerate(points.iter("Coordinate"), start=1):
        try:
            order = finite(point.get("Order", number))
            ordered.append((order, finite(point.attrib["X"]), finite(point.attrib["Y"])))
        except (KeyError, ValueError) as error:
            raise shapes.error(
                f"{place}, coordinate {number}", f"X, Y or Order is no number ({error})", _CORRECT_ASAP
            ) from error
    ordered.sort(key=lambda point: point[0])
    return [(x, y) for _, x, y in ordered]


def _asap_group(name: str, parents: Mapping[str, str]) -> str:
    """The nearest group, from the annotation's own upwards, whose meaning is known; else its own."""
    known, seen, current = TUMOUR_NAMES | EXCLUDED_NAMES, set(), name
    while current.casefold() not in known and current in parents and current not in seen:
        seen.add(current)
        current = parents[current]
    found = current if current.casefold() in known else name
    return "" if found == _NO_GROUP else found


def _read_imagescope(root: ET.Element, shapes: Shapes) -> None:
    """Collect the layers of an ImageScope file: the regions of each, less its negative regions.

    The class is the name of the layer; a layer without a name, or with ImageScope's own such as "Layer 1", has none; it
    can be chosen by that name or by its Id. The file also says the scale, in `MicronsPerPixel`. Rectangles and ellipses
    that are given by two corners are drawn out; rulers and arrows are noted.
    """
    with suppress(ValueError):
        shapes.mpp = finite(root.get("MicronsPerPixel", "")) or None
    for number, layer in enumerate(root.iter("Annotation"), start=1):
        areas: dict[bool, list[Any]] = {False: [], True: []}
        for count, region in enumerate(layer.iter("Region"), start=1):
            place = f"layer {layer.get('Id', number)}, region {region.get('Id', count)}"
            negative = region.get("NegativeROA", "0").strip().lower() in ("1", "true")
            areas[negative].append(_region(region, place, shapes))
        if areas[False]:
            geometry = polygonal(shapely.difference(union(areas[False]), union(areas[True])))
            name = layer.get("Name", "").strip()
            given = "" if _DEFAULT_NAME.fullmatch(name) else name
            shapes.named.append(Shape(given, geometry, (name,), layer.get("Id", "").strip(), len(areas[False])))
        elif areas[True]:
            shapes.notes.append(f"layer {layer.get('Id', number)} has negative regions only; passed over")


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
        raise shapes.error(place, "has no Vertices", _CORRECT_IMAGESCOPE)
    points: list[tuple[float, float]] = []
    for number, vertex in enumerate(vertices.iter("Vertex"), start=1):
        try:
            points.append((finite(vertex.attrib["X"]), finite(vertex.attrib["Y"])))
        except (KeyError, ValueError) as error:
            raise shapes.error(
                f"{place}, vertex {number}", f"X or Y is no number ({error})", _CORRECT_IMAGESCOPE
            ) from error
    return points


def _ellipse(left: float, top: float, right: float, bottom: float) -> Any:
    circle = shapely.Point((left + right) / 2, (top + bottom) / 2).buffer(1.0, quad_segs=64)
    return shapely.affinity.scale(circle, abs(right - left) / 2, abs(bottom - top) / 2)
