"""Which tiles hold tissue: the paper's test on the pixels of a tile, as it is stored.

The mean HSV saturation of the tile must be at least 30 of 255. Which tiles need not be read at all, see `glass`.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image

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
        pixels_of_value = np.array(tile.convert("HSV").getchannel("S").histogram())
        total = tile.width * tile.height
        if pixels_of_value @ _VALUES / total < self.min_saturation:
            return "low_saturation"
        if self.min_tissue and pixels_of_value[self.min_saturation <= _VALUES].sum() / total < self.min_tissue:
            return "low_tissue"
        return "kept"
