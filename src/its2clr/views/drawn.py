"""The random part of views, drawn for a whole batch; the plain operations and the fused kernel both use it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from its2clr.config import ViewsConfig

COLOURS = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}
"""Colour operations, and the amount at which each changes nothing."""
TRIES = 10
"""Sizes that are tried for a crop until one fits into the tile, as in torchvision."""


class Drawn(NamedTuple):
    """What was drawn for every view of a batch of M.

    Attributes:
        numbers: (12, M) float32, by row: top, left, height and width of the crop as shares of the side; whether the
            view is mirrored left to right, and top to bottom; whether it is gray; brightness, contrast, saturation and
            hue; whether rows and columns are exchanged.
        order: (M, 4) int32, or (1, 4) for all views together: which colour operation comes first, second, ...
        sigma: (M,) float32 sigma of the blur; 0 for views without blur.
        blur_kernel: Size of the blur kernel; below 3 there is no blur.
        cropped: Whether there are crops at all.
        turned: Whether there are quarter turns at all.
        coloured: Colour operations that can change anything.
    """

    numbers: Tensor
    order: Tensor
    sigma: Tensor
    blur_kernel: int
    cropped: bool
    turned: bool
    coloured: tuple[int, ...]


def draw(
    config: ViewsConfig,
    count: int,
    side: int,
    generator: torch.Generator,
    device: torch.device,
    order: Tensor | None = None,
) -> Drawn:
    """Draw views.

    Args:
        config: Strengths and probabilities.
        count: How many views.
        side: Side of the tiles in pixels.
        generator: Source of randomness, on the device.
        device: Where the views are made.
        order: (1, 4) order of the colour operations for all views; None draws one for each view.
    """
    uniform = torch.rand(18, count, generator=generator, device=device)
    numbers = torch.zeros(12, count, device=device)
    numbers[2:4] = 1.0
    numbers[4] = uniform[4] < config.horizontal_flip
    numbers[5] = uniform[5] < config.vertical_flip
    numbers[6] = uniform[6] < config.grayscale_probability
    jittered = uniform[7] < config.jitter_probability
    coloured = []
    for number, (name, neutral) in enumerate(COLOURS.items()):
        strength = getattr(config, name)
        amount = _between(uniform[8 + number], (neutral - strength, neutral + strength))
        numbers[7 + number] = torch.where(jittered, amount, neutral)
        if strength > 0 and config.jitter_probability > 0:
            coloured.append(number)
    if config.quarter_turn > 0:
        numbers[11] = torch.rand(count, generator=generator, device=device) < config.quarter_turn
    if config.crop_scale is not None:  # draws more, so it comes last: the draws above are the same without crops
        more = torch.rand(2, TRIES, count, generator=generator, device=device)
        sizes = torch.cat([uniform[:2, None], more], dim=1)
        numbers[:4] = _crops(sizes, uniform[2:4], config.crop_scale, config.crop_ratio, side)
    kernel = blur_kernel_size(config.blur_kernel, side) if config.blur_probability > 0 else 0
    sigma = torch.where(uniform[12] < config.blur_probability, _between(uniform[13], config.blur_sigma), 0.0)
    if order is None:
        order = uniform[14:18].argsort(0).T.contiguous().to(torch.int32)
    return Drawn(numbers, order, sigma, kernel, config.crop_scale is not None, config.quarter_turn > 0, tuple(coloured))


def blur_kernel_size(share: float, side: int) -> int:
    """Size of the blur kernel, `share` of the side rounded down; an even one is made odd by adding 1, as in SimCLR."""
    size = int(share * side)
    return size + 1 if size % 2 == 0 and size > 0 else size


def _crops(sizes: Tensor, places: Tensor, scale: tuple[float, float], ratio: tuple[float, float], side: int) -> Tensor:
    """Top, left, height and width (4, M) of crops in shares of the side, drawn as torchvision's RandomResizedCrop does.

    An area and an aspect ratio are drawn until both sides fit, ten times at most. If none fits, the crop is the largest
    in the middle of the tile with an allowed aspect ratio: mostly the whole tile. Boxes lie on whole pixels.

    Args:
        sizes: (2, TRIES + 1, M) uniform numbers for area and aspect ratio; the last are not used.
        places: (2, M) uniform numbers for top and left.
        scale: Smallest and largest area, as a share of the tile's.
        ratio: Smallest and largest aspect ratio, width by height.
        side: Side of the tile in pixels.
    """
    area = _between(sizes[0], scale)
    aspect = _between(sizes[1], (math.log(ratio[0]), math.log(ratio[1]))).exp()
    tried = (torch.stack([area / aspect, area * aspect]).sqrt() * side).round()  # (2, TRIES + 1, M): heights, widths
    tried[0, TRIES], tried[1, TRIES] = round(side / max(ratio[0], 1)), round(side * min(ratio[1], 1))  # always fit
    fits = ((tried > 0) & (tried <= side)).all(0)
    first = fits.float().argmax(0)
    size = tried.gather(1, first.expand(2, 1, -1))[:, 0]
    room = side - size
    place = torch.where(first < TRIES, (places * (room + 1)).floor(), (room / 2).floor())
    return torch.cat([place, size]) / side


def _between(uniform: Tensor, bounds: tuple[float, float]) -> Tensor:
    return uniform * (bounds[1] - bounds[0]) + bounds[0]
