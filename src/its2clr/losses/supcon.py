"""The supervised contrastive loss (equation 2 of the paper)."""

import torch
import torch.nn.functional as F
from lightly.utils import dist
from torch import Tensor


def supervised_contrastive_loss(
    embeddings: Tensor, labels: Tensor, anchors: Tensor | None, temperature: float
) -> Tensor:
    r"""Pull rows with the same label together, push rows with different labels apart.

    For an anchor x, the same-set S_x is the other rows with its label, and the different-set D_x is the rows with other
    labels:

    $$L(x) = \frac{1}{|S_x|} \sum_{s \in S_x} -\log
      \frac{\exp(z_x \cdot z_s / \tau)}{\sum_{k \in S_x \cup D_x} \exp(z_x \cdot z_k / \tau)}.$$

    The loss is the mean over the anchors that have a same-set; a row is never in its own sets. It is computed through
    log-sum-exp in at least float32, so any temperature is safe.

    Args:
        embeddings: (N, D); this function l2-normalises the rows.
        labels: (N,) pseudo labels.
        anchors: (N,) bool mask, or indices of the rows that are anchors; None: all rows.
        temperature: tau > 0.

    Returns:
        Scalar; zero (with zero gradient) if no anchor has a same-set.

    Raises:
        ValueError: Shapes do not fit together or the temperature is not positive.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
        >>> round(supervised_contrastive_loss(embeddings, torch.tensor([0, 0, 1]), None, 1.0).item(), 4)
        0.1269
    """
    if embeddings.ndim != 2 or labels.shape != embeddings.shape[:1]:
        raise ValueError(
            f"expected embeddings (N, D) and labels (N,), got {tuple(embeddings.shape)} and {tuple(labels.shape)}"
        )
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    count = len(embeddings)
    if embeddings.dtype in (torch.float16, torch.bfloat16):
        embeddings = embeddings.float()
    directions = F.normalize(embeddings, dim=1)
    similarity = directions @ directions.T / temperature  # (N, N)
    own = torch.eye(count, dtype=torch.bool, device=embeddings.device)
    log_share = F.log_softmax(similarity.masked_fill(own, float("-inf")), dim=1).masked_fill(own, 0.0)
    same = (labels[:, None] == labels[None, :]) & ~own
    same_count = same.sum(1)
    chosen = _anchor_mask(anchors, count, embeddings.device) & (same_count > 0)
    per_row = -(log_share * same).sum(1) / same_count.clamp(min=1)
    return torch.where(chosen, per_row, 0.0).sum() / chosen.sum().clamp(min=1)


def gathered_supervised_contrastive_loss(
    embeddings: Tensor, labels: Tensor, anchors: Tensor | None, temperature: float
) -> Tensor:
    """The same loss over the rows of all processes.

    Every process computes the loss of the joined batch. Gathering sums the gradients of all processes; averaging them
    over processes (DDP) then gives exactly the gradient of one process with the joined batch.
    """
    if dist.world_size() > 1:
        if anchors is None:
            anchors = torch.ones_like(labels, dtype=torch.bool)
        embeddings = torch.cat(dist.gather(embeddings.contiguous()))
        labels = torch.cat(dist.gather(labels.contiguous()))
        anchors = torch.cat(dist.gather(anchors.to(torch.uint8))).bool()
    return supervised_contrastive_loss(embeddings, labels, anchors, temperature)


def _anchor_mask(anchors: Tensor | None, count: int, device: torch.device) -> Tensor:
    if anchors is None:
        return torch.ones(count, dtype=torch.bool, device=device)
    if anchors.is_floating_point():
        raise ValueError(f"anchors must be a bool mask or row indices, got {anchors.dtype}")
    if anchors.dtype in (torch.bool, torch.uint8):
        if anchors.shape != (count,):
            raise ValueError(f"expected an anchor mask of shape ({count},), got {tuple(anchors.shape)}")
        return anchors.to(device, torch.bool)
    mask = torch.zeros(count, dtype=torch.bool, device=device)
    mask[anchors.to(device).long()] = True
    return mask
