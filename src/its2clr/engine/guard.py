"""Collapse of the representation: seen, said, and training stopped with advice."""

import math
from collections.abc import MutableMapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from its2clr.config import PretrainConfig
from its2clr.errors import TrainingError

MIN_SPREAD = 0.01
LOSS_TOLERANCE = 0.02
PATIENCE = 3
"""A healthy refinement may pass near the collapsed loss: it first pulls all negatives together, then parts."""


def embedding_spread(embeddings: Tensor) -> float:
    """How far l2-normalised embeddings are spread: 1 - |mean|, 0 when all point the same way, 1 when in all."""
    directions = F.normalize(embeddings.float(), dim=1)
    return 1.0 - float(torch.linalg.vector_norm(directions.mean(0)))


class CollapseGuard:
    """Stops a run whose embeddings became one point; a contrastive loss then sits at log(rows - 1).

    Args:
        stage: Section of the config the advice is about.
        rows: Rows the loss contrasts (two views of a batch); None for a loss that contrasts none, where the spread of
            the embeddings alone tells.
        patience: Epochs in a row that must look collapsed; a fresh network starts near the collapsed loss.
        notes: Where the count is kept, so that a run that goes on does not begin to count anew.
    """

    def __init__(
        self, stage: str, rows: int | None, patience: int = PATIENCE, notes: MutableMapping[str, Any] | None = None
    ) -> None:
        self._stage = stage
        self._collapsed_loss = None if rows is None else math.log(rows - 1)
        self._patience = patience
        self._notes = {} if notes is None else notes

    def check(self, epoch: int, loss: float, spread: float) -> None:
        """Look at one epoch.

        Raises:
            TrainingError: Collapsed for `patience` epochs in a row.
        """
        limit = self._collapsed_loss
        at_limit = limit is None or abs(loss - limit) < LOSS_TOLERANCE * limit
        seen = self._notes.get("epochs_collapsed", 0) + 1 if at_limit and spread < MIN_SPREAD else 0
        self._notes["epochs_collapsed"] = seen
        if seen >= self._patience:
            of_a_point = "" if limit is None else f", and log(rows - 1) = {limit:.4f} is what a single point gives"
            raise TrainingError(
                f"{self._stage}: the representation collapsed by epoch {epoch}: the loss is {loss:.4f}{of_a_point}; "
                f"the spread of the embeddings is {spread:.4f} (0 is one point). Later numbers would be noise, so the "
                f"run stops. {self._advice()}, in a new run directory."
            )

    def _advice(self) -> str:
        if self._collapsed_loss is None:
            return (
                f"Try a higher {self._stage}.momentum_encoder, {self._stage}.warmup_epochs, a lower "
                f"{self._stage}.learning_rate, or with DINO a lower {self._stage}.dino.teacher_temperature"
            )
        return (
            f"Try a higher {self._stage}.temperature (0.2 where it is 0.07), {self._stage}.momentum=0.9 where it is 0, "
            f"a lower {self._stage}.learning_rate, or a longer pretraining"
        )


def contrasted_rows(config: PretrainConfig, batch_size: int) -> int | None:
    """Rows that the loss of a pretraining contrasts; None for methods without negatives."""
    return {"simclr": 2 * batch_size, "moco": config.queue_size + 2}.get(config.method)
