"""Crop an ultrasound image to what was scanned, a fan or a rectangle, and blacken the rest.

Scanners draw a frame around the scan: names, rulers, a logo, marks. The background of a frame has one or two colours,
and what is drawn on it is thin or small; a scan has all kinds of grey. So the scan is the largest part of the image
where most pixels have another colour than the background.
"""

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy import ndimage

Mask = npt.NDArray[np.bool_]

BACKGROUND = 0.15
"""Least share of the image that has exactly one grey if that is a background; black always is."""
VISIBLE = 6
"""Least difference from the background that is seen, in greys of 255."""
COLOURED, PURE = 50, 0.4
"""A pixel is coloured if one channel is at least so bright, and another is less than this share of it."""
NEIGHBOURHOOD, NARROWEST = 0.03, 0.05
"""Side of the square around a pixel of which most must not be background, and least width of a scan: more than that of
a line of text that touches it. Both are shares of the image's shorter side."""
LEAST_SHARE = 0.05
"""Least share of the image that is a scan."""
SECOND_SCAN = 0.5
"""Least size of a further scan on a split screen, as a share of the largest one."""
DIP = 0.2
"""Widest dark part at the probe that is filled, as a share of the scan's width; the arc of a fan is wider."""
WHOLE = 0.98
"""Share of the image from which the scan is all of it: there is no frame."""


def crop_to_scan(image: Image.Image) -> Image.Image | None:
    """Crop an RGB image to the scan and blacken what is in the crop, but not in the scan.

    Returns:
        The crop; the image itself if it has no frame; None if there is no scan in it.
    """
    scan = find_scan(np.asarray(image))
    if scan is None:
        return None
    if scan.mean() >= WHOLE:
        return image
    rows, columns = np.flatnonzero(scan.any(axis=1)), np.flatnonzero(scan.any(axis=0))
    box = (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)
    black = Image.new("RGB", image.size)
    return Image.composite(image, black, Image.fromarray(scan)).crop(box)


def find_scan(pixels: npt.NDArray[np.uint8]) -> Mask | None:
    """Find what was scanned.

    Args:
        pixels: (H, W, 3) RGB.

    Returns:
        (H, W) the scan, with the dark parts in it; of a split screen both scans. None if there is none.
    """
    around, width = (max(3, round(share * min(pixels.shape[:2]))) for share in (NEIGHBOURHOOD, NARROWEST))
    mostly = ndimage.uniform_filter(_drawn(pixels).astype(np.float32), around) > 0.5
    parts, _ = ndimage.label(ndimage.grey_opening(mostly.astype(np.uint8), (width, width)))
    sizes = np.bincount(parts.ravel())
    sizes[0] = 0  # what is in no part
    if sizes.max() < LEAST_SHARE * parts.size:
        return None
    scan = np.zeros(parts.shape, dtype=bool)
    for part in np.flatnonzero(sizes >= SECOND_SCAN * sizes.max()):
        scan |= _filled(parts == part)
    return scan


def _drawn(pixels: npt.NDArray[np.uint8]) -> Mask:
    """Pixels that are not background; without coloured marks, if the image as a whole is grey."""
    channels = np.ascontiguousarray(np.moveaxis(pixels, 2, 0))
    brightest, darkest = channels.max(axis=0), channels.min(axis=0)
    counts = np.bincount(brightest.ravel(), minlength=256)
    backgrounds = [0, *np.flatnonzero(counts >= BACKGROUND * brightest.size).tolist()]
    seen = np.all([np.abs(np.arange(256) - grey) >= VISIBLE for grey in backgrounds], axis=0)
    drawn: Mask = seen[brightest]
    bright = drawn & (brightest >= COLOURED)
    coloured = bright & (darkest < PURE * brightest)
    return drawn if 2 * coloured.sum() > bright.sum() else drawn & ~coloured


def _filled(part: Mask) -> Mask:
    """The convex hull of a connected part, less the dip of a fan under the arc of its probe."""
    height = len(part)
    columns = np.flatnonzero(part.any(axis=0))
    first = part[:, columns].argmax(axis=0).astype(np.float64)
    last = height - 1 - part[::-1, columns].argmax(axis=0).astype(np.float64)
    under_probe = ndimage.grey_opening(first, max(1, round(DIP * len(columns))))
    top = np.maximum(_lower_hull(first), under_probe)
    bottom = -_lower_hull(-last)
    rows = np.arange(height)[:, None]
    filled = np.zeros_like(part)
    filled[:, columns] = (rows > top - 0.5) & (rows < bottom + 0.5)
    return filled


def _lower_hull(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The largest convex function that is nowhere above the values."""
    corners: list[tuple[int, float]] = []
    for x, y in enumerate(values.tolist()):
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) >= _slope(corners[-1], (x, y)):
            corners.pop()
        corners.append((x, y))
    at, heights = np.array(corners).T
    hull: npt.NDArray[np.float64] = np.interp(np.arange(len(values)), at, heights)
    return hull


def _slope(left: tuple[int, float], right: tuple[int, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])
