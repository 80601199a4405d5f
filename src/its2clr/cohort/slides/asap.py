"""Annotations of ASAP, as Camelyon16 and Camelyon17 come with: XML, groups of polygons in pixels of level 0."""

import xml.etree.ElementTree as ET
from collections.abc import Mapping

from its2clr.cohort.slides.shapes import EXCLUDED_NAMES, TUMOUR_NAMES, Ring, Shapes, finite

ROOT = "ASAP_Annotations"

_AREAS = ("polygon", "spline", "rectangle")
_NO_GROUP = "None"
_ADVICE = "correct or remove that annotation in ASAP and save again"


def read_asap(root: ET.Element, shapes: Shapes) -> None:
    """Collect the polygons of an ASAP file, each under the name of its group.

    A group that lies in a group of known meaning takes that meaning. Splines are taken as the polygon of their
    points; dots and other shapes without area are noted.

    Raises:
        InputError: If an annotation has no coordinates or they are no numbers.
    """
    parents = {group.get("Name", ""): group.get("PartOfGroup", _NO_GROUP) for group in root.iter("Group")}
    for number, annotation in enumerate(root.iter("Annotation"), start=1):
        place = f"annotation {number} ({annotation.get('Name', '')!r})"
        kind = annotation.get("Type", "Polygon")
        if kind.lower() not in _AREAS:
            shapes.notes.append(f"{place} is a {kind}, which has no area; passed over")
            continue
        ring = _ring(annotation, place, shapes)
        shapes.named.append((_group(annotation.get("PartOfGroup", _NO_GROUP), parents), shapes.polygon(place, ring)))


def _ring(annotation: ET.Element, place: str, shapes: Shapes) -> Ring:
    points = annotation.find("Coordinates")
    if points is None:
        raise shapes.error(place, "has no Coordinates", _ADVICE)
    ordered: list[tuple[float, float, float]] = []
    for number, point in enumerate(points.iter("Coordinate"), start=1):
        try:
            order = finite(point.get("Order", number))
            ordered.append((order, finite(point.attrib["X"]), finite(point.attrib["Y"])))
        except (KeyError, ValueError) as error:
            raise shapes.error(
                f"{place}, coordinate {number}", f"X, Y or Order is no number ({error})", _ADVICE
            ) from error
    ordered.sort(key=lambda point: point[0])
    return [(x, y) for _, x, y in ordered]


def _group(name: str, parents: Mapping[str, str]) -> str:
    """The nearest group, from the annotation's own upwards, whose meaning is known; else its own."""
    known, seen, current = TUMOUR_NAMES | EXCLUDED_NAMES, set(), name
    while current.casefold() not in known and current in parents and current not in seen:
        seen.add(current)
        current = parents[current]
    found = current if current.casefold() in known else name
    return "" if found == _NO_GROUP else found
