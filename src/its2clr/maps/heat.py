"""The map of a bag: from the scores of its tiles to a raster of probability, at any scale, and its colours.

Places: tile (x, y) covers the level-0 pixels from x to x + side and from y to y + side, the last ones not included.
A raster over the window (x, y, width, height) with W x H pixels divides it evenly: pixel (i, j) is the rectangle from
x + i * width / W to x + (i + 1) * width / W, and likewise down. Nothing is shifted by half a pixel or rounded.

Values: a pixel has the mean probability of the tiles on it, each weighted by the area of the pixel that it covers. So
where tiles overlap, their mean is shown, and the map is finer than a tile. Where no edge of a tile crosses a pixel,
edges are exact; elsewhere they are drawn to the nearest half pixel.

A pixel has no value (NaN) unless tiles cover half of it or, where tiles are smaller than pixels, a quarter of a tile
lies on it: so every tile is seen on at least one pixel.

Colours: one fixed scale from 0 to 1, transparent below a threshold.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from its2clr.errors import InputError
from its2clr.run.scores import BagScores
from its2clr.units import Level0Pixels

DECIMALS = 9
"""Means are rounded to these, so that the mean of tiles that are just on a threshold does not fall below it."""
SCALE = "viridis"
"""Equal steps look equal, also to the colour-blind; yellow is high, as in the paper's figure 3."""


class Window(NamedTuple):
    """A part of a bag, in pixels of level 0."""

    x: Level0Pixels
    y: Level0Pixels
    width: Level0Pixels
    height: Level0Pixels


def heat(scores: BagScores, window: Window, out: tuple[int, int]) -> NDArray[np.float64]:
    """The probability over a window.

    Args:
        scores: What a model says about the bag.
        window: The part to draw.
        out: Width and height of the raster.

    Returns:
        (height, width) probabilities, NaN where there is no tile.
    """
    seen = tiles_in(scores, window)
    if not seen.any():
        return np.full(out[::-1], np.nan)
    size = np.array(window[2:]) / np.array(out)  # level-0 pixels per pixel of the raster
    places = scores.coords[seen] - np.array(window[:2])
    starts, ends = places / size, (places + scores.side) / size
    across = _covered(starts[:, 0], ends[:, 0], out[0])
    down = _covered(starts[:, 1], ends[:, 1], out[1])
    total, covered = weighted_sums(down, across, scores.instances[seen])
    least = min(0.5, float(np.prod(scores.side / size)) / 4)
    return np.where(covered >= least - 10.0**-DECIMALS, mean(total, covered), np.nan)


def check_threshold(threshold: float | None) -> None:
    """Check that a threshold, if one is given, is a probability.

    Raises:
        InputError: If it is not between 0 and 1.
    """
    if threshold is not None and not 0 <= threshold <= 1:
        raise InputError(f"threshold is a probability from 0 to 1, got {threshold:g}")


def colour(probability: NDArray[np.float64], threshold: float) -> NDArray[np.uint8]:
    """Colours of probabilities.

    Args:
        probability: (...) values from 0 to 1, NaN for none.
        threshold: Probability below which nothing is seen.

    Returns:
        (..., 4) RGBA, opaque or (0, 0, 0, 0).
    """
    with np.errstate(invalid="ignore"):
        visible = probability >= threshold
    number = 1 + np.rint(np.where(visible, probability, 0) * 255).astype(np.int64)
    colours: NDArray[np.uint8] = _table()[number * visible]
    return colours


def tiles_in(scores: BagScores, window: Window) -> NDArray[np.bool_]:
    """(N,) which tiles share area with a window."""
    x, y = scores.coords.T
    across = (x + scores.side > window.x) & (x < window.x + window.width)
    seen: NDArray[np.bool_] = across & (y + scores.side > window.y) & (y < window.y + window.height)
    return seen


def weighted_sums(
    down: sparse.csr_array, across: sparse.csr_array, values: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sums over tiles of weight times value, and of weight, at every crossing of a row and a column.

    Args:
        down: (N, rows) weight of each tile in each row.
        across: (N, columns) weight of each tile in each column.
        values: (N,) value of each tile.
    """
    scaled = sparse.csr_array((across.data * np.repeat(values, np.diff(across.indptr)), across.indices, across.indptr))
    scaled.resize(across.shape)
    return (down.T @ scaled).toarray(), (down.T @ across).toarray()


def mean(total: NDArray[np.float64], weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """The weighted mean, 0 where there is no weight."""
    found: NDArray[np.float64] = np.divide(total, weight, out=np.zeros_like(total), where=weight > 0)
    return found.round(DECIMALS)


def spans(first: NDArray[np.int64], last: NDArray[np.int64], count: int) -> sparse.csr_array:
    """(N, count) matrix that is 1 in row n from column first[n] up to, not including, last[n]."""
    lengths = last - first
    begins = np.concatenate([[0], np.cumsum(lengths)])
    columns = np.arange(begins[-1]) - np.repeat(begins[:-1] - first, lengths)
    return sparse.csr_array((np.ones(len(columns)), columns, begins), shape=(len(first), count))


def _covered(starts: NDArray[np.float64], ends: NDArray[np.float64], count: int) -> sparse.csr_array:
    """(N, count) length of every pixel that each tile covers, in pixels."""
    starts, ends = np.clip(starts, 0, count), np.clip(ends, 0, count)
    covered = spans(np.floor(starts).astype(np.int64), np.ceil(ends).astype(np.int64), count)
    tile = np.repeat(np.arange(len(starts)), np.diff(covered.indptr))
    pixel = covered.indices
    covered.data = np.minimum(ends[tile], pixel + 1) - np.maximum(starts[tile], pixel)
    return covered


@cache
def _table() -> NDArray[np.uint8]:
    """The transparent colour, then the 256 colours of the scale."""
    import matplotlib as mpl

    colours: NDArray[np.uint8] = mpl.colormaps[SCALE](np.arange(256), bytes=True)
    return np.concatenate([np.zeros((1, 4), np.uint8), colours])
