"""Which tiles are bare glass and need not be read, from a coarse level of the slide; and whether that can be believed.

The coarse level only ever answers "surely bare glass". A pixel's saturation is at most its darkness, the sum of what
each channel lacks of 255, since `255 * (1 - min / max) <= 255 - min`. Both are measured against the glass of the slide
itself; a tile is passed over when even twice the darkness it has beyond glass would leave it below the threshold.

No coarse level can prove that: it may be damaged, shifted, of another picture, or hold every 16th pixel only. So it is
tested on each slide. Some of the tiles taken for glass are read, `to_check`, and so is each one that touches a kept
tile. If one of them holds tissue or looks otherwise than the coarse level shows it, or if many tiles that are read look
otherwise, the coarse level misleads, and every tile is read. What can still be lost is tissue that the coarse level
lacks and that touches no tissue it shows, if none of it is among the tiles to check.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from its2clr.cohort.slides.tissue import Verdict
from its2clr.units import Level0Pixels

_DARKEST_GLASS = 100
_GLASS_SHARE = 0.05
_GLASS_BIN = 3
_NOISE = 3
_DARKNESS_WEIGHT = 2.0
_MOST_DOUBTFUL = 16
_SPREAD, _SPREAD_SHARE = 32, 1 / 32
_UNLIKE_GLASS = 10
_UNLIKE_TISSUE = 48
_MOST_UNLIKE = 0.1
_FIRST_SEEN, _EVERY = 16, 7


@dataclass(frozen=True, eq=False)
class Thumbnail:
    """The whole slide at a coarse level.

    Attributes:
        image: RGB.
        downsample: Level-0 pixels per pixel of it.
    """

    image: Image.Image
    downsample: float

    def colour(self, x: int, y: int, side: Level0Pixels) -> npt.NDArray[np.float64]:
        """Mean red, green and blue of a square at level 0."""
        width, height = self.image.size
        left, top = min(x / self.downsample, width - 1), min(y / self.downsample, height - 1)
        right, bottom = min((x + side) / self.downsample, width), min((y + side) / self.downsample, height)
        return _mean_colour(self.image, (left, top, right, bottom))


class Glass:
    """What a coarse level says of the tiles of a grid, and what reading them says of the coarse level.

    Args:
        thumbnail: The coarse level.
        coords: (N, 2) x, y of the tiles at level 0.
        side: Side of a tile at level 0.
        min_saturation: The threshold of the full test.

    Attributes:
        blank: (N,) whether the tile is taken for bare glass.
        to_check: Tiles among them to be read before that is believed.
    """

    def __init__(
        self, thumbnail: Thumbnail, coords: npt.NDArray[np.int64], side: Level0Pixels, min_saturation: float
    ) -> None:
        self._thumbnail, self._coords, self._side = thumbnail, coords, side
        highest = _highest_saturation(thumbnail, coords, side, min_saturation)
        self.blank: npt.NDArray[np.bool_] = highest < min_saturation
        self.to_check = _choose(np.flatnonzero(self.blank), highest)
        self._kept = np.zeros(len(coords), bool)
        self._caught = False
        self._seen = self._unlike = 0

    def compare(self, number: int, image: Image.Image, verdict: Verdict) -> None:
        """Compare a read tile with what the coarse level shows of it; of tiles not taken for glass, only a sample."""
        self._kept[number] = verdict == "kept"
        if not (self.blank[number] or self._seen < _FIRST_SEEN or number % _EVERY == 0):
            return
        x, y = self._coords[number].tolist()
        shown = self._thumbnail.colour(x, y, self._side)
        difference = float(np.abs(shown - _mean_colour(image, (0, 0, *image.size))).max())
        if self.blank[number]:
            self._caught |= verdict == "kept" or difference > _UNLIKE_GLASS
        else:
            self._seen += 1
            self._unlike += difference > _UNLIKE_TISSUE

    @property
    def misleads(self) -> bool:
        """Whether what was read so far shows that the coarse level cannot be believed."""
        return self._caught or self._unlike > _MOST_UNLIKE * self._seen

    def beside(self, row: int, columns: int) -> npt.NDArray[np.bool_]:
        """(columns,) which tiles of a row are taken for glass but touch a kept one, corners included."""
        kept: npt.NDArray[np.bool_] = np.any(self._kept.reshape(-1, columns)[max(row - 1, 0) : row + 2], axis=0)
        near: npt.NDArray[np.bool_] = kept.copy()
        near[1:] |= kept[:-1]
        near[:-1] |= kept[1:]
        near &= self.blank.reshape(-1, columns)[row]
        return near


def _choose(blank: npt.NDArray[np.int64], highest: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The most doubtful of the blank tiles, and some spread over all of them."""
    if not len(blank):
        return blank
    most_doubtful = blank[np.argsort(-highest[blank], kind="stable")[:_MOST_DOUBTFUL]]
    count = max(_SPREAD, round(_SPREAD_SHARE * len(blank)))
    spread = blank[np.linspace(0, len(blank) - 1, count).astype(np.int64)]
    return np.union1d(most_doubtful, spread)


def _highest_saturation(
    thumbnail: Thumbnail, coords: npt.NDArray[np.int64], side: Level0Pixels, min_saturation: float
) -> npt.NDArray[np.float64]:
    """(N,) the mean saturation that a tile can have at most, judged by the coarse level."""
    saturation = np.asarray(thumbnail.image.convert("HSV").getchannel("S"))
    darkness = 765 - np.asarray(thumbnail.image).sum(axis=2, dtype=np.int32)
    glass_darkness, glass_saturation = _glass_level(darkness, saturation, min_saturation)
    doubt = np.maximum(darkness - np.float32(glass_darkness), 0)
    doubt *= _DARKNESS_WEIGHT
    doubt += np.maximum(saturation - np.float32(glass_saturation), 0)
    return glass_saturation + _tile_means(doubt, coords, side, thumbnail.downsample)


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
    values: npt.NDArray[np.float32], coords: npt.NDArray[np.int64], side: Level0Pixels, downsample: float
) -> npt.NDArray[np.float64]:
    """Per tile, the sum over the pixels it touches and one more around, divided by the pixels of its area.

    That is at least the true mean, wherever the pixels of the thumbnail lie over the tile.
    """
    height, width = values.shape
    sums = np.zeros((height + 1, width + 1))
    sums[1:, 1:] = values
    np.cumsum(sums, axis=0, out=sums)
    np.cumsum(sums, axis=1, out=sums)
    first = np.floor(coords / downsample).astype(np.int64) - 1
    last = np.ceil((coords + side) / downsample).astype(np.int64) + 1
    left, right = np.clip(first[:, 0], 0, width), np.clip(last[:, 0], 0, width)
    top, bottom = np.clip(first[:, 1], 0, height), np.clip(last[:, 1], 0, height)
    totals = sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left]
    return np.asarray(totals / (side / downsample) ** 2, dtype=np.float64)


def _mean_colour(image: Image.Image, box: tuple[float, float, float, float]) -> npt.NDArray[np.float64]:
    """Mean red, green and blue of 16 x 16 pixels spread over a part of an image: all of them would cost time."""
    sample = np.asarray(image.resize((16, 16), Image.Resampling.NEAREST, box=box))  # (16, 16, 3)
    mean: npt.NDArray[np.float64] = sample.reshape(-1, 3).mean(axis=0)
    return mean
