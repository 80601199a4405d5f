"""Random views of tiles in one pass over memory: a Triton kernel that reads the stored bytes and writes finished views.

One kernel gathers the tiles and does crop, flips, colours and grayscale, with one program per view. A program samples
the stored tile at the view's pixels, applies the colour operations in the view's own order, and writes channels last.
Contrast needs the mean luma of the picture just before it, so a program goes over its pixels twice. Blurred views then
get two separable passes; the others are not touched again. Everything is computed in float32.

The random numbers of every view come from `views.drawn`; `views.plain.apply` is the reference.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from its2clr.views.drawn import Drawn

PIXELS = 1024
"""Pixels a program works on at once."""


@triton.jit
def _luma(red, green, blue):
    return 0.2989 * red + 0.587 * green + 0.114 * blue


@triton.jit
def _clamp(value):
    return tl.minimum(tl.maximum(value, 0.0), 1.0)


@triton.jit
def _channel(value, saturation, sector, offset):
    position = sector + offset
    position = position - 6.0 * tl.floor(position / 6.0)
    ramp = _clamp(tl.minimum(position, 4.0 - position))
    return value * (1.0 - saturation * ramp)


@triton.jit
def _colour(red, green, blue, operation, amount, mean):
    """One colour operation: 0 brightness, 1 contrast, 2 saturation, 3 hue."""
    if operation == 0:
        red, green, blue = _clamp(red * amount), _clamp(green * amount), _clamp(blue * amount)
    elif operation == 1:
        other = (1.0 - amount) * mean
        red, green, blue = _clamp(amount * red + other), _clamp(amount * green + other), _clamp(amount * blue + other)
    elif operation == 2:
        other = (1.0 - amount) * _luma(red, green, blue)
        red, green, blue = _clamp(amount * red + other), _clamp(amount * green + other), _clamp(amount * blue + other)
    else:
        value = tl.maximum(red, tl.maximum(green, blue))
        chroma = value - tl.minimum(red, tl.minimum(green, blue))
        saturation = chroma / tl.where(value > 0.0, value, 1.0)
        safe = tl.where(chroma > 0.0, chroma, 1.0)
        of_green = tl.where(green >= blue, 2.0 + (blue - red) / safe, 4.0 + (red - green) / safe)
        of_red = (red >= green) & (red >= blue)
        sector = tl.where(of_red, (green - blue) / safe, of_green) + 6.0 * amount
        red = _channel(value, saturation, sector, 5.0)
        green = _channel(value, saturation, sector, 3.0)
        blue = _channel(value, saturation, sector, 1.0)
    return red, green, blue


@triton.jit
def _sample(tile, pixel, side, top, left, height, width, mirror_x, mirror_y, turned):
    """The stored tile, sampled bilinearly at the pixels of a view; the three channels in [0, 1]."""
    row = tl.where(turned != 0, pixel % side, pixel // side)
    column = tl.where(turned != 0, pixel // side, pixel % side)
    row = tl.where(mirror_y != 0, side - 1 - row, row)
    column = tl.where(mirror_x != 0, side - 1 - column, column)
    last = side - 1.0
    y = tl.minimum(tl.maximum(top * side + height * (row + 0.5) - 0.5, 0.0), last)
    x = tl.minimum(tl.maximum(left * side + width * (column + 0.5) - 0.5, 0.0), last)
    y0, x0 = tl.floor(y), tl.floor(x)
    dy, dx = y - y0, x - x0
    above, before = y0.to(tl.int32), x0.to(tl.int32)
    below, after = tl.minimum(above + 1, side - 1), tl.minimum(before + 1, side - 1)
    a, b, c, d = above * side + before, above * side + after, below * side + before, below * side + after
    wa, wb, wc, wd = (1.0 - dy) * (1.0 - dx), (1.0 - dy) * dx, dy * (1.0 - dx), dy * dx
    area = side * side
    red = wa * tl.load(tile + a) + wb * tl.load(tile + b) + wc * tl.load(tile + c) + wd * tl.load(tile + d)
    tile += area
    green = wa * tl.load(tile + a) + wb * tl.load(tile + b) + wc * tl.load(tile + c) + wd * tl.load(tile + d)
    tile += area
    blue = wa * tl.load(tile + a) + wb * tl.load(tile + b) + wc * tl.load(tile + c) + wd * tl.load(tile + d)
    return red / 255.0, green / 255.0, blue / 255.0


@triton.jit
def _view_kernel(
    tiles,
    rows,
    numbers,
    orders,
    views,
    count,
    side,
    PIXELS: tl.constexpr,
):
    view = tl.program_id(0)
    area = side * side
    tile = tiles + tl.load(rows + view) * 3 * area
    top, left = tl.load(numbers + view), tl.load(numbers + count + view)
    height, width = tl.load(numbers + 2 * count + view), tl.load(numbers + 3 * count + view)
    mirror_x, mirror_y = tl.load(numbers + 4 * count + view), tl.load(numbers + 5 * count + view)
    gray, turned = tl.load(numbers + 6 * count + view), tl.load(numbers + 11 * count + view)

    total = tl.zeros([PIXELS], dtype=tl.float32)
    for start in range(0, area, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        inside = pixel < area
        red, green, blue = _sample(
            tile, tl.minimum(pixel, area - 1), side, top, left, height, width, mirror_x, mirror_y, turned
        )
        before_contrast = view >= 0
        for stage in tl.static_range(4):
            operation = tl.load(orders + view * 4 + stage)
            before_contrast = before_contrast & (operation != 1)
            if before_contrast:
                amount = tl.load(numbers + (7 + operation) * count + view)
                red, green, blue = _colour(red, green, blue, operation, amount, 0.0)
        total += tl.where(inside, _luma(red, green, blue), 0.0)
    mean = tl.sum(total) / area

    for start in range(0, area, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        inside = pixel < area
        red, green, blue = _sample(
            tile, tl.minimum(pixel, area - 1), side, top, left, height, width, mirror_x, mirror_y, turned
        )
        for stage in tl.static_range(4):
            operation = tl.load(orders + view * 4 + stage)
            amount = tl.load(numbers + (7 + operation) * count + view)
            red, green, blue = _colour(red, green, blue, operation, amount, mean)
        if gray != 0:
            luma = _luma(red, green, blue)
            red, green, blue = luma, luma, luma
        place = views + (view.to(tl.int64) * area + pixel) * 3
        tl.store(place, red, mask=inside)
        tl.store(place + 1, green, mask=inside)
        tl.store(place + 2, blue, mask=inside)


@triton.jit
def _blur_kernel(
    source,
    target,
    sigmas,
    side,
    step,
    WIDTH: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """One direction of the blur (step 1: along a row, step `side`: along a column); skips views with sigma 0."""
    view = tl.program_id(0)
    sigma = tl.load(sigmas + view)
    if sigma > 0.0:
        area = side * side
        radius = WIDTH // 2
        norm = 0.0
        for tap in tl.static_range(WIDTH):
            norm += tl.exp(-0.5 * ((tap - radius) / sigma) * ((tap - radius) / sigma))
        base = view.to(tl.int64) * area * 3
        value = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)  # pixels and channels in one
        inside = value < area * 3
        pixel, channel = value // 3, value % 3
        row, column = pixel // side, pixel % side
        along = tl.where(step == 1, column, row)
        total = tl.zeros([PIXELS], dtype=tl.float32)
        for tap in tl.static_range(WIDTH):
            at = along + tap - radius
            at = tl.where(at < 0, -at, at)
            at = tl.where(at >= side, 2 * (side - 1) - at, at)
            other = (pixel + (at - along) * step) * 3 + channel
            weight = tl.exp(-0.5 * ((tap - radius) / sigma) * ((tap - radius) / sigma)) / norm
            total += weight * tl.load(source + base + other, mask=inside, other=0.0)
        tl.store(target + base + value, total, mask=inside)


def fused_views(tiles: Tensor, rows: Tensor, drawn: Drawn) -> Tensor:
    """Views of stored tiles.

    Args:
        tiles: (N, 3, S, S) uint8, contiguous, on the device.
        rows: (M,) int64: the tile of each view.
        drawn: What was drawn for the M views.

    Returns:
        (M, 3, S, S) float32 in [0, 1], channels last.
    """
    side, count = tiles.shape[-1], len(rows)
    views = torch.empty(count, 3, side, side, device=tiles.device).contiguous(memory_format=torch.channels_last)
    _view_kernel[(count,)](tiles, rows, drawn.numbers, drawn.order, views, count, side, PIXELS)
    if drawn.blur_kernel >= 3:
        between = torch.empty_like(views)
        grid = (count, triton.cdiv(3 * side * side, PIXELS))
        _blur_kernel[grid](views, between, drawn.sigma, side, 1, drawn.blur_kernel, PIXELS)
        _blur_kernel[grid](between, views, drawn.sigma, side, side, drawn.blur_kernel, PIXELS)
    return views
