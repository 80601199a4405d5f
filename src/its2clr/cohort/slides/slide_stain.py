"""Stain normalisation while a slide is tiled: a sample of its tiles first, then tile by tile."""

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from torch import Tensor

    from its2clr.cohort.slides.stain import StainMethod

_MOST_SAMPLED = 256


class SlideStain:
    """The stains of one slide.

    Args:
        method: "macenko" or "vahadane".

    Attributes:
        note: Why tiles are left as they are, "" if they are normalised; known after the first tile.
    """

    def __init__(self, method: "StainMethod") -> None:
        import torch

        from its2clr.cohort.slides.stain import StainNormaliser

        torch.set_num_threads(1)  # the workers take one core each
        self._normaliser = StainNormaliser(method)
        self._sample: list[Tensor] = []
        self._seen, self._every = 0, 1
        self.note = ""

    def add(self, image: Image.Image) -> None:
        """Look at a kept tile; of many, an evenly spread sample is held."""
        if self._seen % self._every == 0:
            self._sample.append(_tensor(image))
        self._seen += 1
        if len(self._sample) > _MOST_SAMPLED:
            self._sample, self._every = self._sample[::2], 2 * self._every

    def normalise(self, image: Image.Image) -> Image.Image:
        """A tile with the target's stains; all tiles must have been looked at before."""
        import torch

        if self._sample:
            self._normaliser.fit(torch.cat(self._sample))
            self.note = f"stains: {self._normaliser.note}" if self._normaliser.note else ""
            self._sample = []
        moved = self._normaliser.apply(_tensor(image))
        return Image.fromarray(moved[0].permute(1, 2, 0).contiguous().numpy())


def _tensor(image: Image.Image) -> "Tensor":
    import torch

    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None].contiguous()
