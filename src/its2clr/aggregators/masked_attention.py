"""Self-attention among the real instances of a bag, with fused kernels under `torch.func.vmap` too."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    r"""Attention $\mathrm{softmax}(q k^\top / \sqrt{d})\, v$ to the keys whose mask is True.

    Args:
        query: (B, heads, K, d).
        key: (B, heads, K, d).
        value: (B, heads, K, d).
        mask: (B, K), True for real instances.

    Returns:
        (B, heads, K, d); rows of padding are finite.
    """
    attended: Tensor = _MaskedAttention.apply(query, key, value, mask)
    return attended


def _fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :])


class _MaskedAttention(torch.autograd.Function):
    """PyTorch's fused attention with a rule for vmap that joins seeds and bags into one batch.

    Its own rules fail: torch 2.11 on CUDA with a misaligned buffer in the backward pass, and on the CPU it
    goes seed by seed with a warning.
    """

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return _fused(query, key, value, mask)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, mask = ctx.saved_tensors
        scale = query.shape[-1] ** -0.5
        scores = (query @ key.transpose(-2, -1)) * scale
        weights = scores.masked_fill(~mask[:, None, None, :], -torch.inf).softmax(dim=-1)
        weights_gradient = gradient @ value.transpose(-2, -1)
        mean = (weights_gradient * weights).sum(dim=-1, keepdim=True)
        scores_gradient = weights * (weights_gradient - mean) * scale
        return (
            scores_gradient @ key,
            scores_gradient.transpose(-2, -1) @ query,
            weights.transpose(-2, -1) @ gradient,
            None,
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[Tensor, int]:
        batched = [
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(inputs, in_dims, strict=True)
        ]
        attended = _fused(*(tensor.flatten(0, 1) for tensor in batched))  # autograd follows this one by itself
        return attended.reshape(batched[0].shape), 0
