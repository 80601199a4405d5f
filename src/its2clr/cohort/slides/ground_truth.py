"""Ground truth of the tiles of a slide: how much of each an annotated area covers, and the label that follows."""

from typing import Any

import numpy as np
import numpy.typing as npt
import shapely

from its2clr.cohort.slides.annotations import read_annotations
from its2clr.cohort.slides.shapes import Annotations
from its2clr.cohort.slides.slide_image import Level, SlideProblem
from its2clr.cohort.slides.slide_manifest import Slide
from its2clr.errors import InputError
from its2clr.units import Level0Pixels

MINIMUM_SHARE = 0.0
"""A tile that holds any tumour is positive, see `instance_labels`."""

_MOST_OUTSIDE = 0.01
_MOST_VERTICES = 256
_MOST_TILES = 65536
_SMALLEST_SIDE = 1e-6
_PRECISION = 1e-12
_DECIMALS = 9

_Geometries = npt.NDArray[np.object_]


def read_ground_truth(slide: Slide, base: Level, classes: tuple[str, ...]) -> Annotations | None:
    """The annotated regions of a slide at level 0; None without annotation.

    Args:
        slide: The slide.
        base: Its level 0.
        classes: Classes that count as tumour; none named: those that are known to.

    Raises:
        SlideProblem: If the annotation cannot be read, or lies beside the slide.
    """
    if slide.annotation is None:
        return None
    try:
        found = read_annotations(slide.annotation, classes=classes or None, level0_size=(base.width, base.height))
    except InputError as error:
        raise SlideProblem(f"its annotation cannot be used: {error}") from error
    outside = share_outside(found.tumour, base)
    if outside == 1:
        left, top, right, bottom = found.tumour.bounds
        place = f"x {left:.0f} to {right:.0f}, y {top:.0f} to {bottom:.0f}"
        advice = f"outside the slide of {base.width} x {base.height} pixels; is it of another slide, or in other units?"
        raise SlideProblem(f"its annotation cannot be used: {slide.annotation}: all of it lies at {place}, {advice}")
    if outside > _MOST_OUTSIDE:
        note = f"{outside:.0%} of the annotated area lies outside the slide; is the annotation of this slide?"
        return Annotations(found.tumour, (*found.notes, note))
    return found


def share_outside(tumour: Any, base: Level) -> float:
    """The share of an area that is not on the slide; 0 of no area."""
    if not tumour.area:
        return 0.0
    inside = shapely.intersection(tumour, shapely.box(0, 0, base.width, base.height)).area
    return 1.0 if inside == 0 else float(1 - inside / tumour.area)


def label_tiles(
    slide: Slide,
    annotations: Annotations | None,
    coords: npt.NDArray[np.int64],
    side: Level0Pixels,
    min_covered: float,
) -> tuple[npt.NDArray[np.int8] | None, tuple[str, ...]]:
    """Ground truth of tiles: 1 where enough is annotated, 0 where nothing is, -1 (unknown) between.

    Args:
        slide: The slide.
        annotations: What `read_ground_truth` gave.
        coords: (N, 2) x, y of the tiles at level 0.
        side: Side of a tile at level 0.
        min_covered: Least share of a positive tile.

    Returns:
        The labels, None if no slide of the cohort is annotated; and what does not fit the label of the slide.
    """
    if slide.unannotated is None:
        return None, ()
    if annotations is None:
        return np.full(len(coords), slide.unannotated, np.int8), ()
    if slide.unannotated != 0 and not annotations.tumour.area:
        note = "nothing of its annotation counts as tumour, so it is not known which of its tiles are"
        return np.full(len(coords), slide.unannotated, np.int8), (note,)
    labels = instance_labels(covered_share(annotations.tumour, coords, side), min_covered)
    positives = int((labels == 1).sum())
    if slide.unannotated == 0 and positives:
        return labels, (f"is labelled 0, but {positives} of its tiles hold annotated tumour; which of them is right?",)
    if slide.unannotated != 0 and not positives:
        return labels, ("none of its kept tiles counts as tumour, though tumour is annotated; see its overview",)
    return labels, ()


def covered_share(geometry: Any, coords: npt.ArrayLike, side_level0: Level0Pixels) -> npt.NDArray[np.float64]:
    """Share of each square tile that a geometry covers.

    Large polygons are divided into small ones first: the cost of a tile then depends on what lies near it, not on
    the length of the whole outline.

    Args:
        geometry: A valid Polygon or MultiPolygon in pixels of level 0.
        coords: (N, 2) x, y of the top-left corner of each tile at level 0.
        side_level0: Side of a tile in pixels of level 0.

    Returns:
        (N,) shares between 0 and 1.

    Raises:
        InputError: If the coordinates are not (N, 2) or the side is not positive.
    """
    places = np.asarray(coords, dtype=np.float64)
    if places.ndim != 2 or places.shape[1] != 2:
        raise InputError(f"coords must have shape (N, 2), got {places.shape}")
    if not side_level0 > 0:
        raise InputError(f"side_level0 must be positive, got {side_level0}")
    shares = np.zeros(len(places))
    pieces = _pieces(geometry)
    if not len(pieces):
        return shares
    shapely.prepare(pieces)
    tree = shapely.STRtree(pieces)
    for first in range(0, len(places), _MOST_TILES):
        part = places[first : first + _MOST_TILES]
        tiles = shapely.box(part[:, 0], part[:, 1], part[:, 0] + side_level0, part[:, 1] + side_level0)
        shares[first : first + len(part)] = _covered_areas(tiles, pieces, tree) / side_level0**2
    # areas carry rounding errors; a tile that only touches the tumour must stay at 0, a covered one at 1
    return np.clip(np.round(shares, _DECIMALS), 0.0, 1.0)


def _covered_areas(tiles: _Geometries, pieces: _Geometries, tree: Any) -> npt.NDArray[np.float64]:
    tile, piece = tree.query(tiles)
    areas = shapely.area(tiles[tile])
    partly = np.flatnonzero(~shapely.contains_properly(pieces[piece], tiles[tile]))
    areas[partly] = shapely.area(shapely.intersection(tiles[tile[partly]], pieces[piece[partly]]))
    totals: npt.NDArray[np.float64] = np.bincount(tile, areas, minlength=len(tiles)).astype(np.float64)
    return totals


def _pieces(geometry: Any) -> _Geometries:
    """Polygons of few vertices that together are the geometry and do not overlap: each half is halved again."""
    done: list[Any] = []
    waiting = [polygon for polygon in shapely.get_parts(geometry) if not polygon.is_empty]
    while waiting:
        polygon = waiting.pop()
        left, top, right, bottom = polygon.bounds
        small = max(right - left, bottom - top) < _SMALLEST_SIDE
        if small or shapely.get_num_coordinates(polygon) <= _MOST_VERTICES:
            done.append(polygon)
        else:
            waiting += _halves(polygon)
    return np.array(done, dtype=object)


def _halves(polygon: Any) -> list[Any]:
    """The polygons on both sides of the middle of the longer side."""
    left, top, right, bottom = polygon.bounds
    across, down = (left + right) / 2, (top + bottom) / 2
    if right - left >= bottom - top:
        boxes = [(left, top, across, bottom), (across, top, right, bottom)]
    else:
        boxes = [(left, top, right, down), (left, down, right, bottom)]
    parts = _areas_of([shapely.clip_by_rect(polygon, *box) for box in boxes])
    # clipping is many times faster than intersection, but gives no promise to be valid
    whole = abs(shapely.area(parts).sum() - polygon.area) <= _PRECISION * polygon.area
    if not (whole and shapely.is_valid(parts).all()):
        parts = _areas_of([shapely.intersection(polygon, shapely.box(*box)) for box in boxes])
    return parts


def _areas_of(geometries: list[Any]) -> list[Any]:
    return [part for part in shapely.get_parts(geometries) if part.geom_type == "Polygon" and not part.is_empty]


def instance_labels(shares: npt.NDArray[np.floating], minimum_share: float = MINIMUM_SHARE) -> npt.NDArray[np.int8]:
    """Instance ground truth from covered shares.

    The paper derives the labels from the pixel annotations (section 4.1) and counts the tiles that "contain tumors"
    (appendix A.1), without a least share. So by default any tumour makes a tile positive. That also keeps the
    definition of a bag: at 5x a tile is 448 microns wide, and a slide whose only metastasis is smaller than half of
    that would otherwise be a positive bag without a positive instance.

    Args:
        shares: (N,) covered share of each tile.
        minimum_share: Least share of a positive tile; at 0 any share above 0 is enough.

    Returns:
        (N,) 1 where enough is covered, 0 where nothing is, -1 (unknown) between.

    Raises:
        InputError: If the minimum is not between 0 and 1.
    """
    if not 0 <= minimum_share <= 1:
        raise InputError(f"minimum_share must be between 0 and 1, got {minimum_share}")
    return np.where(shares <= 0, 0, np.where(shares >= minimum_share, 1, -1)).astype(np.int8)
