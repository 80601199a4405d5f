"""Annotations of QuPath and others as GeoJSON: features with polygons, in pixels of level 0."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from its2clr.cohort.slides.shapes import Ring, Shape, Shapes, finite
from its2clr.errors import InputError

_ADVICE = "export the annotations again as GeoJSON"
_WITHOUT_AREA = ("Point", "MultiPoint", "LineString", "MultiLineString")


def read_geojson(path: Path, shapes: Shapes) -> None:
    """Collect the polygons of a Feature, a FeatureCollection, a bare geometry or a list of these.

    The class is `properties.classification`: a name, or an object with `name` or `names` (QuPath). An object without a
    class can be chosen by its name.

    Raises:
        InputError: If it is no JSON, or not GeoJSON where it claims to be.
    """
    passed_over: Counter[str] = Counter()
    for place, feature in _features(_load(path), "", shapes):
        geometry = feature.get("geometry") if feature.get("type") == "Feature" else feature
        name = _class_name(feature.get("properties"), place, shapes)
        also = () if name else _object_name(feature.get("properties"))
        if geometry is None:
            passed_over["feature without geometry"] += 1
            continue
        for rings_place, rings in _polygons(geometry, place, shapes, passed_over):
            read = [_ring(ring, f"{rings_place}, ring {number}", shapes) for number, ring in enumerate(rings, start=1)]
            if read:
                shapes.named.append(Shape(name, shapes.polygon(rings_place, read[0], read[1:]), also))
    shapes.notes += [f"{count} x {kind}, which has no area; passed over" for kind, count in passed_over.items()]


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InputError(f"{path}: {where}: is not whole JSON ({error.msg}); {_ADVICE}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error}); {_ADVICE}") from error


def _features(value: Any, place: str, shapes: Shapes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every feature or bare geometry, with its place."""
    if isinstance(value, dict) and value.get("type") == "FeatureCollection":
        value = value.get("features")
        if not isinstance(value, list):
            raise shapes.error(place or "FeatureCollection", "'features' is not a list", _ADVICE)
    if isinstance(value, list):
        for number, item in enumerate(value, start=1):
            yield from _features(item, f"{place}feature {number}", shapes)
    elif isinstance(value, dict) and isinstance(value.get("type"), str):
        yield place or "the feature", value
    else:
        raise shapes.error(place or "the file", "is no GeoJSON object with a 'type'", _ADVICE)


def _class_name(properties: Any, place: str, shapes: Shapes) -> str:
    value = properties.get("classification") if isinstance(properties, dict) else None
    if isinstance(value, dict):
        value = value.get("name", value.get("names"))
    if isinstance(value, list):
        value = ": ".join(map(str, value))
    if value is not None and not isinstance(value, str):
        raise shapes.error(place, f"'classification' is no name but {value!r}", _ADVICE)
    return (value or "").strip()


def _object_name(properties: Any) -> tuple[str, ...]:
    """The name that QuPath gives an object beside its class."""
    value = properties.get("name") if isinstance(properties, dict) else None
    return (value.strip(),) if isinstance(value, str) and value.strip() else ()


def _polygons(
    geometry: Any, place: str, shapes: Shapes, passed_over: Counter[str]
) -> Iterator[tuple[str, Sequence[Any]]]:
    """The rings of every polygon in a geometry; what has no area is counted."""
    kind = geometry.get("type") if isinstance(geometry, dict) else None
    if kind in _WITHOUT_AREA:
        passed_over[str(kind)] += 1
        return
    key = "geometries" if kind == "GeometryCollection" else "coordinates"
    if kind not in ("Polygon", "MultiPolygon", "GeometryCollection"):
        raise shapes.error(place, f"is no GeoJSON geometry (type {kind!r})", _ADVICE)
    members = geometry.get(key)
    if not isinstance(members, list):
        raise shapes.error(place, f"{kind} has no list of {key}", _ADVICE)
    if kind == "Polygon":
        yield place, members
        return
    for number, member in enumerate(members, start=1):
        part = f"{place}, part {number}"
        if kind == "GeometryCollection":
            yield from _polygons(member, part, shapes, passed_over)
        elif isinstance(member, list):
            yield part, member
        else:
            raise shapes.error(part, "is no list of rings", _ADVICE)


def _ring(ring: Any, place: str, shapes: Shapes) -> Ring:
    try:
        return [(finite(point[0]), finite(point[1])) for point in ring]
    except (IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise shapes.error(place, f"is no list of x, y pairs ({error})", _ADVICE) from error
