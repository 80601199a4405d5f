"""Plain, pyramidal and OME-TIFF through tifffile, a region at a time: only the blocks it touches are decoded."""

import logging
import math
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from its2clr.cohort.slides.slide_image import Level, Scale, SlideProblem, cache_bytes, over_white
from its2clr.units import Level0Pixels, MicronsPerPixel

_LARGEST_DECODED = 32 * 2**20
_LARGEST_BLOCK = 2**30
_PER_MICRON = {"nm": 1e-3, "um": 1.0, "µm": 1.0, "μm": 1.0, "mm": 1e3, "cm": 1e4, "m": 1e6}
_MICRONS_PER_UNIT = {2: 25400.0, 3: 10000.0}  # ResolutionUnit inch and centimetre

logging.getLogger("tifffile").addHandler(logging.NullHandler())  # a SlideProblem says what is wrong with a file


class _Block(NamedTuple):
    """A stored tile or strip: its number in the page, and where it lies."""

    number: int
    plane: int
    y: int
    x: int


class TiffImage:
    """A TIFF of 8-bit RGB (or grey) pixels, tiled or in strips, with or without pyramid.

    Of several pictures in one file, such as slide, label and macro, the largest is the slide.
    """

    identity = ""

    def __init__(self, path: Path) -> None:
        import tifffile

        try:
            self._file = tifffile.TiffFile(path)
        except Exception as error:
            advice = "single images are packed with `its2clr cohort images`"
            raise SlideProblem(f"neither OpenSlide nor tifffile reads it ({_describe(error)}); {advice}") from error
        try:
            number, series = _largest(self._file)
            self._planes = [_LevelPages(path, self._file, level) for level in series.levels]
            self.mpp = _ome_mpp(self._file, number) or _tag_mpp(series.levels[0].keyframe)
            first = self._planes[0]
            self.levels = tuple(
                Level(level.width, level.height, (first.width / level.width + first.height / level.height) / 2)
                for level in self._planes
            )
        except SlideProblem:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise SlideProblem(f"is a damaged TIFF: {_describe(error)}") from error

    @property
    def is_whole_rgb(self) -> bool:
        """Whether every level is stored as RGB, and none of its blocks is missing."""
        return all(level.is_whole_rgb for level in self._planes)

    def read_region(self, x: Level0Pixels, y: Level0Pixels, level: int, width: int, height: int) -> Image.Image:
        """Read a region of a level; see `SlideImage`."""
        downsample = self.levels[level].downsample
        left, top = round(x / downsample), round(y / downsample)
        try:
            return self._planes[level].read(left, top, width, height)
        except SlideProblem:
            raise
        except Exception as error:
            raise SlideProblem(f"cannot be read at x {x}, y {y}: {_describe(error)}") from error

    def close(self) -> None:
        """Free the file."""
        self._file.close()


class _LevelPages:
    """The page or pages (one per colour) of one level."""

    def __init__(self, path: Path, file: Any, series: Any) -> None:
        axes, shape = series.get_axes(squeeze=True), series.get_shape(squeeze=True)
        sizes = dict(zip(axes, shape, strict=True))
        samples = sizes.get("S", sizes.get("C", 1))
        if axes not in {"YXS", "SYX", "CYX", "YX"} or samples not in {1, 3, 4} or series.dtype != np.uint8:
            found = f"axes {axes} of shape {shape}, {series.dtype}"
            raise SlideProblem(f"is no 8-bit RGB image: {found}; convert it to RGB")
        self._file, self._path, self.samples = file, path, samples
        self.height, self.width = sizes["Y"], sizes["X"]
        if not self.height * self.width:
            raise SlideProblem(f"is a damaged TIFF: a level has {self.width} x {self.height} pixels")
        self._pages = [page for page in series.pages if page is not None]
        page = self._pages[0].keyframe
        if page.photometric.name == "PALETTE":
            raise SlideProblem("has palette colours; convert it to RGB")
        self._block_height, self._block_width = (
            (page.tilelength, page.tilewidth) if page.is_tiled else (min(page.rowsperstrip, self.height), self.width)
        )
        self._interleaved = axes == "YXS"
        self._mapped = self._map(page) if self._block_bytes > _LARGEST_DECODED else None
        if self._mapped is None and self._block_bytes > _LARGEST_BLOCK:
            size = f"{self._block_bytes / 2**30:.0f} GiB"
            raise SlideProblem(f"is stored in blocks of {size}, too large to decode; convert it to a tiled TIFF")
        self._cache: OrderedDict[tuple[int, int], npt.NDArray[np.uint8]] = OrderedDict()
        self._cached, self._room = 0, cache_bytes(self._block_height * self.width * self.samples)

    @property
    def is_whole_rgb(self) -> bool:
        """See `TiffImage`."""
        return self._interleaved and self.samples == 3 and all(all(page.databytecounts) for page in self._pages)

    @property
    def _block_bytes(self) -> int:
        return int(self._block_height * self._block_width * (self.samples if self._interleaved else 1))

    def _map(self, page: Any) -> npt.NDArray[np.uint8] | None:
        """The pixels in place, where they are stored plainly: then nothing needs to be decoded."""
        if not (self._interleaved and len(self._pages) == 1 and page.is_memmappable):
            return None
        shape = (self.height, self.width, self.samples)
        return np.memmap(self._path, np.uint8, "r", offset=page.dataoffsets[0], shape=shape)

    def read(self, left: int, top: int, width: int, height: int) -> Image.Image:
        """Read a region in pixels of this level."""
        out = np.full((height, width, self.samples), 255, np.uint8)
        if self._mapped is not None:
            _paste(out, self._mapped, (0, 0), (top, left))
            return _to_rgb(out)
        for block in self._blocks(left, top, width, height):
            pixels = self._decode(block)
            if pixels is None:
                continue
            target = out if self._interleaved else out[..., block.plane : block.plane + 1]
            _paste(target, pixels, (block.y, block.x), (top, left))
        return _to_rgb(out)

    def _blocks(self, left: int, top: int, width: int, height: int) -> Iterator[_Block]:
        rows, columns = math.ceil(self.height / self._block_height), math.ceil(self.width / self._block_width)
        last_row = min((top + height - 1) // self._block_height, rows - 1)
        last_column = min((left + width - 1) // self._block_width, columns - 1)
        for plane in range(1 if self._interleaved else self.samples):
            for row in range(max(top // self._block_height, 0), last_row + 1):
                for column in range(max(left // self._block_width, 0), last_column + 1):
                    number = row * columns + column
                    yield _Block(number, plane, row * self._block_height, column * self._block_width)

    def _decode(self, block: _Block) -> npt.NDArray[np.uint8] | None:
        """The pixels of a block, (H, W, S); None where the file holds none."""
        key = (block.plane, block.number)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        in_pages = len(self._pages) > 1
        page = self._pages[block.plane if in_pages else 0]
        per_plane = len(page.dataoffsets) // (1 if in_pages or self._interleaved else self.samples)
        number = block.number + (0 if in_pages or self._interleaved else block.plane * per_plane)
        size = page.databytecounts[number]
        if size == 0:
            return None
        handle = self._file.filehandle
        handle.seek(page.dataoffsets[number])
        data = handle.read(size)
        if len(data) < size:
            raise SlideProblem(f"is cut short: the pixels at x {block.x}, y {block.y} are missing")
        keyframe = page.keyframe
        segment, _, _ = keyframe.decode(data, number, jpegtables=keyframe.jpegtables)
        # blocks at the right and lower edge are stored whole, beyond the image
        pixels: npt.NDArray[np.uint8] = segment[0, : self.height - block.y, : self.width - block.x]
        self._cache[key] = pixels
        self._cached += pixels.nbytes
        while self._cached > self._room and len(self._cache) > 1:
            self._cached -= self._cache.popitem(last=False)[1].nbytes
        return pixels


def _paste(
    out: npt.NDArray[np.uint8], pixels: npt.NDArray[np.uint8], at: tuple[int, int], origin: tuple[int, int]
) -> None:
    """Copy what a block at (y, x) holds of the region that begins at `origin`."""
    top, left = max(at[0], origin[0]), max(at[1], origin[1])
    bottom = min(at[0] + pixels.shape[0], origin[0] + out.shape[0])
    right = min(at[1] + pixels.shape[1], origin[1] + out.shape[1])
    if top < bottom and left < right:
        held = pixels[top - at[0] : bottom - at[0], left - at[1] : right - at[1]]
        out[top - origin[0] : bottom - origin[0], left - origin[1] : right - origin[1]] = held


def _to_rgb(pixels: npt.NDArray[np.uint8]) -> Image.Image:
    """Grey is repeated; transparency goes over white."""
    if pixels.shape[2] == 1:
        return Image.fromarray(pixels[..., 0]).convert("RGB")
    image = Image.fromarray(pixels)
    return over_white(image) if image.mode == "RGBA" else image


def _largest(file: Any) -> tuple[int, Any]:
    """Number and series of the largest picture."""
    if not len(file.series):
        raise SlideProblem("is a damaged TIFF: it holds no picture; was it cut short?")
    return max(enumerate(file.series), key=lambda one: (math.prod(one[1].shape), -one[0]))


def _ome_mpp(file: Any, number: int) -> Scale | None:
    """What OME metadata say of the picture of this number."""
    import tifffile

    if not file.is_ome:
        return None
    with suppress(Exception):
        images = tifffile.xml2dict(file.ome_metadata)["OME"]["Image"]
        pixels = (images[number] if isinstance(images, list) else images)["Pixels"]
        across, down = (
            float(pixels[f"PhysicalSize{axis}"]) * _PER_MICRON[pixels.get(f"PhysicalSize{axis}Unit", "µm")]
            for axis in "XY"
        )
        return MicronsPerPixel(across), MicronsPerPixel(down)
    return None


def _tag_mpp(page: Any) -> Scale | None:
    tags = page.tags
    try:
        microns = _MICRONS_PER_UNIT[int(tags["ResolutionUnit"].value)]
        across, down = (tags[name].value for name in ("XResolution", "YResolution"))
        return MicronsPerPixel(microns * across[1] / across[0]), MicronsPerPixel(microns * down[1] / down[0])
    except (KeyError, ZeroDivisionError, TypeError):
        return None


def _describe(error: Exception) -> str:
    return str(error).strip() or type(error).__name__
