"""The geometry of a Deep Zoom picture: which part of level 0 each of its tiles shows."""

import math
from typing import NamedTuple

from its2clr.units import Level0Pixels, Level0Size

TILE = 254
OVERLAP = 1


class Part(NamedTuple):
    """A part of a picture at level 0, and the pixels it is shown with."""

    x: Level0Pixels
    y: Level0Pixels
    width: Level0Pixels
    height: Level0Pixels
    out: tuple[int, int]


class DeepZoom:
    """Levels of halves, the last one at full size; tiles of `TILE` pixels with a border of `OVERLAP` shared pixels.

    Args:
        size: Width and height of the picture.
    """

    def __init__(self, size: Level0Size) -> None:
        self.size = size
        self.levels = math.ceil(math.log2(max(*size, 1))) + 1

    def factor(self, level: int) -> int:
        """Level-0 pixels per pixel of a level."""
        return 1 << (self.levels - 1 - level)

    def part(self, level: int, column: int, row: int) -> Part | None:
        """What a tile shows; None if there is no such tile."""
        if not 0 <= level < self.levels:
            return None
        factor = self.factor(level)
        across = _span(column, self.size[0], factor)
        down = _span(row, self.size[1], factor)
        if across is None or down is None:
            return None
        return Part(across[0], down[0], across[1], down[1], (across[2], down[2]))


def _span(number: int, length: Level0Pixels, factor: int) -> tuple[Level0Pixels, Level0Pixels, int] | None:
    """Start and length at level 0, and pixels, of one tile along one side."""
    pixels = math.ceil(length / factor)
    if number < 0 or number * TILE >= pixels:
        return None
    first = max(number * TILE - OVERLAP, 0)
    last = min((number + 1) * TILE + OVERLAP, pixels)
    start = first * factor
    return Level0Pixels(start), Level0Pixels(min(last * factor, length) - start), last - first
