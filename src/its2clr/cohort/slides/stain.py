"""Stain normalisation of a slide's tiles towards a fixed target, after Macenko or Vahadane, on CPU or GPU.

A slide's stains are estimated once, from pixels of all its tiles, and every tile is moved by the same map, so that
tiles of one slide stay comparable. Optical density is `-log((I + 1) / white)` for both methods.

Macenko's estimate is torchstain's. Vahadane's is ours: torchstain has none, and those of other packages rest on SPAMS
(under the GPL, on the CPU) or on scikit-learn's dictionary learning, which tiatoolbox warns is unstable here. With two
stains it is short, deterministic and runs wherever the tiles are, see `vahadane`.

Tiles are chosen before they are normalised: the tissue test is about the colours of the slide.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from its2clr.cohort.slides.vahadane import sparse_concentrations, sparse_stains
from its2clr.errors import InputError, extra_needed

StainMethod = Literal["macenko", "vahadane"]

_WHITE = {"macenko": 240.0, "vahadane": 255.0}
"""Transmitted light: torchstain's for Macenko, that of the paper for Vahadane."""

_SAMPLED_PIXELS = 200_000
_FEWEST_PIXELS = 500
_TISSUE_DENSITY = 0.15
_PERCENTILE = 0.99
_SMALLEST_MAXIMUM = 0.1
_LARGEST_COSINE = 0.996  # stain vectors within 5 degrees are one stain
_TILES_AT_ONCE = {"cpu": 1, "cuda": 64}  # one tile's floats stay in the cache of a core
_MOST_SAMPLED_TILES = 256


@dataclass(frozen=True)
class Stains:
    """Colours and strengths of haematoxylin and eosin.

    Attributes:
        haematoxylin: Optical density of red, green and blue, of length 1.
        eosin: The same of eosin.
        maxima: 99th percentile of the concentration of each.
    """

    haematoxylin: tuple[float, float, float]
    eosin: tuple[float, float, float]
    maxima: tuple[float, float]

    def matrix(self, like: Tensor) -> Tensor:
        """(3, 2) stain matrix, float32 on the device of a tensor."""
        return torch.tensor([self.haematoxylin, self.eosin], dtype=torch.float32, device=like.device).T.contiguous()


TARGET = Stains((0.5626, 0.7201, 0.4062), (0.2159, 0.8012, 0.5581), (1.9705, 1.0308))
"""The reference of Macenko's published code, which torchstain and others ship as their default."""


class StainNormaliser:
    """Moves the tiles of one slide to the target's stains.

    Example:
        >>> normaliser = StainNormaliser("vahadane")
        >>> normaliser.fit(tiles)  # (N, 3, S, S) uint8, once per slide
        >>> normalised = normaliser.apply(tiles)

    Attributes:
        stains: What `fit` found, None if the slide has no two stains.
        note: Why there are none, "" otherwise.
    """

    def __init__(self, method: StainMethod, target: Stains = TARGET) -> None:
        if method not in get_args(StainMethod):
            raise InputError(f"stain method must be one of {', '.join(get_args(StainMethod))}, got {method!r}")
        self.method: StainMethod = method
        self.target = target
        self.stains: Stains | None = None
        self.note = ""
        self._fitted = False

    def fit(self, tiles: Tensor) -> Stains | None:
        """Estimate the stains of a slide from up to 200,000 of its pixels, always the same ones.

        Args:
            tiles: (N, 3, S, S) uint8 RGB, on any device.

        Returns:
            The stains; None if there is too little tissue or a single colour, `note` then says which.
        """
        _check(tiles)
        densities = _density(_sample(tiles), _WHITE[self.method])  # (3, n)
        # torchstain's own test of tissue for its estimate; for Vahadane, pale eosin without red density counts too
        density = densities.amin(0) if self.method == "macenko" else densities.mean(0)
        densities = densities[:, density >= _TISSUE_DENSITY]
        self.stains, self.note, self._fitted = None, "", True
        if densities.shape[1] < _FEWEST_PIXELS:
            self.note = f"too little tissue to estimate stains ({densities.shape[1]} pixels); left as it is"
            return None
        found = self._estimate(densities)
        self.note = _weakness(found)
        self.stains = None if self.note else found
        return self.stains

    def apply(self, tiles: Tensor) -> Tensor:
        """Normalise tiles of the slide that was fitted; without stains they are given back unchanged.

        Args:
            tiles: (N, 3, S, S) uint8 RGB, on any device.

        Returns:
            The same shape, uint8, on the same device.

        Raises:
            InputError: If no slide was fitted, or the tiles are of another kind.
        """
        _check(tiles)
        if not self._fitted:
            raise InputError("the stains of the slide are not known yet; call fit with its tiles first")
        if self.stains is None or not len(tiles):
            return tiles
        at_once = _TILES_AT_ONCE.get(tiles.device.type, 1)
        return torch.cat([self._move(part, self.stains) for part in torch.split(tiles, at_once)])

    def _move(self, tiles: Tensor, stains: Stains) -> Tensor:
        white = _WHITE[self.method]
        concentrations = self._concentrations(_density(tiles.flatten(2), white), stains.matrix(tiles))  # (N, 2, P)
        factors = [wanted / found for wanted, found in zip(self.target.maxima, stains.maxima, strict=True)]
        target = self.target.matrix(tiles) * torch.tensor(factors, device=tiles.device)
        moved = (target @ concentrations).neg_().exp_().mul_(white).sub_(1)
        return moved.round_().clamp_(0, 255).to(torch.uint8).view(tiles.shape)

    def _concentrations(self, densities: Tensor, matrix: Tensor) -> Tensor:
        """(..., 2, n) concentrations of densities (..., 3, n): least squares, or sparse and not negative."""
        if self.method == "macenko":
            inverse: Tensor = torch.linalg.pinv(matrix)
            return inverse @ densities
        return sparse_concentrations(densities, matrix)

    def _estimate(self, densities: Tensor) -> Stains:
        if self.method == "macenko":
            matrix = _macenko_stains(densities, _WHITE[self.method])
        else:
            matrix = sparse_stains(densities, self.target.matrix(densities))
        concentrations = self._concentrations(densities, matrix)
        rank = max(1, round(_PERCENTILE * densities.shape[1]))
        maxima = concentrations.kthvalue(rank, dim=1).values
        (red, green, blue), eosin = matrix.T.tolist()
        first, second = maxima.tolist()
        return Stains((red, green, blue), (eosin[0], eosin[1], eosin[2]), (first, second))


class SlideStain:
    """Normalises a slide while it is tiled: looks at a sample of its tiles first, then moves tile by tile.

    Args:
        method: "macenko" or "vahadane".

    Attributes:
        note: Why tiles are left as they are, "" if they are normalised; known after the first tile.
    """

    def __init__(self, method: StainMethod) -> None:
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
        if len(self._sample) > _MOST_SAMPLED_TILES:
            self._sample, self._every = self._sample[::2], 2 * self._every

    def normalise(self, image: Image.Image) -> Image.Image:
        """A tile with the target's stains; all tiles must have been looked at before."""
        if self._sample:
            self._normaliser.fit(torch.cat(self._sample))
            self.note = f"stains: {self._normaliser.note}" if self._normaliser.note else ""
            self._sample = []
        moved = self._normaliser.apply(_tensor(image))
        return Image.fromarray(moved[0].permute(1, 2, 0).contiguous().numpy())


def _tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None].contiguous()


def _macenko_stains(densities: Tensor, white: float) -> Tensor:
    """(3, 2) stain matrix by torchstain, from densities (3, n), given to it as an image."""
    with extra_needed("--stain macenko", "stain"):
        from torchstain.torch.normalizers.macenko import TorchMacenkoNormalizer

    normaliser = TorchMacenkoNormalizer()
    image = (white * torch.exp(-densities) - 1).unsqueeze(-1)  # (3, n, 1)
    normaliser.fit(image, Io=white, beta=_TISSUE_DENSITY)
    matrix: Tensor = normaliser.HERef
    return matrix


def _weakness(stains: Stains) -> str:
    """Why the stains cannot be used, "" if they can."""
    cosine = sum(a * b for a, b in zip(stains.haematoxylin, stains.eosin, strict=True))
    if not cosine <= _LARGEST_COSINE:  # also if it is not a number
        return "its pixels are of one colour, not of two stains; left as it is"
    if not min(stains.maxima) >= _SMALLEST_MAXIMUM:
        return "one of its two stains is too faint to be estimated; left as it is"
    return ""


def _sample(tiles: Tensor) -> Tensor:
    """(3, n) pixels, drawn with a fixed seed, the same on every device."""
    pixels = tiles.flatten(2)  # (N, 3, P)
    total = len(tiles) * pixels.shape[2]
    if total <= _SAMPLED_PIXELS:
        return pixels.transpose(0, 1).flatten(1)
    places = torch.randint(total, (_SAMPLED_PIXELS,), generator=torch.Generator().manual_seed(0)).to(tiles.device)
    return pixels[places // pixels.shape[2], :, places % pixels.shape[2]].T


def _density(pixels: Tensor, white: float) -> Tensor:
    return pixels.float().add_(1).div_(white).log_().neg_()


def _check(tiles: Tensor) -> None:
    if tiles.dtype != torch.uint8 or tiles.ndim != 4 or tiles.shape[1] != 3:
        raise InputError(f"tiles must be uint8 (N, 3, S, S), got {tiles.dtype} {tuple(tiles.shape)}")
