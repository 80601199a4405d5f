"""A picture per slide: what was kept, and what was annotated, to be judged at a glance."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from its2clr.cohort.slides.slide_image import Level, SlideImage, SlideProblem
from its2clr.cohort.slides.tiler import Plan
from its2clr.files import atomic_path
from its2clr.units import Level0Pixels

OVERVIEWS_FOLDER = "overviews"
_LARGEST_SIDE, _LARGEST_TILE = 1024, 40
_KEPT = (0, 120, 60)
_VEIL = 0.55
_ANNOTATED = (220, 0, 0)


def overview_path(folder: Path, bag_id: str) -> Path:
    """The picture of a bag in a cohort folder."""
    return folder / OVERVIEWS_FOLDER / f"{quote(bag_id, safe='')}.png"


class Overview:
    """The slide, small: its thumbnail, or painted from the tiles as they are read."""

    def __init__(self, base: Level, plan: Plan, thumbnail: Image.Image | None) -> None:
        # canvas pixels per level-0 pixel; more than is needed to see a tile would take longer to write than to tile
        self._scale = min(1.0, _LARGEST_SIDE / max(base.width, base.height), _LARGEST_TILE / plan.side)
        size = (max(1, round(base.width * self._scale)), max(1, round(base.height * self._scale)))
        self._side = plan.side
        self._end = (plan.columns - 1) * plan.step + plan.side, (plan.rows - 1) * plan.step + plan.side
        self._painted = Image.new("RGB", size, (255, 255, 255))
        self._thumbnail = None if thumbnail is None else thumbnail.resize(size, Image.Resampling.BILINEAR)

    def add(self, image: Image.Image, x: int, y: int) -> None:
        """Paint a tile that was read."""
        left, top, right, bottom = self._box(x, y)
        small = image.resize((max(1, right - left), max(1, bottom - top)), Image.Resampling.NEAREST)
        self._painted.paste(small, (left, top))

    def add_margins(self, slide: SlideImage) -> None:
        """Paint what the grid leaves over at the right and lower edge, where there is no thumbnail.

        What cannot be read there stays white: no tile is made of it.
        """
        if self._thumbnail is not None:
            return
        base, (right, bottom) = slide.levels[0], self._end
        for left, top, width, height in (
            (right, 0, base.width - right, base.height),
            (0, bottom, right, base.height - bottom),
        ):
            for x in range(left, left + width, self._side):
                for y in range(top, top + height, self._side):
                    self._add_part(slide, x, y, min(self._side, left + width - x), min(self._side, top + height - y))

    def _add_part(self, slide: SlideImage, x: int, y: int, width: int, height: int) -> None:
        scale = self._scale
        box = round(x * scale), round(y * scale), round((x + width) * scale), round((y + height) * scale)
        if box[2] <= box[0] or box[3] <= box[1]:
            return
        level = max(
            (number for number, one in enumerate(slide.levels) if one.downsample <= 1 / scale),
            key=lambda number: slide.levels[number].downsample,
            default=0,
        )
        downsample = slide.levels[level].downsample
        size = max(1, round(width / downsample)), max(1, round(height / downsample))
        with suppress(SlideProblem):
            part = slide.read_region(Level0Pixels(x), Level0Pixels(y), level, *size)
            self._painted.paste(part.resize((box[2] - box[0], box[3] - box[1]), Image.Resampling.BOX), box[:2])

    def distrust(self) -> None:
        """Show the tiles that were read instead of the thumbnail: it is not of this slide."""
        self._thumbnail = None

    def _box(self, x: int, y: int) -> tuple[int, int, int, int]:
        scale, side = self._scale, self._side
        return round(x * scale), round(y * scale), round((x + side) * scale), round((y + side) * scale)

    def save(self, path: Path, kept: npt.NDArray[np.int64], tumour: Any = None) -> None:
        """Write the picture: what was not kept is veiled, kept tiles are framed, annotated regions outlined in red.

        Args:
            path: A PNG file.
            kept: (N, 2) x, y of the kept tiles at level 0.
            tumour: shapely geometry of the annotated regions at level 0.
        """
        canvas = self._thumbnail or self._painted
        boxes = [self._box(x, y) for x, y in kept.tolist()]
        shown = Image.new("L", canvas.size, round(255 * _VEIL))
        for box in boxes:
            shown.paste(0, box)
        picture = Image.composite(Image.new("RGB", shown.size, (255, 255, 255)), canvas, shown)
        draw = ImageDraw.Draw(picture)
        if self._side * self._scale >= 6:
            for left, top, right, bottom in boxes:
                draw.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=_KEPT)
        for ring in _rings(tumour):
            draw.line([(x * self._scale, y * self._scale) for x, y in ring], fill=_ANNOTATED, width=2)
        with atomic_path(path) as temporary:
            picture.save(temporary, "PNG", compress_level=1)  # made for every slide: quick before small


def _rings(geometry: Any) -> Iterator[list[tuple[float, float]]]:
    """The outlines of polygons and of their holes."""
    for part in getattr(geometry, "geoms", [] if geometry is None else [geometry]):
        if hasattr(part, "geoms"):
            yield from _rings(part)
        elif part.geom_type == "Polygon" and not part.is_empty:
            for ring in (part.exterior, *part.interiors):
                yield [(x, y) for x, y, *_ in ring.coords]
