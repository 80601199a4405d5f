"""Instance norm with what follows it, in Triton: (x - mean) / deviation, a shortcut added, and ReLU, channels last.

Every channel of every image has its own statistics, over its pixels. A program takes a block of neighbouring channels
of one image, so that it reads whole memory lines. There are two ways:

- held: all pixels of the block fit into registers, so that x is read once;
- streamed: the pixels are split over several programs. One kernel writes their partial sums, a second one adds these up
  and makes the result.

How an image is split depends on its size alone, so its result does not depend on the batch. Sums are in float32, of
values less the image's first pixel: squares of large values would leave no digits for the deviation. There is neither a
wait for the device nor a search for the best block sizes, so a step with these kernels can be recorded.

`its2clr.encoders.norms` has the layer, and the same in plain operations.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

HELD_VALUES, MOST_HELD_VALUES = 8_192, 16_384
"""Values that a program holds: so few that several programs share a processor; more with the fewest channels."""
HELD_CHANNELS = 16, 128
"""Least and most channels of a program that holds its values; 16 are a memory sector of 16-bit numbers."""
STREAMED_TILE = 64, 64
"""Pixels and channels that a streaming program takes at once."""
STREAMED_PIXELS, MOST_SPLITS = 1024, 64
"""Pixels of a streaming program, unless an image had more splits than the most."""
VALUES_PER_THREAD = 32


@triton.jit
def _relu(value, sign):
    """The value where the sign is positive, else zero; as in torch, what is not a number stays so."""
    return tl.where(sign <= 0.0, 0.0, value)


@triton.jit
def _load(pointer, place, inside):
    return tl.load(pointer + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _block(area, channels, splits, CHANNELS: tl.constexpr):
    """Of this program: where its image begins, its columns, their place among statistics, and its split."""
    blocks = tl.cdiv(channels, CHANNELS)
    program = tl.program_id(0)
    image = (program // blocks // splits).to(tl.int64)
    split = program // blocks % splits
    column = program % blocks * CHANNELS + tl.arange(0, CHANNELS)
    return image * area * channels, column, image * channels + column, image * splits + split, split


@triton.jit
def _forward_held(
    x, shortcut, y, means, scales, area, channels, eps,
    SHORTCUT: tl.constexpr, RELU: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    start, column, statistic, _, _ = _block(area, channels, 1, CHANNELS)
    row = tl.arange(0, PIXELS)
    inside = (row < area)[:, None] & (column < channels)[None, :]
    place = row[:, None] * channels + column[None, :]
    value = _load(x + start, place, inside)
    mean = tl.sum(value, 0) / area
    centred = tl.where(inside, value - mean[None, :], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / area + eps)
    tl.store(means + statistic, mean, mask=column < channels)
    tl.store(scales + statistic, scale, mask=column < channels)
    result = centred * scale[None, :]
    if SHORTCUT:
        result += _load(shortcut + start, place, inside)
    if RELU:
        result = _relu(result, result)
    tl.store(y + start + place, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward_held(
    of_y, x, y, means, scales, of_x, of_shortcut, area, channels,
    SHORTCUT: tl.constexpr, RELU: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    start, column, statistic, _, _ = _block(area, channels, 1, CHANNELS)
    row = tl.arange(0, PIXELS)
    inside = (row < area)[:, None] & (column < channels)[None, :]
    place = row[:, None] * channels + column[None, :]
    mean = tl.load(means + statistic, mask=column < channels, other=0.0)
    scale = tl.load(scales + statistic, mask=column < channels, other=0.0)
    normed = (_load(x + start, place, inside) - mean[None, :]) * scale[None, :]
    gradient = _load(of_y + start, place, inside)
    if SHORTCUT:
        gradient = _relu(gradient, _load(y + start, place, inside))
        tl.store(of_shortcut + start + place, gradient.to(of_shortcut.dtype.element_ty), mask=inside)
    elif RELU:
        gradient = _relu(gradient, normed)
    along_ones = tl.sum(gradient, 0) / area
    along_normed = tl.sum(gradient * normed, 0) / area
    result = (gradient - along_ones[None, :] - normed * along_normed[None, :]) * scale[None, :]
    tl.store(of_x + start + place, result.to(of_x.dtype.element_ty), mask=inside)


@triton.jit
def _forward_sums(
    x, partial, area, channels, splits, per_program, PIXELS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    start, column, _, part, split = _block(area, channels, splits, CHANNELS)
    first = _load(x + start, column, column < channels)
    total = tl.zeros([PIXELS, CHANNELS], tl.float32)
    squares = tl.zeros([PIXELS, CHANNELS], tl.float32)
    begin = split * per_program
    for offset in range(begin, tl.minimum(begin + per_program, area), PIXELS):
        row = offset + tl.arange(0, PIXELS)
        inside = (row < area)[:, None] & (column < channels)[None, :]
        value = _load(x + start, row[:, None] * channels + column[None, :], inside)
        value = tl.where(inside, value - first[None, :], 0.0)
        total += value
        squares += value * value
    sums = partial + part * 2 * channels + column
    tl.store(sums, tl.sum(total, 0), mask=column < channels)
    tl.store(sums + channels, tl.sum(squares, 0), mask=column < channels)


@triton.jit
def _totals(partial, part, split, channels, column, splits, SPLITS: tl.constexpr):
    """Both sums over all splits of an image."""
    other = tl.arange(0, SPLITS)
    inside = (other < splits)[:, None] & (column < channels)[None, :]
    place = (part - split + other)[:, None] * 2 * channels + column[None, :]
    return tl.sum(_load(partial, place, inside), 0), tl.sum(_load(partial, place + channels, inside), 0)


@triton.jit
def _forward_apply(
    x, shortcut, y, partial, means, scales, area, channels, splits, per_program, eps,
    SHORTCUT: tl.constexpr, RELU: tl.constexpr, SPLITS: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    start, column, statistic, part, split = _block(area, channels, splits, CHANNELS)
    total, squares = _totals(partial, part, split, channels, column, splits, SPLITS)
    shift = total / area
    mean = _load(x + start, column, column < channels) + shift
    scale = tl.rsqrt(squares / area - shift * shift + eps)
    if split == 0:
        tl.store(means + statistic, mean, mask=column < channels)
        tl.store(scales + statistic, scale, mask=column < channels)
    begin = split * per_program
    for offset in range(begin, tl.minimum(begin + per_program, area), PIXELS):
        row = offset + tl.arange(0, PIXELS)
        inside = (row < area)[:, None] & (column < channels)[None, :]
        place = row[:, None] * channels + column[None, :]
        result = (_load(x + start, place, inside) - mean[None, :]) * scale[None, :]
        if SHORTCUT:
            result += _load(shortcut + start, place, inside)
        if RELU:
            result = _relu(result, result)
        tl.store(y + start + place, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward_sums(
    of_y, x, y, means, scales, of_shortcut, partial, area, channels, splits, per_program,
    SHORTCUT: tl.constexpr, RELU: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    start, column, statistic, part, split = _block(area, channels, splits, CHANNELS)
    mean = tl.load(means + statistic, mask=column < channels, other=0.0)
    scale = tl.load(scales + statistic, mask=column < channels, other=0.0)
    along_ones = tl.zeros([PIXELS, CHANNELS], tl.float32)
    along_normed = tl.zeros([PIXELS, CHANNELS], tl.float32)
    begin = split * per_program
    for offset in range(begin, tl.minimum(begin + per_program, area), PIXELS):
        row = offset + tl.arange(0, PIXELS)
        inside = (row < area)[:, None] & (column < channels)[None, :]
        place = row[:, None] * channels + column[None, :]
        normed = (_load(x + start, place, inside) - mean[None, :]) * scale[None, :]
        gradient = _load(of_y + start, place, inside)
        if SHORTCUT:
            gradient = _relu(gradient, _load(y + start, place, inside))
            tl.store(of_shortcut + start + place, gradient.to(of_shortcut.dtype.element_ty), mask=inside)
        elif RELU:
            gradient = _relu(gradient, normed)
        along_ones += gradient
        along_normed += gradient * normed
    sums = partial + part * 2 * channels + column
    tl.store(sums, tl.sum(along_ones, 0), mask=column < channels)
    tl.store(sums + channels, tl.sum(along_normed, 0), mask=column < channels)


@triton.jit
def _backward_apply(
    gradients, x, partial, means, scales, of_x, area, channels, splits, per_program,
    RELU: tl.constexpr, SPLITS: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """`gradients` are of y or, where there is a shortcut, of the shortcut: those are through ReLU already."""
    start, column, statistic, part, split = _block(area, channels, splits, CHANNELS)
    total, products = _totals(partial, part, split, channels, column, splits, SPLITS)
    along_ones, along_normed = total / area, products / area
    mean = tl.load(means + statistic, mask=column < channels, other=0.0)
    scale = tl.load(scales + statistic, mask=column < channels, other=0.0)
    begin = split * per_program
    for offset in range(begin, tl.minimum(begin + per_program, area), PIXELS):
        row = offset + tl.arange(0, PIXELS)
        inside = (row < area)[:, None] & (column < channels)[None, :]
        place = row[:, None] * channels + column[None, :]
        normed = (_load(x + start, place, inside) - mean[None, :]) * scale[None, :]
        gradient = _load(gradients + start, place, inside)
        if RELU:
            gradient = _relu(gradient, normed)
        result = (gradient - along_ones[None, :] - normed * along_normed[None, :]) * scale[None, :]
        tl.store(of_x + start + place, result.to(of_x.dtype.element_ty), mask=inside)


class Plan:
    """How the kernels take images of a size.

    Attributes:
        sizes: Pixels and channels per block, and warps.
        splits: Programs over the pixels of a block; 1 if it is held.
        per_program: Pixels of each.
        held: Whether a program holds its values.
    """

    def __init__(self, area: int, channels: int) -> None:
        all_channels = triton.next_power_of_2(channels)
        pixels = triton.next_power_of_2(area)
        least, most = HELD_CHANNELS
        self.held = pixels * min(least, all_channels) <= MOST_HELD_VALUES
        if self.held:
            width = min(all_channels, most, max(HELD_VALUES // pixels, least))
            self.splits, self.per_program = 1, area
        else:
            pixels, width = STREAMED_TILE[0], min(all_channels, STREAMED_TILE[1])
            least_pixels = max(STREAMED_PIXELS, triton.cdiv(area, MOST_SPLITS))
            self.per_program = triton.cdiv(least_pixels, pixels) * pixels
            self.splits = triton.cdiv(area, self.per_program)
        self.programs_per_image = triton.cdiv(channels, width) * self.splits
        warps = min(max(triton.next_power_of_2(pixels * width) // (32 * VALUES_PER_THREAD), 1), 16)
        self.sizes: dict[str, Any] = {"PIXELS": pixels, "CHANNELS": width, "num_warps": warps}


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.channels_last)


def forward_pass(x: Tensor, shortcut: Tensor | None, eps: float, relu: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and mean and 1 / deviation (N, C) of every channel of every image."""
    x, y = _channels_last(x), _like(x)
    added = x if shortcut is None else _channels_last(shortcut)
    images, channels, height, width = x.shape
    area = height * width
    means, scales = (torch.empty(images, channels, device=x.device) for _ in range(2))
    plan = Plan(area, channels)
    grid = (images * plan.programs_per_image,)
    steps: dict[str, Any] = {"SHORTCUT": shortcut is not None, "RELU": relu, **plan.sizes}
    if plan.held:
        _forward_held[grid](x, added, y, means, scales, area, channels, eps, **steps)
    else:
        partial = torch.empty(images, plan.splits, 2, channels, device=x.device)
        split = (area, channels, plan.splits, plan.per_program)
        _forward_sums[grid](x, partial, *split, **plan.sizes)
        steps["SPLITS"] = triton.next_power_of_2(plan.splits)
        _forward_apply[grid](x, added, y, partial, means, scales, *split, eps, **steps)
    return y, means, scales


def backward_pass(
    of_y: Tensor, x: Tensor, y: Tensor | None, means: Tensor, scales: Tensor, relu: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x and, if y is given, of the shortcut; otherwise the second is empty."""
    of_y, x = _channels_last(of_y), _channels_last(x)
    of_x = _like(x)
    of_shortcut = x.new_empty(0) if y is None else _like(x)
    result = x if y is None else _channels_last(y)
    images, channels, height, width = x.shape
    area = height * width
    plan = Plan(area, channels)
    grid = (images * plan.programs_per_image,)
    steps: dict[str, Any] = {"SHORTCUT": y is not None, "RELU": relu, **plan.sizes}
    if plan.held:
        _backward_held[grid](of_y, x, result, means, scales, of_x, of_shortcut, area, channels, **steps)
    else:
        partial = torch.empty(images, plan.splits, 2, channels, device=x.device)
        split = (area, channels, plan.splits, plan.per_program)
        _backward_sums[grid](of_y, x, result, means, scales, of_shortcut, partial, *split, **steps)
        gradients, relu_left = (of_y, relu) if y is None else (of_shortcut, False)
        steps = {"RELU": relu_left, "SPLITS": triton.next_power_of_2(plan.splits), **plan.sizes}
        _backward_apply[grid](gradients, x, partial, means, scales, of_x, *split, **steps)
    return of_x, of_shortcut


_forward_op = torch.library.custom_op("its2clr::instance_norm", forward_pass, mutates_args=())
_backward_op = torch.library.custom_op("its2clr::instance_norm_backward", backward_pass, mutates_args=())


@_forward_op.register_fake
def _(x: Tensor, shortcut: Tensor | None, eps: float, relu: bool) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    means, scales = (x.new_empty(x.shape[:2], dtype=torch.float32) for _ in range(2))
    return _like(x), means, scales


@_backward_op.register_fake
def _(
    of_y: Tensor,  # noqa: ARG001
    x: Tensor,
    y: Tensor | None,
    means: Tensor,  # noqa: ARG001
    scales: Tensor,  # noqa: ARG001
    relu: bool,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    return _like(x), x.new_empty(0) if y is None else _like(x)


class _InstanceNorm(torch.autograd.Function):
    """Calls the kernels; as operators of torch only while it compiles, since each call of one takes 20 us longer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shortcut: Tensor | None, eps: float, relu: bool) -> Tensor:
        compute = _forward_op if torch.compiler.is_compiling() else forward_pass
        y, means, scales = compute(x, shortcut, eps, relu)
        ctx.relu, ctx.added = relu, shortcut is not None
        ctx.save_for_backward(x, y if ctx.added else None, means, scales)
        return y

    @staticmethod
    def backward(ctx: Any, of_y: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        compute = _backward_op if torch.compiler.is_compiling() else backward_pass
        x, y, means, scales = ctx.saved_tensors
        of_x, of_shortcut = compute(of_y, x, y, means, scales, ctx.relu)
        return of_x, of_shortcut if ctx.added else None, None, None


def fused_instance_norm(x: Tensor, shortcut: Tensor | None, eps: float, relu: bool) -> Tensor:
    """Instance norm of x (N, C, H, W); a shortcut of the same shape and type is added, and is followed by ReLU."""
    assert relu or shortcut is None
    result: Tensor = _InstanceNorm.apply(x, shortcut, eps, relu)
    return result
