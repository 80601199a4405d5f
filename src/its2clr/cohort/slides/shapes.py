"""Outlines of annotations become valid polygons with a class name; from them, the tumour of a slide."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import shapely

from its2clr.errors import InputError
from its2clr.wording import shortened

Ring = Sequence[tuple[float, float]]

TUMOUR_NAMES = frozenset({"tumor", "tumour", "_0", "_1", "metastases", "metastasis"})
"""Names that are tumour without being asked for: Camelyon16, Camelyon17, QuPath."""

EXCLUDED_NAMES = frozenset({"exclusion", "_2", "normal", "ignore*"})
"""Names whose area is taken away from the tumour."""

UNNAMED = "(no class)"
"""How a shape without a class is shown, and chosen."""

EMPTY: Any = shapely.Polygon()

_SMALLEST_RING = 3
_LISTED = 12
_MOST_CROSSINGS = 50_000
_PAIRS_AT_ONCE = 2**18


class Shape(NamedTuple):
    """An annotated area and what it is called.

    Attributes:
        name: Its class; "" where the file gives none.
        area: A valid shapely Polygon or MultiPolygon.
        also: Other names by which it can be chosen: of an ImageScope layer the name the program gave it, of an ASAP
            group its own name, of an object in QuPath without a class its name.
        number: The Id of an ImageScope layer.
        regions: How many annotated regions it holds.
    """

    name: str
    area: Any
    also: tuple[str, ...] = ()
    number: str = ""
    regions: int = 1

    @property
    def shown(self) -> str:
        """What to call it, as a person would choose it."""
        names = [repr(name) for name in dict.fromkeys((self.name, *self.also)) if name]
        number = f"Id {self.number}" if self.number else ""
        if not names:
            return number or UNNAMED
        return " or ".join(names) + (f" ({number})" if number else "")

    def is_called(self, wanted: str) -> bool:
        """Whether this is one of its names, in any case."""
        names = [name.casefold() for name in (self.name, *self.also) if name] or [UNNAMED]
        return wanted.casefold() in names

    def has_number(self, wanted: str) -> bool:
        """Whether this is its Id, written `2` or `Id 2`."""
        return bool(self.number) and wanted.casefold().removeprefix("id").strip() == self.number.casefold()


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
        named: The shapes.
        notes: What was repaired or passed over.
        mpp: Microns per pixel of level 0 as the file says; None if it does not.
        is_mask: Whether the classes are values of a mask, whose areas are not kept.
    """

    path: Path
    named: list[Shape] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mpp: float | None = None
    is_mask: bool = False

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
            classes: What counts as tumour: names in any case, or Ids of layers; shapes of `EXCLUDED_NAMES` not among
                them are still taken away, all others are passed over. None: those of `TUMOUR_NAMES`, or every shape if
                no shape has a name; any other name is an error, since what it means is not known.

        Raises:
            InputError: If there are names that are not known and `classes` is None.
        """
        chosen, others = self.chosen(classes), self.unknown(classes)
        if classes is None and others:
            raise self.error(
                "annotations",
                f"it is not known whether these classes are tumour: {shortened(others, _LISTED)}",
                "name the classes that count as tumour with --class",
            )
        if others:
            self.notes.append(f"classes that do not count as tumour: {shortened(others, _LISTED)}")
        if classes is None and self._unnamed:
            listed = shortened(list(dict.fromkeys(shape.shown for shape in self.named)), _LISTED)
            self.notes.append("no annotation has a class; all count as tumour" + _in_brackets(listed))
        if not self.named:
            self.notes.append("there are no annotated areas")
        tumour = union(shape.area for shape, counts in zip(self.named, chosen, strict=True) if counts)
        taken = union(
            shape.area for shape, counts in zip(self.named, chosen, strict=True) if not counts and _excluded(shape)
        )
        if not taken.is_empty:
            tumour = polygonal(shapely.difference(tumour, taken))
        return Annotations(tumour, tuple(self.notes))

    @property
    def _unnamed(self) -> bool:
        return bool(self.named) and not any(shape.name for shape in self.named)

    def chosen(self, classes: Collection[str] | None) -> list[bool]:
        """Which shapes count as tumour; see `tumour`."""
        if classes is None:
            return [self._unnamed or shape.name.casefold() in TUMOUR_NAMES for shape in self.named]
        return [any(found) for found in zip(*map(self.called, classes), strict=True)] or [False] * len(self.named)

    def called(self, wanted: str) -> list[bool]:
        """Which shapes have this name or, if none has, are of the layer with this Id."""
        named = [shape.is_called(wanted) for shape in self.named]
        return named if any(named) else [shape.has_number(wanted) for shape in self.named]

    def unknown(self, classes: Collection[str] | None) -> list[str]:
        """What neither counts as tumour nor is excluded, as a person would choose it."""
        pairs = zip(self.named, self.chosen(classes), strict=True)
        return sorted({shape.shown for shape, counts in pairs if not counts and not _excluded(shape)})


def _excluded(shape: Shape) -> bool:
    return shape.name.casefold() in EXCLUDED_NAMES


def _in_brackets(listed: str) -> str:
    return "" if listed == UNNAMED else f" ({listed})"


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
