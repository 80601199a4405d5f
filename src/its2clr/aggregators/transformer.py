"""Transformer: instances attend to each other in a few light blocks; attention-based MIL follows."""

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from its2clr.aggregators.attention import AttentionScores, HiddenDim
from its2clr.aggregators.base import Aggregator, BagOutput, Dropout, register
from its2clr.errors import InputError

Count = Annotated[int, Field(ge=1)]
MlpRatio = Annotated[float, Field(gt=0.0, description="width of a block's MLP, divided by the feature dimension")]


class TransformerBlock(nn.Module):
    r"""One block; a layer norm, if any, is inside the residual branches.

    $$H' = \mathrm{MSA}(\mathrm{LN}(H)) + H, \qquad H = \mathrm{MLP}(\mathrm{LN}(H')) + H'$$

    Args:
        feature_dim: number D of features.
        heads: number of attention heads; must divide D.
        mlp_ratio: width of the MLP's hidden layer, divided by D.
        layer_norm: whether LN is a layer norm; False: nothing.
    """

    def __init__(self, feature_dim: int, heads: int, mlp_ratio: float, *, layer_norm: bool = True) -> None:
        super().__init__()
        self.heads = heads
        norm = nn.LayerNorm if layer_norm else nn.Identity
        self.attention_norm = norm(feature_dim)
        self.query = nn.Linear(feature_dim, feature_dim)
        # A bias of the keys cancels in the softmax: its gradient is rounding noise, which Adam would amplify.
        self.key = nn.Linear(feature_dim, feature_dim, bias=False)
        self.value = nn.Linear(feature_dim, feature_dim)
        self.projection = nn.Linear(feature_dim, feature_dim)
        hidden_dim = max(1, round(mlp_ratio * feature_dim))
        self.mlp = nn.Sequential(
            norm(feature_dim),
            nn.Linear(feature_dim, hidden_dim),
            nn.GELU(),
            nn.Linear(hidden_dim, feature_dim),
        )

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        """Process features (B, K, D); instances attend to those whose mask (B, K) is True."""
        features = features + self._attend(self.attention_norm(features), mask)
        processed: Tensor = features + self.mlp(features)
        return processed

    def _attend(self, features: Tensor, mask: Tensor) -> Tensor:
        bags, instances, feature_dim = features.shape
        query, key, value = (
            layer(features).reshape(bags, instances, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )  # each (B, heads, K, D / heads)
        attended = masked_attention(query, key, value, mask)
        projected: Tensor = self.projection(attended.transpose(1, 2).reshape(bags, instances, feature_dim))
        return projected


@register("transformer")
class TransformerMIL(Aggregator):
    r"""L Transformer blocks, then attention-based MIL on the processed instances (appendix "MIL Aggregators").

    $$H'^{(l)} = \mathrm{MSA}(H^{(l-1)}) + H^{(l-1)}, \quad H^{(l)} = \mathrm{MLP}(H'^{(l)}) + H'^{(l)}, \quad
      g_\varphi = \varphi\Big(\sum_k a_k h^{(L)}_k\Big)$$

    with $a_k$ the attention of `AttentionMIL` on $h^{(L)}$. The logit of instance k is that of $\varphi$ on
    $h^{(L)}_k$, which depends on the whole bag. This is not TransMIL (Shao et al. 2021), which the paper only mentions.

    Args:
        feature_dim: number D of features of an instance.
        blocks: number L of blocks.
        heads: number of attention heads; must divide D.
        mlp_ratio: width of the MLPs' hidden layer, divided by D.
        layer_norm: normalise what enters MSA and MLP, as is usual; False: the formula as the paper prints it.
        hidden_dim: width of the attention pooling; None: D.
        gated: use the gated attention of Ilse et al. in the pooling.
        dropout: dropout on the features in training.

    Raises:
        InputError: if `heads` does not divide `feature_dim`.
    """

    def __init__(
        self,
        feature_dim: int,
        *,
        blocks: Count = 2,
        heads: Count = 8,
        mlp_ratio: MlpRatio = 1.0,
        layer_norm: bool = True,
        hidden_dim: HiddenDim = None,
        gated: bool = False,
        dropout: Dropout = 0.0,
    ) -> None:
        super().__init__(feature_dim)
        if feature_dim % heads:
            fitting = [count for count in range(1, min(feature_dim, 16) + 1) if feature_dim % count == 0]
            raise InputError(
                f"option 'heads' of aggregator 'transformer' must divide the feature dimension "
                f"{feature_dim}, got {heads}; use one of {', '.join(map(str, fitting))}"
            )
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            TransformerBlock(feature_dim, heads, mlp_ratio, layer_norm=layer_norm) for _ in range(blocks)
        )
        self.scores = AttentionScores(feature_dim, hidden_dim or feature_dim, gated=gated)
        self.bag_classifier = nn.Linear(feature_dim, 1)

    def aggregate(self, features: Tensor, mask: Tensor) -> BagOutput:
        """See `Aggregator.aggregate`."""
        features = self.dropout(features)
        for block in self.blocks:
            features = block(features, mask)  # (B, K, D)
        attention = self.scores(features, mask).softmax(dim=-1)  # (B, K)
        embedding = (attention.unsqueeze(1) @ features).squeeze(1)  # (B, D)
        return BagOutput(
            bag_logit=self.bag_classifier(embedding).squeeze(-1),
            instance_logits=self.bag_classifier(features).squeeze(-1),
            attention=attention,
        )


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

    PyTorch's own rules fail: on CUDA, torch 2.11 stops in the backward pass because of a misaligned buffer; on the CPU
    it goes seed by seed, with a warning.
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
        attended = _fused(*(tensor.flatten(0, 1) for tensor in batched))  # autograd handles this itself
        return attended.reshape(batched[0].shape), 0
