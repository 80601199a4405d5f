"""The picture behind a bag's scores, at level-0 coordinates: its slide, or where there is none its tiles.

Of a bag of features without a slide only the places of its tiles can be shown, in grey.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from its2clr.cohort.slides.slide_image import OpenSlideImage, SlideImage, SlideProblem, open_slide, slide_size
from its2clr.cohort.tiles import TileFile, decode
from its2clr.units import Level0Pixels, Level0Size

WHITE = (255, 255, 255)
_UNSEEN = (214, 214, 214)
"""Colour of a tile of which only features are known."""
_LARGEST_TILE = 256
_SOME_TILES = 400
"""Tiles that stand for all of a bag in a thumbnail."""


class Canvas(Protocol):
    """A picture of which any part can be read at any scale.

    Attributes:
        size: Width and height at level 0.
        is_slide: Whether it is the slide itself, not its kept tiles.
        coarsest: Level-0 pixels per pixel of the coarsest stored picture: what a coarser one has to be made from.
        concurrent: Whether several threads may read at once.
    """

    size: Level0Size
    is_slide: bool
    coarsest: float
    concurrent: bool

    def read(
        self, x: Level0Pixels, y: Level0Pixels, width: Level0Pixels, height: Level0Pixels, out: tuple[int, int]
    ) -> Image.Image:
        """Read a part as RGB; what lies outside the picture is white.

        Args:
            x: Left edge at level 0.
            y: Upper edge at level 0.
            width: Pixels at level 0.
            height: Pixels at level 0.
            out: Width and height of the result.
        """
        ...


@contextmanager
def open_canvas(tiles: TileFile) -> Iterator[Canvas]:
    """The slide a bag was cut from if it can still be read, else the bag's tiles at their places."""
    with ExitStack() as opened:
        canvas: Canvas = TileCanvas(tiles)
        with suppress(SlideProblem):
            canvas = SlideCanvas(opened.enter_context(open_slide(Path(tiles.source))))
        yield canvas


def read_thumbnail(tiles: TileFile, longest: int, most_read: int) -> Image.Image:
    """A small picture of a bag, made quickly.

    Args:
        tiles: The bag.
        longest: Pixels of its longer side.
        most_read: Most stored pixels along a side of a slide to read for it; where that is too few, some of the kept
            tiles are shown at their places.
    """
    with open_canvas(tiles) as canvas:
        scale = min(longest / max(canvas.size), 1.0)
        out = max(round(canvas.size[0] * scale), 1), max(round(canvas.size[1] * scale), 1)
        if canvas.is_slide and max(canvas.size) / canvas.coarsest <= most_read:
            with suppress(SlideProblem):
                return canvas.read(Level0Pixels(0), Level0Pixels(0), *canvas.size, out)
        return _some_tiles(tiles, canvas.size, out)


def _some_tiles(tiles: TileFile, size: Level0Size, out: tuple[int, int]) -> Image.Image:
    """Evenly chosen tiles at their places, each drawn large enough to stand for those beside it that are left out."""
    chosen = np.unique(np.linspace(0, len(tiles) - 1, min(len(tiles), _SOME_TILES)).round().astype(np.int64))
    picture = Image.new("RGB", out, WHITE)
    across, down = out[0] / size[0], out[1] / size[1]
    side = tiles.tile_size_level0 * math.sqrt(len(tiles) / len(chosen))
    for number in chosen.tolist():
        x, y = tiles.coords[number].tolist()
        left, top = round(x * across), round(y * down)
        box = (max(round((x + side) * across) - left, 1), max(round((y + side) * down) - top, 1))
        tile = Image.new("RGB", box, _UNSEEN)
        if tiles.has_images:
            tile = Image.fromarray(decode(tiles.encoded(number))).resize(box, Image.Resampling.BOX)
        picture.paste(tile, (left, top))
    return picture


def slide_tile(tiles: TileFile, instance: int) -> Image.Image | None:
    """A tile of a bag of features, cut from its slide; None if there is no slide to read."""
    with open_canvas(tiles) as canvas:
        if not canvas.is_slide:
            return None
        x, y = tiles.coords[instance].tolist()
        side = tiles.tile_size_level0
        shown = min(tiles.tile_size, _LARGEST_TILE)
        try:
            return canvas.read(x, y, side, side, (shown, shown))
        except SlideProblem:
            return None


def unseen_tile() -> Image.Image:
    """What is shown instead of a tile of which only features are known."""
    return Image.new("RGB", (_LARGEST_TILE // 4, _LARGEST_TILE // 4), _UNSEEN)


class SlideCanvas:
    """Reads a slide from the coarsest level that is fine enough."""

    is_slide = True

    def __init__(self, slide: SlideImage) -> None:
        self._slide = slide
        self.size = slide_size(slide)
        self.coarsest = max(level.downsample for level in slide.levels)
        self.concurrent = isinstance(slide, OpenSlideImage)

    def read(
        self, x: Level0Pixels, y: Level0Pixels, width: Level0Pixels, height: Level0Pixels, out: tuple[int, int]
    ) -> Image.Image:
        """Read a part; see `Canvas`."""
        wanted = min(width / out[0], height / out[1])
        levels = self._slide.levels
        number = max(n for n, level in enumerate(levels) if n == 0 or level.downsample <= wanted * 1.001)
        across, down = width / levels[number].downsample, height / levels[number].downsample
        region = self._slide.read_region(x, y, number, math.ceil(across), math.ceil(down))
        return region.resize(out, Image.Resampling.BOX, box=(0, 0, across, down))


class TileCanvas:
    """Puts the kept tiles of a bag at their places, on white."""

    is_slide = False
    coarsest = 1.0
    concurrent = True

    def __init__(self, tiles: TileFile) -> None:
        self._tiles = tiles
        right, bottom = (tiles.coords.max(axis=0) + tiles.tile_size_level0).tolist()
        self.size: Level0Size = (Level0Pixels(right), Level0Pixels(bottom))

    def read(
        self, x: Level0Pixels, y: Level0Pixels, width: Level0Pixels, height: Level0Pixels, out: tuple[int, int]
    ) -> Image.Image:
        """Read a part; see `Canvas`."""
        side = self._tiles.tile_size_level0
        picture = Image.new("RGB", out, WHITE)
        places = self._tiles.coords - np.array([x, y])
        across, down = out[0] / width, out[1] / height
        seen = (places + side > 0).all(axis=1) & (places < np.array([width, height])).all(axis=1)
        for number in np.flatnonzero(seen):
            left, top = places[number].tolist()
            box = (round(left * across), round(top * down), round((left + side) * across), round((top + side) * down))
            if not (box[2] > box[0] and box[3] > box[1]):
                continue
            if not self._tiles.has_images:
                picture.paste(_UNSEEN, box)
            else:
                tile = Image.fromarray(decode(self._tiles.encoded(int(number))))
                picture.paste(tile.resize((box[2] - box[0], box[3] - box[1]), Image.Resampling.BOX), box[:2])
        return picture
