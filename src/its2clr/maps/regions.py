"""Where a map is at or above a threshold, as polygons along the edges of tiles.

Where tiles do not overlap, a region is the union of tiles at or above the threshold; where they do, it is where their
mean probability is. So regions and map agree exactly.
"""

from typing import Any, NamedTuple

import numpy as np
import shapely
from numpy.typing import NDArray

from its2clr.cohort.slides.masks import mask_polygons
from its2clr.maps.heat import mean, spans, weighted_sums
from its2clr.run.scores import BagScores
from its2clr.units import Level0Pixels

_MOST_CELLS = 2**18
_INSET = 0.25
"""Coordinates are whole numbers: a tile shrunk by this touches a region only if the two share area."""


class Region(NamedTuple):
    """A connected part of a map at or above a threshold.

    Attributes:
        polygon: Its outline with its holes, in pixels of level 0; rings as RFC 7946 wants them.
        mean: Mean probability over its area.
        highest: Highest probability in it.
        tiles: Tiles at or above the threshold that lie in it, wholly or in part.
    """

    polygon: Any
    mean: float
    highest: float
    tiles: int


class _Cells(NamedTuple):
    """Rectangles between neighbouring edges of tiles at or above the threshold, and their outline."""

    outline: list[Any]
    centres: NDArray[np.float64]
    areas: NDArray[np.float64]
    values: NDArray[np.float64]


def find_regions(scores: BagScores, threshold: float) -> list[Region]:
    """The regions at or above a threshold, from top to bottom.

    Args:
        scores: What a model says about the bag.
        threshold: The least probability.
    """
    corners, side = scores.coords, scores.side
    low, high = corners.min(axis=0), corners.max(axis=0) + side
    cells = _cells(corners, side, scores.instances, threshold, (*low.tolist(), *high.tolist()))
    if not cells.outline:
        return []
    # where a large bag was divided, parts share an edge, never an area
    merged = cells.outline[0] if len(cells.outline) == 1 else shapely.simplify(shapely.union_all(cells.outline), 0)
    parts = shapely.orient_polygons(shapely.get_parts(shapely.normalize(merged)), exterior_cw=False)
    bounds = shapely.bounds(parts)
    parts = parts[np.lexsort((bounds[:, 0], bounds[:, 1]))]
    tree = shapely.STRtree(parts)
    cell, part = tree.query(shapely.points(cells.centres), predicate="intersects")
    area = np.bincount(part, cells.areas[cell], len(parts))
    weighted = np.bincount(part, (cells.areas * cells.values)[cell], len(parts))
    highest = np.zeros(len(parts))
    np.maximum.at(highest, part, cells.values[cell])
    tiles = _tiles_in(tree, scores, threshold)
    return [
        Region(*found)
        for found in zip(parts, (weighted / area).tolist(), highest.tolist(), tiles.tolist(), strict=True)
    ]


def _cells(
    corners: NDArray[np.int64],
    side: Level0Pixels,
    values: NDArray[np.float64],
    threshold: float,
    window: tuple[int, int, int, int],
) -> _Cells:
    """Cells of a window (left, top, right, bottom); a window with too many edges is halved."""
    left, top, right, bottom = window
    x, x_end = np.clip(corners[:, 0], left, right), np.clip(corners[:, 0] + side, left, right)
    y, y_end = np.clip(corners[:, 1], top, bottom), np.clip(corners[:, 1] + side, top, bottom)
    seen = (x < x_end) & (y < y_end)
    if not (values[seen] >= threshold).any():
        nothing = np.empty(0)
        return _Cells([], np.empty((0, 2)), nothing, nothing)
    x, x_end, y, y_end, inside = x[seen], x_end[seen], y[seen], y_end[seen], values[seen]
    across, down = np.unique([x, x_end]), np.unique([y, y_end])
    if len(across) * len(down) > _MOST_CELLS:
        return _halved(corners[seen], side, inside, threshold, window, (across, down))
    columns = spans(np.searchsorted(across, x), np.searchsorted(across, x_end), len(across) - 1)
    rows = spans(np.searchsorted(down, y), np.searchsorted(down, y_end), len(down) - 1)
    total, count = weighted_sums(rows, columns, inside)
    heat = mean(total, count)
    hot = (heat >= threshold) & (count > 0)
    row, column = np.nonzero(hot)
    widths, heights = np.diff(across), np.diff(down)
    centres = np.stack([across[column] + widths[column] / 2, down[row] + heights[row] / 2], axis=1)
    outline = shapely.transform(
        mask_polygons(hot), lambda xy: np.stack([across[xy[:, 0].astype(int)], down[xy[:, 1].astype(int)]], axis=1)
    )
    return _Cells([outline] if len(row) else [], centres, widths[column] * heights[row] * 1.0, heat[row, column])


def _halved(
    corners: NDArray[np.int64],
    side: Level0Pixels,
    values: NDArray[np.float64],
    threshold: float,
    window: tuple[int, int, int, int],
    edges: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> _Cells:
    left, top, right, bottom = window
    across, down = edges
    if len(across) >= len(down):
        middle = int(across[len(across) // 2])
        windows = [(left, top, middle, bottom), (middle, top, right, bottom)]
    else:
        middle = int(down[len(down) // 2])
        windows = [(left, top, right, middle), (left, middle, right, bottom)]
    one, other = (_cells(corners, side, values, threshold, part) for part in windows)
    joined = [np.concatenate(pair) for pair in zip(one[1:], other[1:], strict=True)]
    return _Cells(one.outline + other.outline, *joined)


def _tiles_in(tree: Any, scores: BagScores, threshold: float) -> NDArray[np.int64]:
    """How many tiles at or above the threshold lie in each region."""
    low = scores.coords[scores.instances >= threshold] + _INSET
    high = low + scores.side - 2 * _INSET
    boxes = shapely.box(low[:, 0], low[:, 1], high[:, 0], high[:, 1])
    part = tree.query(boxes, predicate="intersects")[1]
    return np.bincount(part, minlength=len(tree.geometries))
