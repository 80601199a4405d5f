"""Views made with ordinary torch operations, on any device."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from its2clr.views.drawn import COLOURS, Drawn

GRAY_WEIGHTS = (0.2989, 0.587, 0.114)


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
    operations = [OPERATIONS[name] for name in COLOURS]
    for number in order.tolist():
        if number in drawn.coloured:
            views = operations[number](views, drawn.numbers[7 + number, chosen])
    return views


def to_float(images: Tensor) -> Tensor:
    """Tiles as float32 in [0, 1]."""
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


def resized_crop(images: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """Cut a box out of every tile, given in shares of the side, and resize it bilinearly to the full side."""
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


def _per_tile(values: Tensor) -> Tensor:
    return values[:, None, None, None]


def _where(chosen: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(_per_tile(chosen), yes, no)


def _blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    factor = _per_tile(factor)
    return (factor * images + (1 - factor) * other).clamp(0, 1)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": adjust_brightness,
    "contrast": adjust_contrast,
    "saturation": adjust_saturation,
    "hue": adjust_hue,
}
