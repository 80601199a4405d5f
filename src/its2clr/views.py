"""Random views of a batch of tiles, made on the device with its own draw for every tile."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from its2clr.config import ViewsConfig
from its2clr.engine.seeds import numpy_generator, torch_generator

GRAY_WEIGHTS = (0.2989, 0.587, 0.114)


class ViewMaker:
    """Makes one random view of every tile of a batch: crop, flips, colour jitter, grayscale, blur.

    As in torchvision's ColorJitter the colour operations come in random order; the order is drawn once per batch
    (on the host, so that no step waits for the device), everything else once per tile.

    Args:
        config: Strengths and probabilities.
        device: Device of the tiles.
        keys: What the random draws are derived from, e.g. the run's seed, stage, epoch and process.
    """

    def __init__(self, config: ViewsConfig, device: torch.device, *keys: int | str) -> None:
        self.config = config
        self._generator = torch_generator(device, "views", *keys)
        self._host = numpy_generator("view order", *keys)

    def __call__(self, images: Tensor) -> Tensor:
        """Views (B, 3, H, W), float32 in [0, 1], of tiles (B, 3, H, W), uint8 or float in [0, 1]."""
        config = self.config
        views = to_float(images)
        count, device = len(views), views.device

        def uniform(low: float = 0.0, high: float = 1.0) -> Tensor:
            return torch.rand(count, generator=self._generator, device=device) * (high - low) + low

        if config.crop_scale is not None:
            views = resized_crop(views, *_crop_boxes(config, uniform))
        views = _where(uniform() < config.horizontal_flip, views.flip(-1), views)
        views = _where(uniform() < config.vertical_flip, views.flip(-2), views)

        jittered = uniform() < config.jitter_probability
        for name in self._host.permutation(list(COLOUR_OPERATIONS)):
            strength = getattr(config, name)
            if strength == 0 or config.jitter_probability == 0:
                continue
            operation, neutral = COLOUR_OPERATIONS[name]
            amount = uniform(neutral - strength, neutral + strength)
            views = operation(views, torch.where(jittered, amount, neutral))

        if config.grayscale_probability > 0:
            views = _where(uniform() < config.grayscale_probability, grayscale(views).expand_as(views), views)

        kernel_size = blur_kernel_size(config.blur_kernel, views.shape[-1])
        if config.blur_probability > 0 and kernel_size >= 3:
            blurred = gaussian_blur(views, uniform(*config.blur_sigma), kernel_size)
            views = _where(uniform() < config.blur_probability, blurred, views)
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


def _crop_boxes(config: ViewsConfig, uniform: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert config.crop_scale is not None
    area = uniform(*config.crop_scale)
    ratio = torch.exp(uniform(math.log(config.crop_ratio[0]), math.log(config.crop_ratio[1])))
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    return uniform() * (1 - height), uniform() * (1 - width), height, width


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
