"""Lay a grid over a slide and cut its tiles.

Grid: tiles begin at x, y = 0 of level 0 and follow each other by `step` in both directions. Only whole tiles are
cut: what is left over at the right and lower edge, less than a tile, is not used. Order: row by row from the top,
each row from the left. All lengths of the grid are whole pixels of level 0, so that it cannot drift: the side is
`tile_size * mpp asked / mpp of the slide`, rounded, and the stored mpp is the one this gives.

Pixels: from the coarsest level that is at least as fine as the tiles, then one resize.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from its2clr.cohort.image_files import FILTERS, Resize
from its2clr.cohort.slides.glass import Glass, Thumbnail
from its2clr.cohort.slides.slide_image import SlideImage, SlideProblem
from its2clr.cohort.slides.tissue import TissueTest, Verdict
from its2clr.errors import InputError
from its2clr.units import ORIGIN, Level0Pixels, MicronsPerPixel, TilePixels, tile_mpp, to_level0

_NO_OVERLAP = TilePixels(0)
_MOST_TILES = 4_000_000
_COARSEST = 1.25
_LEVEL_SLACK = 1.01
_THUMBNAIL_PIXELS = 8_000_000
_THUMBNAIL_PIXELS_PER_TILE = 4
_THUMBNAIL_PIXELS_ENOUGH = 16
_THUMBNAIL_GAIN = 4


@dataclass(frozen=True)
class Plan:
    """Where the tiles of a slide are and how they are read.

    Attributes:
        columns: Tiles in a row.
        rows: Rows.
        step: Distance of neighbours at level 0.
        side: Side of a tile at level 0.
        level: The level that is read.
        read_size: Side of a tile in that level.
        tile_size: Side of the stored tile.
        mpp: Microns per pixel of the stored tile.
    """

    columns: int
    rows: int
    step: Level0Pixels
    side: Level0Pixels
    level: int
    read_size: int
    tile_size: TilePixels
    mpp: MicronsPerPixel

    def coords(self) -> npt.NDArray[np.int64]:
        """(N, 2) x, y of every tile of the grid at level 0, in order."""
        y, x = np.divmod(np.arange(self.rows * self.columns, dtype=np.int64), self.columns)
        return np.stack([x, y], axis=1) * self.step


@dataclass(frozen=True)
class Tile:
    """A tile that was read.

    Attributes:
        number: Its number in the grid.
        image: RGB pixels at the stored size.
        verdict: What the tissue test says of it.
    """

    number: int
    image: Image.Image
    verdict: Verdict


def plan_tiles(
    slide: SlideImage,
    mpp_level0: MicronsPerPixel,
    mpp: MicronsPerPixel,
    tile_size: TilePixels,
    overlap: TilePixels = _NO_OVERLAP,
) -> Plan:
    """Lay the grid over a slide.

    Args:
        slide: The slide.
        mpp_level0: Microns per pixel of its level 0.
        mpp: Microns per pixel asked for.
        tile_size: Pixels of the stored tile.
        overlap: Pixels of the stored tile that neighbours share.

    Raises:
        InputError: If the overlap does not fit the tile.
        SlideProblem: If the slide is coarser than the tiles, smaller than one, or too large to be true.
    """
    if not 0 <= overlap < tile_size:
        raise InputError(f"overlap must be from 0 to below the tile size of {tile_size} pixels, got {overlap}")
    if mpp_level0 > _COARSEST * mpp:
        raise SlideProblem(f"has {mpp_level0:g} um/px, too coarse for tiles of {mpp:g} um/px")
    side = to_level0(tile_size, mpp, mpp_level0)
    step = to_level0(TilePixels(tile_size - overlap), mpp, mpp_level0)
    base = slide.levels[0]
    if base.width < side or base.height < side:
        raise SlideProblem(f"has {base.width} x {base.height} pixels, less than one tile of {side} x {side}")
    columns, rows = (base.width - side) // step + 1, (base.height - side) // step + 1
    if columns * rows > _MOST_TILES:
        found = f"{base.width} x {base.height} pixels would be {columns * rows} tiles"
        raise SlideProblem(f"is too large to be true: {found}, more than {_MOST_TILES}")
    finest_needed = _LEVEL_SLACK * side / tile_size
    level = max(
        (number for number, one in enumerate(slide.levels) if one.downsample <= finest_needed),
        key=lambda number: slide.levels[number].downsample,
        default=0,
    )
    read_size = max(1, round(side / slide.levels[level].downsample))
    return Plan(columns, rows, step, side, level, read_size, tile_size, tile_mpp(mpp_level0, tile_size, side))


def read_tile(
    slide: SlideImage, plan: Plan, x: Level0Pixels, y: Level0Pixels, resize: Resize = "bilinear"
) -> Image.Image:
    """Read one tile at the stored size.

    Args:
        slide: The slide.
        plan: How tiles are read.
        x: Left edge at level 0.
        y: Upper edge at level 0.
        resize: How pixels are interpolated, if they must be.

    Raises:
        SlideProblem: If it cannot be read.
    """
    image = slide.read_region(x, y, plan.level, plan.read_size, plan.read_size)
    if plan.read_size == plan.tile_size:
        return image
    return image.resize((plan.tile_size, plan.tile_size), FILTERS[resize])


def read_thumbnail(slide: SlideImage, plan: Plan) -> Thumbnail | None:
    """The slide at a coarse level, to find bare glass on; None if no level serves.

    Taken is the coarsest level that shows a tile with enough pixels, else the finest that is read quickly. Pixels must
    be enough since some pyramids are made by leaving pixels out: the coarser, the less they show of a tile.
    """
    limit = plan.side / _THUMBNAIL_PIXELS_PER_TILE
    gain = _THUMBNAIL_GAIN * slide.levels[plan.level].downsample
    fitting = sorted(
        (one.downsample, number)
        for number, one in enumerate(slide.levels)
        if gain <= one.downsample <= limit and one.width * one.height <= _THUMBNAIL_PIXELS
    )
    if not fitting:
        return None
    well = [one for one in fitting if one[0] <= plan.side / _THUMBNAIL_PIXELS_ENOUGH]
    downsample, number = well[-1] if well else fitting[0]
    level = slide.levels[number]
    return Thumbnail(slide.read_region(*ORIGIN, number, level.width, level.height), downsample)


def cut_tiles(
    slide: SlideImage,
    plan: Plan,
    test: TissueTest,
    resize: Resize = "bilinear",
    glass: Glass | None = None,
) -> Iterator[Tile]:
    """Read and test the tiles of the grid, passing over bare glass.

    Tiles come in the order of the grid, each at most once, but for two kinds: those taken for glass that touch a kept
    tile come a row later, while their pixels are still in the slide's cache; those that are read because the coarse
    level misleads come last.

    Args:
        slide: The slide.
        plan: Its grid.
        test: The full test.
        resize: How pixels are interpolated.
        glass: What a coarse level says of the tiles of this grid; every tile is read if None.
    """
    coords = plan.coords()

    def read(numbers: npt.NDArray[np.int64]) -> Iterator[Tile]:
        for number in numbers.tolist():
            x, y = coords[number].tolist()
            image = read_tile(slide, plan, x, y, resize)
            yield Tile(number, image, test.judge(image))

    if glass is None:
        yield from read(np.arange(len(coords)))
        return
    unread = np.ones((plan.rows, plan.columns), bool)

    def compared(row: int, chosen: npt.NDArray[np.bool_]) -> Iterator[Tile]:
        numbers = np.flatnonzero(chosen & unread[row]) + row * plan.columns
        unread[row] &= ~chosen
        for tile in read(numbers):
            glass.compare(tile.number, tile.image, tile.verdict)
            yield tile

    sure = (~glass.blank).reshape(plan.rows, plan.columns)
    sure.flat[glass.to_check] = True
    for row in range(plan.rows):
        yield from compared(row, sure[row])
        if row:
            yield from compared(row - 1, glass.beside(row - 1, plan.columns))
    yield from compared(plan.rows - 1, glass.beside(plan.rows - 1, plan.columns))
    if glass.misleads:
        yield from read(np.flatnonzero(unread))
