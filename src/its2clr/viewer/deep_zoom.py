"""Pictures of bags, as slides or as tiles put together, served as Deep Zoom tiles.

A few pictures are kept open, and read by several threads.
"""

import io
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import NamedTuple

from PIL import Image

from its2clr.cohort.canvas import WHITE, Canvas, open_canvas, read_thumbnail
from its2clr.cohort.tiles import TileFile
from its2clr.units import Level0Pixels, Level0Size

TILE = 254
OVERLAP = 1
OPEN_PICTURES = 4
JPEG_QUALITY = 92
THUMBNAIL = 96
"""Pixels of the longer side of a bag's picture in the list."""
_CACHE_BYTES = 64 * 2**20
_LARGEST_READ = 4096
"""Most stored pixels along a side to decode for one tile; tiles that would need more are cut from an overview."""
_OVERVIEW_SIDE = 2048


class Part(NamedTuple):
    """A part of a picture at level 0, and the pixels it is shown with."""

    x: Level0Pixels
    y: Level0Pixels
    width: Level0Pixels
    height: Level0Pixels
    out: tuple[int, int]


class DeepZoom:
    """Which part of level 0 each Deep Zoom tile shows.

    Each level is twice as wide and high as the one before, the last one is at full size. Tiles have `TILE` pixels and a
    border of `OVERLAP` pixels that neighbours share.

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


class Picture:
    """The picture of one bag, as tiles of a Deep Zoom pyramid.

    Args:
        canvas: What is read.
    """

    def __init__(self, canvas: Canvas) -> None:
        self.size, self.is_slide = canvas.size, canvas.is_slide
        self.zoom = DeepZoom(canvas.size)
        self._canvas = canvas
        self._reading: AbstractContextManager[object] = nullcontext() if canvas.concurrent else threading.Lock()
        self._making_overview = threading.Lock()
        self._by_overview = not canvas.is_slide or max(canvas.size) / canvas.coarsest > _LARGEST_READ
        wanted = math.ceil(math.log2(max(canvas.size) / _OVERVIEW_SIDE))
        most = math.floor(math.log2(2 * _LARGEST_READ * canvas.coarsest / TILE))
        self._overview_factor = 1 << max(min(wanted, most), 0)

    def tile(self, level: int, column: int, row: int) -> Image.Image | None:
        """One tile; None if there is no such tile."""
        part = self.zoom.part(level, column, row)
        if part is None:
            return None
        factor = self._overview_factor
        if self._by_overview and self.zoom.factor(level) >= factor:
            with self._making_overview:
                overview = self._overview
            box = (part.x / factor, part.y / factor, (part.x + part.width) / factor, (part.y + part.height) / factor)
            return overview.resize(part.out, Image.Resampling.BOX, box=box)
        with self._reading:
            return self._canvas.read(*part)

    @cached_property
    def _overview(self) -> Image.Image:
        """The whole picture, scaled down.

        It is read block by block, so that a slide without levels, or thousands of tiles, are decoded only once. And
        tiles that are a pixel or less would leave gaps if each were placed alone.
        """
        factor = self._overview_factor
        size = tuple(math.ceil(length / factor) for length in self.size)
        picture = Image.new("RGB", (size[0], size[1]), WHITE)
        block = max(int(_LARGEST_READ * self._canvas.coarsest / factor), 1)
        corners = [(x, y) for y in range(0, size[1], block) for x in range(0, size[0], block)]

        def read(corner: tuple[int, int]) -> Image.Image:
            with self._reading:
                x, y, side = (Level0Pixels(length * factor) for length in (*corner, block))
                return self._canvas.read(x, y, side, side, (block, block))

        with ThreadPoolExecutor(_threads()) as threads:
            for corner, found in zip(corners, threads.map(read, corners), strict=True):
                picture.paste(found, corner)
        return picture


class _Opened:
    """A picture that is open; it is closed once nobody uses it and newer ones have taken its place."""

    def __init__(self) -> None:
        self.opening = threading.Lock()
        self.picture: Picture | None = None
        self.closing = ExitStack()
        self.users = 0


class Pictures:
    """Opens pictures by the number of their bag and keeps the last few; tiles are kept as JPEG.

    Args:
        tile_file: Gives the tile file of a bag.
        tag: Gives a word for a bag that changes when its pixels may have changed.
    """

    def __init__(self, tile_file: Callable[[int], TileFile], tag: Callable[[int], str]) -> None:
        self._tile_file, self._tag = tile_file, tag
        self._opened: OrderedDict[str, _Opened] = OrderedDict()
        self._lock = threading.Lock()
        self._rendering = threading.BoundedSemaphore(_threads())
        self._jpegs = _ByteCache(_CACHE_BYTES)

    def jpeg(self, bag: int, level: int, column: int, row: int) -> bytes | None:
        """One tile of a bag's picture as JPEG; None if there is no such tile."""
        key = (self._tag(bag), level, column, row)
        if (held := self._jpegs.get(key)) is not None:
            return held
        with self._rendering, self.open(bag) as picture:
            tile = picture.tile(level, column, row)
        if tile is None:
            return None
        buffer = io.BytesIO()
        tile.save(buffer, "JPEG", quality=JPEG_QUALITY, subsampling=0)
        self._jpegs.put(key, buffer.getvalue())
        return buffer.getvalue()

    def thumbnail(self, bag: int) -> bytes:
        """A small picture of a bag as JPEG; slides that are open for the page stay open."""
        key = (self._tag(bag), "thumbnail")
        if (held := self._jpegs.get(key)) is not None:
            return held
        with self._rendering:
            picture = read_thumbnail(self._tile_file(bag), THUMBNAIL, _LARGEST_READ)
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=JPEG_QUALITY)
        self._jpegs.put(key, buffer.getvalue())
        return buffer.getvalue()

    @contextmanager
    def open(self, bag: int) -> Iterator[Picture]:
        """The picture of a bag; it stays open while it is used here."""
        tag = self._tag(bag)
        with self._lock:
            entry = self._opened.setdefault(tag, _Opened())
            self._opened.move_to_end(tag)
            entry.users += 1
        try:
            with entry.opening:
                if entry.picture is None:
                    entry.picture = Picture(entry.closing.enter_context(open_canvas(self._tile_file(bag))))
            yield entry.picture
        finally:
            self._leave(tag, entry)

    def _leave(self, tag: str, entry: _Opened) -> None:
        with self._lock:
            entry.users -= 1
            if entry.picture is None and not entry.users:
                self._opened.pop(tag, None)
            idle = [name for name, other in self._opened.items() if not other.users]
            surplus = max(len(self._opened) - OPEN_PICTURES, 0)
            closed = [self._opened.pop(name) for name in idle[:surplus]]
        for other in closed:
            other.closing.close()

    def close(self) -> None:
        """Close every picture."""
        with self._lock:
            closed = list(self._opened.values())
            self._opened.clear()
        for entry in closed:
            entry.closing.close()


class _ByteCache:
    """The last used values, up to a number of bytes."""

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0
        self._values: OrderedDict[tuple[str | int, ...], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[str | int, ...]) -> bytes | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: tuple[str | int, ...], value: bytes) -> None:
        with self._lock:
            self._held += len(value) - len(self._values.get(key, b""))
            self._values[key] = value
            self._values.move_to_end(key)
            while self._held > self._most and len(self._values) > 1:
                self._held -= len(self._values.popitem(last=False)[1])


def _span(number: int, length: Level0Pixels, factor: int) -> tuple[Level0Pixels, Level0Pixels, int] | None:
    """Start and length at level 0, and pixels, of one tile along one side."""
    pixels = math.ceil(length / factor)
    if number < 0 or number * TILE >= pixels:
        return None
    first = max(number * TILE - OVERLAP, 0)
    last = min((number + 1) * TILE + OVERLAP, pixels)
    start = first * factor
    return Level0Pixels(start), Level0Pixels(min(last * factor, length) - start), last - first


def _threads() -> int:
    return min(os.cpu_count() or 1, 8)
