"""Outlines of annotations become valid polygons with a class name; from them, the tumour of a slide."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import shapely

from its2clr.errors import InputError

Ring = Sequence[tuple[float, float]]

TUMOUR_NAMES = frozenset({"tumor", "tumour", "_0", "_1", "metastases", "metastasis"})
"""Names that are tumour without being asked for: Camelyon16, Camelyon17, QuPath."""

EXCLUDED_NAMES = frozenset({"exclusion", "_2", "normal", "ignore*"})
"""Names whose area is taken away from the tumour."""

_SMALLEST_RING = 3
_MOST_CROSSINGS = 50_000
_PAIRS_AT_ONCE = 2**18
_UNNAMED = "(no class)"


@dataclass(frozen=True, eq=False)
class Annotations:
    """What is annotated on one slide.

    Attributes:
        tumour: The tumour, a valid shapely Polygon or MultiPolygon in pixels of level 0; empty if there is none.
        notes: What was repaired or passed over in the file, for the person who checks the cohort.
    """

    tumour: Any
    notes: tuple[str, ...] = ()


@dataclass
class Shapes:
    """Collects the shapes of one file.

    Attributes:
        path: The file, for errors.
        named: Class name and geometry of each shape; the name is "" where the file gives none.
        notes: What was repaired or passed over.
    """

    path: Path
    named: list[tuple[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def polygon(self, place: str, exterior: Ring, holes: Sequence[Ring] = ()) -> Any:
        """Make a valid polygon of its rings, closed or not; repairs and what cannot be used are noted.

        Returns:
            A Polygon or MultiPolygon, empty if the rings hold no area.
        """
        if len(exterior) < _SMALLEST_RING:
            self.notes.append(f"{place} has {len(exterior)} points and no area; passed over")
            return shapely.Polygon()
        return self.repaired(place, shapely.Polygon(exterior, [hole for hole in holes if len(hole) >= _SMALLEST_RING]))

    def repaired(self, place: str, geometry: Any) -> Any:
        """Make a polygon valid; one that crosses itself is repaired, with a note."""
        if not geometry.is_valid:
            if _crossings(geometry) > _MOST_CROSSINGS:
                message = f"crosses itself more than {_MOST_CROSSINGS} times"
                raise self.error(place, message, "it is no outline of a region; draw it again")
            geometry = polygonal(shapely.make_valid(geometry))
            self.notes.append(f"{place} crosses or touches itself; repaired, area now {geometry.area:.0f} px")
        elif geometry.area == 0:
            self.notes.append(f"{place} has no area; passed over")
        return geometry

    def error(self, place: str, message: str, advice: str) -> InputError:
        """An error of this file that says where and what to do."""
        return InputError(f"{self.path}: {place}: {message}; {advice}")

    def tumour(self, classes: Collection[str] | None = None) -> Annotations:
        """Tumour shapes less excluded ones.

        Args:
            classes: Names that count as tumour, in any case; those of `EXCLUDED_NAMES` not among them are still
                taken away, all others are passed over. None: those of `TUMOUR_NAMES`, or every shape if no shape
                has a name; any other name is an error, since what it means is not known.

        Raises:
            InputError: If there are names that are not known and `classes` is None.
        """
        names = sorted({name for name, _ in self.named})
        wanted = _wanted(classes, names)
        excluded = EXCLUDED_NAMES - wanted
        self._check_names([name for name in names if name.casefold() not in wanted | excluded], names, classes)
        tumour = union(shape for name, shape in self.named if name.casefold() in wanted)
        taken = union(shape for name, shape in self.named if name.casefold() in excluded)
        if not taken.is_empty:
            tumour = polygonal(shapely.difference(tumour, taken))
        return Annotations(tumour, tuple(self.notes))

    def _check_names(self, others: list[str], names: list[str], classes: Collection[str] | None) -> None:
        shown = ", ".join(repr(name) if name else _UNNAMED for name in others)
        if classes is None and others:
            raise self.error(
                "annotations",
                f"it is not known whether these classes are tumour: {shown}",
                "name the classes that count as tumour",
            )
        if others:
            self.notes.append(f"classes that do not count as tumour: {shown}")
        if classes is None and names == [""]:
            self.notes.append("no annotation has a class; all count as tumour")
        if not names:
            self.notes.append("there are no annotated areas")


def _crossings(geometry: Any) -> int:
    """How often the sides of a polygon cross each other; counting ends beyond `_MOST_CROSSINGS`.

    Each crossing becomes a corner when a polygon is repaired: the outline of 3,000 random points has a million.
    """
    points, ring = shapely.get_coordinates(shapely.get_rings(geometry), return_index=True)
    sides = shapely.linestrings(np.stack([points[:-1], points[1:]], axis=1)[ring[:-1] == ring[1:]])
    tree = shapely.STRtree(sides)
    at_once, found = max(1, _PAIRS_AT_ONCE // len(sides)), 0
    for first in range(0, len(sides), at_once):
        found += tree.query(sides[first : first + at_once], predicate="crosses").shape[1]
        if found > 2 * _MOST_CROSSINGS:  # each is found from both sides
            break
    return found // 2


def _wanted(classes: Collection[str] | None, names: list[str]) -> frozenset[str]:
    if classes is not None:
        return frozenset(name.casefold() for name in classes)
    return TUMOUR_NAMES | {""} if names == [""] else TUMOUR_NAMES


def union(geometries: Any) -> Any:
    """The union of geometries, polygons only."""
    return polygonal(shapely.union_all(np.array(list(geometries), dtype=object)))


def polygonal(geometry: Any) -> Any:
    """The part of a geometry that has an area, a Polygon or MultiPolygon."""
    if geometry.geom_type in ("Polygon", "MultiPolygon"):
        return geometry
    parts = [part for part in shapely.get_parts(geometry) if part.geom_type in ("Polygon", "MultiPolygon")]
    return shapely.union_all(parts) if parts else shapely.Polygon()


def finite(text: Any) -> float:
    """Read a coordinate.

    Raises:
        ValueError: If it is no finite number.
    """
    value = float(text)
    if not np.isfinite(value):
        raise ValueError(f"{text} is not finite")
    return value
