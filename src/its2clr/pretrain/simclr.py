"""SimCLR: two views of a tile attract, all other tiles of the batch repel (equation 1 of the paper)."""

from lightly.loss import NTXentLoss
from torch import Tensor

from its2clr.training import Objective


def simclr_objective(temperature: float) -> Objective:
    """Lightly's NT-Xent over both views, contrasted with the tiles of all processes."""
    ntxent = NTXentLoss(temperature=temperature, gather_distributed=True)

    def objective(embeddings: Tensor, labels: Tensor | None, anchors: Tensor | None) -> Tensor:  # noqa: ARG001
        loss: Tensor = ntxent(*embeddings.chunk(2))
        return loss

    return objective
