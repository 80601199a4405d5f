"""Binary masks of tumour, TIFF or PNG at any level, become polygons along the edges of their pixels."""

import math
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import shapely
from PIL import Image

from its2clr.cohort.slides.shapes import Annotations, Shapes
from its2clr.errors import InputError

Mask = npt.NDArray[np.bool_]
Size = tuple[int, int]

_LARGEST_LEVEL = 2**26
"""Of a pyramid the finest level of at most so many pixels is read."""

_LARGEST_SINGLE = 2**28
_MOST_LINES = 500_000
_ROWS = 1024
_MOST_LISTED = 8
_COVERS_MOST = 0.5
_ADVICE = "save the mask again as a PNG or tiled TIFF with 0 for background and one other value for tumour"


def read_mask(
    path: Path,
    shapes: Shapes,
    *,
    level0_per_mask_pixel: float | None,
    level0_size: Size | None,
    classes: Collection[str] | None,
) -> Annotations:
    """Read a mask whose pixel (x, y) stands for a square of level 0 with its corner at (x, y) times the scale.

    Of a pyramid one level is read, the finest of up to 67 million pixels; the scale is that of the full mask.

    Args:
        path: The mask.
        shapes: Collects notes.
        level0_per_mask_pixel: Pixels of level 0 per pixel of the mask, along a side.
        level0_size: Width and height of the slide at level 0, from which the scale follows if it is not given.
        classes: Values that count as tumour; None: the one value that is not 0.

    Raises:
        InputError: If the scale is not known or wrong, or the file is damaged, too large or no mask.
    """
    pixels, full_size = _read_pixels(path, shapes)
    scale = _scale(path, full_size, level0_per_mask_pixel, level0_size)
    mask = _select(pixels, shapes, classes)
    del pixels
    covered = float(mask.mean())
    if covered == 0:
        shapes.notes.append("the mask is empty")
    elif covered > _COVERS_MOST:
        shapes.notes.append(f"the mask covers {covered:.0%} of the slide; is it inverted?")
    factor = np.array([scale * full_size[0] / mask.shape[1], scale * full_size[1] / mask.shape[0]])
    factor = np.where(np.abs(factor - np.rint(factor)) * mask.shape[::-1] < 1, np.rint(factor), factor)
    try:
        outline = mask_polygons(mask)
    except InputError as error:
        raise shapes.error("mask", str(error), "smooth it, or save it at a lower level") from error
    return Annotations(shapely.transform(outline, lambda xy: xy * factor), tuple(shapes.notes))


def mask_values(path: Path, shapes: Shapes) -> list[int]:
    """The values of a mask that are not 0.

    Raises:
        InputError: If the file is damaged, too large or no mask.
    """
    pixels, _ = _read_pixels(path, shapes)
    return sorted(_values(pixels) - {0})


def _values(pixels: npt.NDArray[Any]) -> set[int]:
    found: set[int] = set()
    for first in range(0, len(pixels), _ROWS):
        found |= {int(value) for value in np.unique(pixels[first : first + _ROWS])}
    return found


def _scale(path: Path, size: Size, given: float | None, level0_size: Size | None) -> float:
    if given is not None:
        if not 0 < given < np.inf:
            raise InputError(f"{path}: level0_per_mask_pixel must be a positive number, got {given}")
        return float(given)
    if level0_size is None:
        raise InputError(f"{path}: is a mask of {size[0]} x {size[1]} pixels; say how many slide pixels one stands for")
    across, down = level0_size[0] / size[0], level0_size[1] / size[1]
    whole = max(1, round(across))
    if all(abs(long - whole * short) < whole for long, short in zip(level0_size, size, strict=True)):
        return float(whole)
    if abs(across - down) > 0.01 * across:
        shapes = f"{size[0]} x {size[1]} pixels, the slide {level0_size[0]} x {level0_size[1]}"
        raise InputError(f"{path}: the mask has {shapes}: not the same shape; is it the mask of this slide?")
    return across


def _read_pixels(path: Path, shapes: Shapes) -> tuple[npt.NDArray[Any], Size]:
    """The pixels of one level, (H, W), and width and height of the full mask."""
    try:
        pixels, full_size = _read_tiff(path, shapes) if is_tiff(path) else _read_image(path)
    except InputError:
        raise
    except Exception as error:
        reason = str(error).strip() or type(error).__name__
        raise InputError(f"{path}: the mask cannot be decoded ({reason}); {_ADVICE}") from error
    if pixels.ndim == 3:
        pixels = _one_channel(pixels, path)
    if pixels.ndim != 2 or pixels.dtype.kind not in "bui" or not pixels.size:
        raise InputError(f"{path}: is no mask, its pixels are {pixels.dtype} of shape {pixels.shape}; {_ADVICE}")
    return pixels, full_size


def is_tiff(path: Path) -> bool:
    """Whether a file begins as TIFF or BigTIFF does."""
    with path.open("rb") as file:
        return file.read(4) in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def _read_tiff(path: Path, shapes: Shapes) -> tuple[npt.NDArray[Any], Size]:
    import tifffile

    with tifffile.TiffFile(path) as file:
        levels = file.series[0].levels
        sizes = [(level.sizes["width"], level.sizes["height"]) for level in levels]
        limit = _LARGEST_SINGLE if len(levels) == 1 else _LARGEST_LEVEL
        fitting = [number for number, (width, height) in enumerate(sizes) if width * height <= limit]
        if not fitting:
            raise _too_large(path, sizes[-1])
        if fitting[0] > 0:
            width, height = sizes[fitting[0]]
            shapes.notes.append(f"level {fitting[0]} of the mask was read, {width} x {height} pixels")
        axes, page = levels[fitting[0]].axes, levels[fitting[0]].keyframe
        if axes not in ("YX", "YXS", "SYX"):
            raise InputError(f"{path}: holds several pictures (axes {axes}), not one mask; {_ADVICE}")
        if len(page.dataoffsets) != math.prod(page.chunked):  # tifffile would fill what is missing with 0
            message = f"has {len(page.dataoffsets)} of {math.prod(page.chunked)} parts"
            raise InputError(f"{path}: the mask is damaged, it {message}; {_ADVICE}")
        pixels = np.asarray(levels[fitting[0]].asarray())
        return (np.moveaxis(pixels, 0, -1) if axes == "SYX" else pixels), sizes[0]


def _read_image(path: Path) -> tuple[npt.NDArray[Any], Size]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            with Image.open(path) as image:
                black_first = image.mode == "P" and (image.getpalette() or [1])[:3] == [0, 0, 0]
                pixels = np.asarray(image.convert("RGB") if image.mode == "P" and not black_first else image)
                return pixels, image.size
        except Image.DecompressionBombError as error:
            raise InputError(f"{path}: the mask is too large for a PNG; save it as a tiled pyramidal TIFF") from error


def _too_large(path: Path, size: Size) -> InputError:
    shape = f"{size[0]} x {size[1]} pixels"
    return InputError(f"{path}: the mask has {shape}, too many to read; save it with a pyramid, or at a lower level")


def _one_channel(pixels: npt.NDArray[Any], path: Path) -> npt.NDArray[Any]:
    """The grey value of pixels (H, W, C); a last channel of alpha is left aside."""
    colours = pixels[..., :-1] if pixels.shape[-1] in (2, 4) else pixels
    for channel in range(1, colours.shape[-1]):
        if not np.array_equal(colours[..., 0], colours[..., channel]):
            raise InputError(f"{path}: is in colour, what its colours mean is not known; {_ADVICE}")
    return colours[..., 0]


def _select(pixels: npt.NDArray[Any], shapes: Shapes, classes: Collection[str] | None) -> Mask:
    """Where the pixels are tumour."""
    if classes is not None:
        try:
            return np.isin(pixels, [int(value) for value in classes]).astype(bool, copy=False)
        except ValueError as error:
            shown = ", ".join(classes)
            advice = "give the values that count as tumour, for example 1"
            raise shapes.error("mask", f"classes of a mask are values, got {shown}", advice) from error
    values = _values(pixels)
    if len(values - {0}) > 1:
        listed = ", ".join(str(value) for value in sorted(values)[:_MOST_LISTED])
        advice = f"say with --class which values count as tumour, or {_ADVICE}"
        raise shapes.error("mask", f"holds the values {listed}, expected 0 and one other", advice)
    tumour: Mask = pixels != 0
    return tumour


def mask_polygons(mask: Mask) -> Any:
    """The exact outline of the pixels of a mask, pixel (x, y) being the square from (x, y) to (x + 1, y + 1).

    Edges between unlike pixels are joined to straight lines from corner to corner; the faces that these lines
    enclose are the polygons and their holes.

    Returns:
        A valid Polygon or MultiPolygon.
    """
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not len(rows):
        return shapely.Polygon()
    corner = np.array([columns[0], rows[0]])
    inside = np.pad(mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1], 1)
    horizontal = inside[1:, :] != inside[:-1, :]  # edge below row y, for every padded column
    vertical = inside[:, 1:] != inside[:, :-1]
    y, start, end = _lines(horizontal, vertical[1:, :] | vertical[:-1, :])
    x, top, bottom = _lines(vertical.T, (horizontal[:, 1:] | horizontal[:, :-1]).T)
    if len(y) + len(x) > _MOST_LINES:
        raise InputError(f"its outline has {len(y) + len(x)} sides (at most {_MOST_LINES}): it is noise, not regions")
    ends = np.concatenate([np.stack([start, y, end, y], 1), np.stack([x, top, x, bottom], 1)])
    faces = shapely.get_parts(shapely.polygonize(shapely.linestrings(ends.reshape(-1, 2, 2).astype(np.float64))))
    points = shapely.get_coordinates(shapely.point_on_surface(faces)).astype(np.int64)
    kept = faces[inside[points[:, 1] + 1, points[:, 0] + 1]]
    outline = kept[0] if len(kept) == 1 else shapely.multipolygons(kept)
    return shapely.transform(outline, lambda xy: xy + corner)


def _lines(edges: Mask, corners: Mask) -> tuple[npt.NDArray[np.int64], ...]:
    """Straight lines of edges, cut at corners.

    Args:
        edges: (Y, X + 1) whether pixel x - 1 has an edge on line y; the first and last column have none.
        corners: (Y, X) whether a crossing edge ends at point x of line y.

    Returns:
        Line, first point and last point of each.
    """
    inner = edges[:, 1:-1]  # the edge from point x to point x + 1
    begins = inner & (corners[:, :-1] | ~edges[:, :-2])
    finishes = inner & (corners[:, 1:] | ~edges[:, 2:])
    line, first = np.nonzero(begins)
    _, last = np.nonzero(finishes)
    return line, first, last + 1
