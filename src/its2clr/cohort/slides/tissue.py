"""Which tiles hold tissue: the full test on a tile's pixels, and a first pass over the thumbnail.

The full test is the paper's: the mean HSV saturation of the tile, as it is stored, is at least 30 of 255.

The thumbnail pass only ever answers "surely bare glass". A pixel's saturation is at most its darkness, the sum of
what each channel lacks of 255, since `255 * (1 - min / max) <= 255 - min`. Both are measured against the glass of
the slide itself; a tile is passed over when even twice the darkness it has beyond glass would leave it below the
threshold. Before that is believed, the most doubtful of those tiles and some spread over the slide are read in
full: if one of them holds tissue, the thumbnail misleads, and every tile is read.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from its2clr.errors import InputError

Verdict = Literal["kept", "low_saturation", "low_tissue"]

_VALUES = np.arange(256)
_DARKEST_GLASS = 100
_GLASS_SHARE = 0.05
_GLASS_BIN = 3
_NOISE = 3
_DARKNESS_WEIGHT = 2.0
_CHECKED = 16


@dataclass(frozen=True)
class TissueTest:
    """The full test.

    Attributes:
        min_saturation: The mean HSV saturation a tile must have, of 255.
        min_tissue: The share of its pixels that must be that saturated; 0 asks for none.
    """

    min_saturation: float = 30.0
    min_tissue: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_saturation <= 255:
            raise InputError(f"min_saturation must be between 0 and 255, got {self.min_saturation:g}")
        if not 0 <= self.min_tissue <= 1:
            raise InputError(f"min_tissue is a share, between 0 and 1, got {self.min_tissue:g}")

    def judge(self, tile: Image.Image) -> Verdict:
        """Test one RGB tile."""
        if self.min_saturation == 0 and self.min_tissue == 0:
            return "kept"
        pixels_of_value = np.array(tile.convert("HSV").getchannel("S").histogram())
        total = tile.width * tile.height
        if pixels_of_value @ _VALUES / total < self.min_saturation:
            return "low_saturation"
        if self.min_tissue and pixels_of_value[self.min_saturation <= _VALUES].sum() / total < self.min_tissue:
            return "low_tissue"
        return "kept"


@dataclass(frozen=True, eq=False)
class GlassGuess:
    """What the thumbnail says of each tile.

    Attributes:
        blank: (N,) whether the tile is taken for bare glass.
        to_check: Tiles among them to be read in full before that is believed.
    """

    blank: npt.NDArray[np.bool_]
    to_check: npt.NDArray[np.int64]


def guess_glass(
    thumbnail: Image.Image, coords: npt.NDArray[np.int64], side: int, downsample: float, min_saturation: float
) -> GlassGuess:
    """Find the tiles that are bare glass beyond doubt.

    Args:
        thumbnail: The whole slide at a coarse level.
        coords: (N, 2) x, y of the tiles at level 0.
        side: Side of a tile at level 0.
        downsample: Level-0 pixels per pixel of the thumbnail.
        min_saturation: The threshold of the full test.
    """
    saturation = np.asarray(thumbnail.convert("HSV").getchannel("S"))
    darkness = 765 - np.asarray(thumbnail).sum(axis=2, dtype=np.int32)
    glass_darkness, glass_saturation = _glass_level(darkness, saturation, min_saturation)
    doubt = _DARKNESS_WEIGHT * np.maximum(darkness - glass_darkness, 0.0)
    doubt += np.maximum(saturation - glass_saturation, 0.0)
    highest = glass_saturation + _tile_means(doubt, coords, side, downsample)
    blank = highest < min_saturation
    numbers = np.flatnonzero(blank)
    most_doubtful = numbers[np.argsort(-highest[numbers], kind="stable")[:_CHECKED]]
    spread = numbers[np.linspace(0, len(numbers) - 1, _CHECKED).astype(np.int64)] if len(numbers) else numbers
    return GlassGuess(blank, np.union1d(most_doubtful, spread))


def _glass_level(
    darkness: npt.NDArray[np.int32], saturation: npt.NDArray[np.uint8], min_saturation: float
) -> tuple[float, float]:
    """Darkness and saturation of the darkest shade of glass that covers much of the slide; of white if none does."""
    glassy = (saturation < min_saturation / 3) & (darkness < _DARKEST_GLASS)
    counts = np.bincount(darkness[glassy] // _GLASS_BIN, minlength=1)
    common = np.flatnonzero(counts >= _GLASS_SHARE * darkness.size)
    if not len(common):
        return 0.0, _NOISE
    top = float((common[-1] + 1) * _GLASS_BIN)
    return top, float(saturation[glassy & (darkness < top)].mean()) + _NOISE


def _tile_means(
    values: npt.NDArray[np.float64], coords: npt.NDArray[np.int64], side: int, downsample: float
) -> npt.NDArray[np.float64]:
    """Per tile, the sum over every pixel that it touches, and one more around, over the pixels of its area.

    That is at least the true mean, however the pixels of the thumbnail are placed over the tile.
    """
    height, width = values.shape
    sums = np.zeros((height + 1, width + 1))
    np.cumsum(np.cumsum(values, axis=0), axis=1, out=sums[1:, 1:])
    first = np.floor(coords / downsample).astype(np.int64) - 1
    last = np.ceil((coords + side) / downsample).astype(np.int64) + 1
    left, right = np.clip(first[:, 0], 0, width), np.clip(last[:, 0], 0, width)
    top, bottom = np.clip(first[:, 1], 0, height), np.clip(last[:, 1], 0, height)
    totals = sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left]
    return np.asarray(totals / (side / downsample) ** 2, dtype=np.float64)
