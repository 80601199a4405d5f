"""The slides and stitched tiles behind the bags: a few are kept open, and read by several threads."""

import io
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property

from PIL import Image

from its2clr.cohort.canvas import WHITE, Canvas, open_canvas
from its2clr.cohort.tiles import TileFile
from its2clr.units import Level0Pixels
from its2clr.viewer.deepzoom import TILE, DeepZoom

OPEN_PICTURES = 4
JPEG_QUALITY = 92
_CACHE_BYTES = 64 * 2**20
_LARGEST_READ = 4096
"""Stored pixels along a side that may be decoded for one tile; what is coarser is made from an overview."""

_OVERVIEW_SIDE = 2048


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
        """The whole picture small, read block by block: a flat slide or thousands of tiles are decoded once only.

        Tiles that are put together where each is a pixel or less would leave gaps, too; here they do not.
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
    """A picture in use; it is closed when the last user has left and it is no longer wanted."""

    def __init__(self) -> None:
        self.opening = threading.Lock()
        self.picture: Picture | None = None
        self.closing = ExitStack()
        self.users = 0


class Pictures:
    """Opens pictures by the number of their bag and keeps the last few; tiles are kept as JPEG.

    Args:
        tile_file: Gives the tile file of a bag.
    """

    def __init__(self, tile_file: Callable[[int], TileFile]) -> None:
        self._tile_file = tile_file
        self._opened: OrderedDict[int, _Opened] = OrderedDict()
        self._lock = threading.Lock()
        self._rendering = threading.BoundedSemaphore(_threads())
        self._jpegs = _ByteCache(_CACHE_BYTES)

    def jpeg(self, bag: int, level: int, column: int, row: int) -> bytes | None:
        """One tile of a bag's picture as JPEG; None if there is no such tile."""
        key = (bag, level, column, row)
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

    @contextmanager
    def open(self, bag: int) -> Iterator[Picture]:
        """The picture of a bag, which stays open at least as long as it is used here."""
        with self._lock:
            entry = self._opened.setdefault(bag, _Opened())
            self._opened.move_to_end(bag)
            entry.users += 1
        try:
            with entry.opening:
                if entry.picture is None:
                    entry.picture = Picture(entry.closing.enter_context(open_canvas(self._tile_file(bag))))
            yield entry.picture
        finally:
            self._leave(bag, entry)

    def _leave(self, bag: int, entry: _Opened) -> None:
        with self._lock:
            entry.users -= 1
            if entry.picture is None and not entry.users:
                self._opened.pop(bag, None)
            idle = [number for number, other in self._opened.items() if not other.users]
            surplus = max(len(self._opened) - OPEN_PICTURES, 0)
            closed = [self._opened.pop(number) for number in idle[:surplus]]
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
        self._values: OrderedDict[tuple[int, ...], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[int, ...]) -> bytes | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: tuple[int, ...], value: bytes) -> None:
        with self._lock:
            self._held += len(value) - len(self._values.get(key, b""))
            self._values[key] = value
            self._values.move_to_end(key)
            while self._held > self._most and len(self._values) > 1:
                self._held -= len(self._values.popitem(last=False)[1])


def _threads() -> int:
    return min(os.cpu_count() or 1, 8)
