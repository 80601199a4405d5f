"""Random views of a batch of tiles, made on the device with its own draw for every tile."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from its2clr.config import ViewsConfig
from its2clr.seeds import derive_seed, numpy_generator

GRAY_WEIGHTS = (0.2989, 0.587, 0.114)


class Drawn(NamedTuple):
    """What was drawn for every view of a batch of M.

    Attributes:
        numbers: (12, M) float32, by row: top, left, height and width of the crop as shares of the side; whether it is
            mirrored left to right, and top to bottom; whether it is gray; brightness, contrast, saturation and hue;
            whether rows and columns change places.
        order: (M, 4) int32, or (1, 4) for all views together: which colour operation comes first, second, ...
        sigma: (M,) float32 of the blur; 0 where there is none.
        blur_kernel: Taps of the blur; under 3 there is none.
        cropped: Whether there are crops at all.
        turned: Whether there are quarter turns at all.
        coloured: Colour operations that may change anything.
    """

    numbers: Tensor
    order: Tensor
    sigma: Tensor
    blur_kernel: int
    cropped: bool
    turned: bool
    coloured: tuple[int, ...]


class ViewMaker:
    """Makes random views of every tile of a batch: crop, flips, colour jitter, grayscale, blur.

    As in torchvision's ColorJitter the colour operations come in random order: an order of its own for every view in
    the fused kernel, one for the batch otherwise. All else is drawn for every view.

    Args:
        config: Strengths and probabilities.
        device: Device of the tiles.
        keys: What the random draws are derived from, e.g. the run's seed, stage, epoch and process.
        fused: Whether to make the views with the kernel of `its2clr.views_fused`; needs a GPU.
    """

    def __init__(self, config: ViewsConfig, device: torch.device, *keys: int | str, fused: bool = False) -> None:
        self.config = config
        self.fused = fused
        self.generator = torch.Generator(device)
        self.reseed(*keys)

    def reseed(self, *keys: int | str) -> None:
        """Derive the next draws from other keys."""
        self.generator.manual_seed(derive_seed("views", *keys))
        self._host = numpy_generator("view order", *keys)

    def __call__(self, images: Tensor) -> Tensor:
        """Views (B, 3, H, W), float32 in [0, 1], of tiles (B, 3, H, W), uint8 or float in [0, 1]."""
        return self._plain(self.config, images)

    def pair(self, tiles: Tensor, rows: Tensor) -> Tensor:
        """Two views of each of some tiles, (2B, 3, H, W), first views first.

        Args:
            tiles: (N, 3, H, W) uint8.
            rows: (B,) which of them, on the same device.
        """
        return self._several(self.config, tiles, rows, 2)

    def crops(self, tiles: Tensor, rows: Tensor, count: int, scale: tuple[float, float], size: int | None) -> Tensor:
        """More views, of small parts of the tiles: (count * B, 3, size, size), the first one of every tile first.

        Args:
            tiles: (N, 3, H, W) uint8.
            rows: (B,) which of them, on the same device.
            count: Views of each.
            scale: Range of the parts' area, as a share of the tile's.
            size: Side of the views in pixels; None: the tile's.
        """
        views = self._several(self.config.model_copy(update={"crop_scale": scale}), tiles, rows, count)
        return views if size is None else F.interpolate(views, (size, size), mode="bilinear", antialias=True)

    def _several(self, config: ViewsConfig, tiles: Tensor, rows: Tensor, count: int) -> Tensor:
        if not self.fused:
            images = tiles.index_select(0, rows)
            return torch.cat([self._plain(config, images) for _ in range(count)])
        from its2clr.views_fused import fused_views

        repeated = rows.repeat(count)
        drawn = draw(config, len(repeated), tiles.shape[-1], self.generator, tiles.device)
        return fused_views(tiles, repeated, drawn)

    def _plain(self, config: ViewsConfig, images: Tensor) -> Tensor:
        order = torch.from_numpy(self._host.permutation(len(COLOUR_OPERATIONS)).astype("int32"))[None]
        return apply(images, draw(config, len(images), images.shape[-1], self.generator, images.device, order))


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
    if config.crop_scale is None:
        numbers[:2], numbers[2:4] = 0.0, 1.0
    else:
        area = _between(uniform[0], config.crop_scale)
        ratio = torch.exp(_between(uniform[1], (math.log(config.crop_ratio[0]), math.log(config.crop_ratio[1]))))
        height, width = (area / ratio).sqrt().clamp(max=1), (area * ratio).sqrt().clamp(max=1)
        numbers[0], numbers[1] = uniform[2] * (1 - height), uniform[3] * (1 - width)
        numbers[2], numbers[3] = height, width
    numbers[4] = uniform[4] < config.horizontal_flip
    numbers[5] = uniform[5] < config.vertical_flip
    numbers[6] = uniform[6] < config.grayscale_probability
    jittered = uniform[7] < config.jitter_probability
    coloured = []
    for number, (name, (_, neutral)) in enumerate(COLOUR_OPERATIONS.items()):
        strength = getattr(config, name)
        amount = _between(uniform[8 + number], (neutral - strength, neutral + strength))
        numbers[7 + number] = torch.where(jittered, amount, neutral)
        if strength > 0 and config.jitter_probability > 0:
            coloured.append(number)
    if config.quarter_turn > 0:
        numbers[11] = torch.rand(count, generator=generator, device=device) < config.quarter_turn
    kernel = blur_kernel_size(config.blur_kernel, side) if config.blur_probability > 0 else 0
    sigma = torch.where(uniform[12] < config.blur_probability, _between(uniform[13], config.blur_sigma), 0.0)
    if order is None:
        order = uniform[14:18].argsort(0).T.contiguous().to(torch.int32)
    return Drawn(numbers, order, sigma, kernel, config.crop_scale is not None, config.quarter_turn > 0, tuple(coloured))


def apply(images: Tensor, drawn: Drawn) -> Tensor:
    """Views (M, 3, H, W), float32 in [0, 1], of tiles (M, 3, H, W), uint8 or float in [0, 1], as drawn."""
    views = to_float(images)
    top, left, height, width, mirror_x, mirror_y, gray = drawn.numbers[:7]
    if drawn.cropped:
        views = resized_crop(views, top, left, height, width)
    views = _where(mirror_x > 0, views.flip(-1), views)
    views = _where(mirror_y > 0, views.flip(-2), views)
    if drawn.turned:
        views = _where(drawn.numbers[11] > 0, views.transpose(-2, -1), views)
    if len(drawn.order) == 1:
        views = _coloured(views, drawn, drawn.order[0], slice(None))
    else:
        orders, group = torch.unique(drawn.order, dim=0, return_inverse=True)
        views = views.clone()
        for number, order in enumerate(orders):
            chosen = (group == number).nonzero()[:, 0]
            views[chosen] = _coloured(views[chosen], drawn, order, chosen)
    views = _where(gray > 0, grayscale(views).expand_as(views), views)
    if drawn.blur_kernel >= 3:
        blurred = gaussian_blur(views, drawn.sigma.clamp(min=1e-3), drawn.blur_kernel)
        views = _where(drawn.sigma > 0, blurred, views)
    return views


def _coloured(views: Tensor, drawn: Drawn, order: Tensor, chosen: slice | Tensor) -> Tensor:
    operations = list(COLOUR_OPERATIONS.values())
    for number in order.tolist():
        if number in drawn.coloured:
            views = operations[number][0](views, drawn.numbers[7 + number, chosen])
    return views


def to_float(images: Tensor) -> Tensor:
    """Tiles as float32 in [0, 1]."""
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


def resized_crop(images: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """Cut a box, given in shares of the side, out of every tile and resize it bilinearly to the full side."""
    theta = torch.zeros(len(images), 2, 3, device=images.device)
    theta[:, 0, 0], theta[:, 1, 1] = width, height
    theta[:, 0, 2], theta[:, 1, 2] = 2 * left + width - 1, 2 * top + height - 1
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def grayscale(images: Tensor) -> Tensor:
    """Luma of every tile, (B, 1, H, W)."""
    red, green, blue = images.unbind(1)
    return (GRAY_WEIGHTS[0] * red + GRAY_WEIGHTS[1] * green + GRAY_WEIGHTS[2] * blue).unsqueeze(1)


def adjust_brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Scale every tile by its factor."""
    return (images * _per_tile(factor)).clamp(0, 1)


def adjust_contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blend every tile with its mean luma."""
    return _blend(images, grayscale(images).mean(dim=(-3, -2, -1), keepdim=True), factor)


def adjust_saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Blend every tile with its gray version."""
    return _blend(images, grayscale(images), factor)


def adjust_hue(images: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue of every tile by `shift` (1 is a full turn) in HSV, as torchvision does."""
    value, _ = images.max(dim=1)
    chroma = value - images.min(dim=1).values
    saturation = chroma / torch.where(value > 0, value, 1)
    red, green, blue = images.unbind(1)
    safe = torch.where(chroma > 0, chroma, 1)
    hue = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    sector = (hue + 6 * shift[:, None, None])[:, None]  # (B, 1, H, W)
    # HSV -> RGB in closed form: a channel is value * (1 - saturation * ramp(sector + the channel's offset)).
    offset = torch.tensor([5.0, 3.0, 1.0], device=images.device)[:, None, None]
    position = (sector + offset) % 6  # (B, 3, H, W)
    ramp = torch.minimum(position, 4 - position).clamp(0, 1)
    return value[:, None] * (1 - saturation[:, None] * ramp)


def gaussian_blur(images: Tensor, sigma: Tensor, kernel_size: int) -> Tensor:
    """Blur every tile with its own sigma; separable, reflecting borders."""
    count, channels, height, width = images.shape
    position = torch.arange(kernel_size, device=images.device) - kernel_size // 2
    weights = torch.exp(-0.5 * (position / sigma[:, None]) ** 2)
    weights = (weights / weights.sum(1, keepdim=True)).repeat_interleave(channels, 0)  # (B*3, k)
    margin = kernel_size // 2
    stacked = F.pad(images, (margin,) * 4, mode="reflect").reshape(1, count * channels, height + 2 * margin, -1)
    stacked = F.conv2d(stacked, weights[:, None, None, :], groups=count * channels)
    stacked = F.conv2d(stacked, weights[:, None, :, None], groups=count * channels)
    return stacked.reshape(count, channels, height, width)


def blur_kernel_size(share: float, side: int) -> int:
    """Odd kernel size nearest below `share` of the side; under 3 there is nothing to blur."""
    size = int(share * side)
    return size + 1 if size % 2 == 0 and size > 0 else size


def _between(uniform: Tensor, bounds: tuple[float, float]) -> Tensor:
    return uniform * (bounds[1] - bounds[0]) + bounds[0]


def _per_tile(values: Tensor) -> Tensor:
    return values[:, None, None, None]


def _where(chosen: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(_per_tile(chosen), yes, no)


def _blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    factor = _per_tile(factor)
    return (factor * images + (1 - factor) * other).clamp(0, 1)


COLOUR_OPERATIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float]] = {
    "brightness": (adjust_brightness, 1.0),
    "contrast": (adjust_contrast, 1.0),
    "saturation": (adjust_saturation, 1.0),
    "hue": (adjust_hue, 0.0),
}
