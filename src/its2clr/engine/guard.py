"""Detects collapse of the representation, and stops the training with advice."""

import math
from typing import TYPE_CHECKING, Protocol

from its2clr.errors import TrainingError

if TYPE_CHECKING:
    from torch import Tensor

MIN_SPREAD = 0.01
LOSS_TOLERANCE = 0.02
LEAST_PATIENCE = 3
"""Epochs in a row: a healthy refinement may come near the collapsed loss while it pulls all negatives together."""


def embedding_spread(embeddings: "Tensor") -> float:
    """How far l2-normalised embeddings are spread: 1 - |mean|; 0 if all point the same way, 1 if in all directions."""
    import torch
    import torch.nn.functional as F

    directions = F.normalize(embeddings.float(), dim=1)
    return 1.0 - float(torch.linalg.vector_norm(directions.mean(0)))


def is_collapsed(loss: float, spread: float, collapsed_loss: float | None) -> bool:
    """Whether an epoch's loss and spread are those of a single point.

    Args:
        loss: Mean loss of the epoch.
        spread: Spread of its embeddings.
        collapsed_loss: The loss that a single point gives; None for a loss that does not tell.
    """
    at_limit = collapsed_loss is None or abs(loss - collapsed_loss) < LOSS_TOLERANCE * collapsed_loss
    return at_limit and spread < MIN_SPREAD


class CountsCollapse(Protocol):
    """Keeps how many epochs in a row looked collapsed, so that a resumed run continues to count."""

    epochs_collapsed: int


class CollapseGuard:
    """Stops a run whose embeddings have become one point; a contrastive loss is then log(rows - 1).

    Args:
        stage: Section of the settings that the advice names.
        rows: Rows that the loss contrasts (two views of a batch). None for a loss that contrasts none; then only the
            spread of the embeddings counts.
        patience: Epochs in a row that must look collapsed, because a fresh network starts near the collapsed loss.
        progress: Keeps the count.
    """

    def __init__(self, stage: str, rows: int | None, patience: int, progress: CountsCollapse) -> None:
        self._stage = stage
        self._collapsed_loss = None if rows is None else math.log(rows - 1)
        self._patience = patience
        self._progress = progress

    @property
    def limits(self) -> dict[str, float]:
        """The loss of collapsed embeddings, for the log; nothing if the loss does not show collapse."""
        return {} if self._collapsed_loss is None else {"collapsed_loss": self._collapsed_loss}

    def check(self, epoch: int, loss: float, spread: float) -> None:
        """Check one epoch.

        Raises:
            TrainingError: Collapsed for `patience` epochs in a row.
        """
        limit = self._collapsed_loss
        collapsed = is_collapsed(loss, spread, limit)
        self._progress.epochs_collapsed = self._progress.epochs_collapsed + 1 if collapsed else 0
        if self._progress.epochs_collapsed >= self._patience:
            of_a_point = "" if limit is None else f" (one point gives log(rows - 1) = {limit:.4f})"
            raise TrainingError(
                f"{self._stage}: the representation collapsed by epoch {epoch}: the loss is {loss:.4f}{of_a_point}; "
                f"the spread of the embeddings is {spread:.4f} (0: one point). Later numbers would be noise, so the "
                f"run stops. {self._advice()}. Use a new run folder."
            )

    def _advice(self) -> str:
        if self._collapsed_loss is None:
            return (
                f"Try a higher {self._stage}.momentum_encoder, {self._stage}.warmup_epochs, a lower "
                f"{self._stage}.learning_rate, or with DINO a lower {self._stage}.dino.teacher_temperature"
            )
        return (
            f"Try a higher {self._stage}.temperature (0.2 instead of 0.07), {self._stage}.momentum=0.9 if it is 0, a "
            f"lower {self._stage}.learning_rate, or a longer pretraining"
        )
