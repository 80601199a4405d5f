"""Which tiles hold tissue: the paper's test on the pixels of a tile, as it is stored.

The mean HSV saturation of the tile must be at least 30 of 255. Which tiles need not be read at all, see `glass`.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image, ImageChops

from its2clr.errors import InputError

Verdict = Literal["kept", "low_saturation", "low_tissue"]

_VALUES = np.arange(256)


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
        if (verdict := self._surely(tile)) is not None:
            return verdict
        pixels_of_value = np.array(tile.convert("HSV").getchannel("S").histogram())
        total = tile.width * tile.height
        if pixels_of_value @ _VALUES / total < self.min_saturation:
            return "low_saturation"
        if self.min_tissue and pixels_of_value[self.min_saturation <= _VALUES].sum() / total < self.min_tissue:
            return "low_tissue"
        return "kept"

    def _surely(self, tile: Image.Image) -> Verdict | None:
        """What follows from the largest and smallest channel of each pixel alone, at a fourth of the cost; most tiles.

        Saturation, 255 (max - min) / max cut to a whole number, is above max - min - 1; its mean is at most 255 times
        that of max - min, divided by the smallest max.
        """
        red, green, blue = tile.split()
        high = ImageChops.lighter(ImageChops.lighter(red, green), blue)
        low = ImageChops.darker(ImageChops.darker(red, green), blue)
        mean = float(np.asarray(ImageChops.subtract(high, low)).mean())
        if 255 * mean < (self.min_saturation - 1) * int(np.asarray(high).min()):
            return "low_saturation"
        return "kept" if mean >= self.min_saturation + 1 and not self.min_tissue else None
