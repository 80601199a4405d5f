"""Lengths on a slide as types, so that pixels of a tile are never taken for pixels of level 0; and how they convert.

Level 0 is the finest level of a slide: all places are given there. A tile covers a square of it and is stored at the
scale that was asked for. The types cost nothing at run time: mypy tells them apart, Python sees int and float.
"""

from typing import NewType

Level0Pixels = NewType("Level0Pixels", int)
"""Pixels of a slide's finest level: where a tile lies and how much it covers."""

Level0Size = tuple[Level0Pixels, Level0Pixels]
"""Width and height, or x and y, at level 0."""

ORIGIN: Level0Size = (Level0Pixels(0), Level0Pixels(0))
"""The upper left corner of a slide."""

TilePixels = NewType("TilePixels", int)
"""Pixels of a tile as it is stored and as the encoder sees it."""

MicronsPerPixel = NewType("MicronsPerPixel", float)
"""Width of a pixel. Of which, the name says: `mpp` of a stored tile, if nothing else is said; `mpp_level0`."""

_MPP_AT_MAGNIFICATION_1 = 10.0


def mpp_of_magnification(magnification: float) -> MicronsPerPixel:
    """Microns per pixel at a magnification, by convention: 2 at 5x.

    Example:
        >>> mpp_of_magnification(5)
        2.0
    """
    return MicronsPerPixel(_MPP_AT_MAGNIFICATION_1 / magnification)


def magnification_of(microns: float, pixels: int = 1) -> float:
    """The magnification at which so many pixels are so many microns wide.

    Example:
        >>> magnification_of(0.5), magnification_of(256, pixels=512)
        (20.0, 20.0)
    """
    return _MPP_AT_MAGNIFICATION_1 * pixels / microns


def to_level0(pixels: TilePixels, mpp: MicronsPerPixel, mpp_level0: MicronsPerPixel) -> Level0Pixels:
    """How many pixels of level 0 a length in a tile spans: whole ones, at least one."""
    return Level0Pixels(max(1, round(pixels * mpp / mpp_level0)))


def tile_mpp(mpp_level0: MicronsPerPixel, tile_size: TilePixels, tile_size_level0: Level0Pixels) -> MicronsPerPixel:
    """The scale of a stored tile, from that of level 0 and both sizes of the tile."""
    return MicronsPerPixel(mpp_level0 * tile_size_level0 / tile_size)


def level0_mpp(mpp: MicronsPerPixel, tile_size: TilePixels, tile_size_level0: Level0Pixels) -> MicronsPerPixel:
    """The scale of level 0, from that of a stored tile and both sizes of the tile."""
    return MicronsPerPixel(mpp * tile_size / tile_size_level0)


def level0_magnification(magnification: float, tile_size: TilePixels, tile_size_level0: Level0Pixels) -> float:
    """The magnification of level 0, from that of a stored tile and both sizes of the tile."""
    return magnification * tile_size_level0 / tile_size


def shared_pixels(tile_size: TilePixels, step: float, side: float) -> TilePixels:
    """Pixels of a stored tile that its neighbour shares.

    Args:
        tile_size: Pixels of the tile.
        step: Distance from a tile to the next.
        side: Side of a tile, in the same unit as the step.
    """
    return TilePixels(max(0, round(tile_size * (1 - step / side))))
