"""What a collapsed or stuck training looks like, and what to change then: all stages and the report ask here."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from its2clr.errors import TrainingError

if TYPE_CHECKING:
    from torch import Tensor

LOSS_TOLERANCE = 0.01
"""Share of log(rows - 1) by which a stuck loss may differ from it; classes that come apart lower it by more."""
LEAST_SPREAD = {"pretrain": 0.01, "refine": 0.03}
"""Below this spread a stage is stuck, if its loss is that of a point.

A fresh network is almost a point and takes epochs to spread out, so pretraining is judged by a smaller number.
Refinement starts from a trained network. Seen: 0.016 to 0.024 where it stayed stuck for ten epochs; 0.037 where a
healthy one pulled all negatives together in its warm-up; 0.2 to 0.8 later.
"""
PATIENCE = {"pretrain": 5, "refine": 4}
"""So many epochs in a row must look stuck: a healthy training may pass by."""


def embedding_spread(embeddings: "Tensor") -> float:
    """How far l2-normalised embeddings are spread: 1 - |mean|; 0 if all point the same way, 1 if in all directions."""
    import torch
    import torch.nn.functional as F

    directions = F.normalize(embeddings.float(), dim=1)
    return 1.0 - float(torch.linalg.vector_norm(directions.mean(0)))


def looks_stuck(stage: str, loss: float, spread: float, collapsed_loss: float | None) -> bool:
    """Whether an epoch is collapsed or stuck: hardly any spread, and the loss of a single point.

    Args:
        stage: `pretrain` or `refine`.
        loss: Mean loss of the epoch.
        spread: Spread of its embeddings.
        collapsed_loss: The loss that a single point gives, with or without labels log(rows - 1); None for a loss that
            does not tell.
    """
    at_limit = collapsed_loss is None or abs(loss - collapsed_loss) < LOSS_TOLERANCE * collapsed_loss
    return at_limit and spread < LEAST_SPREAD[stage]


def ended_stuck(stage: str, metrics: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last two epochs of a contrastive stage look stuck, in what a run logged."""
    last = [entry for entry in metrics if entry["stage"] == stage and "collapsed_loss" in entry][-2:]
    stuck = [looks_stuck(stage, entry["loss"], entry["spread"], entry["collapsed_loss"]) for entry in last]
    return len(stuck) == 2 and all(stuck)


def advice(stage: str, *, contrastive: bool = True) -> str:
    """What to change in a new run after a stage was stuck; a sentence without its end."""
    if not contrastive:
        return (
            f"Try a higher {stage}.momentum_encoder, {stage}.warmup_epochs, a lower {stage}.learning_rate, or with "
            f"DINO a lower {stage}.dino.teacher_temperature"
        )
    return (
        f"Try a higher {stage}.temperature (0.2 instead of 0.07), {stage}.momentum=0.9 if it is 0, a lower "
        f"{stage}.learning_rate, or a longer pretraining"
    )


class CountsCollapse(Protocol):
    """Keeps how many epochs in a row looked stuck, so that a resumed run continues to count."""

    epochs_collapsed: int


class CollapseGuard:
    """Sees when a stage is collapsed or stuck; a contrastive loss is then log(rows - 1).

    Args:
        stage: `pretrain` or `refine`; the section of the settings that the advice names.
        rows: Rows that the loss contrasts (two views of a batch). None for a loss that contrasts none; then only the
            spread of the embeddings counts.
        patience: Epochs in a row that must look stuck.
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

    def sees(self, loss: float, spread: float) -> bool:
        """Count one epoch; returns whether `patience` epochs in a row looked stuck."""
        stuck = looks_stuck(self._stage, loss, spread, self._collapsed_loss)
        self._progress.epochs_collapsed = self._progress.epochs_collapsed + 1 if stuck else 0
        return self._progress.epochs_collapsed >= self._patience

    def check(self, epoch: int, loss: float, spread: float) -> None:
        """Count one epoch, and stop if it is one too many.

        Raises:
            TrainingError: `patience` epochs in a row looked stuck.
        """
        if self.sees(loss, spread):
            raise self.error(epoch, loss, spread)

    def error(self, epoch: int, loss: float, spread: float, tried: str = "") -> TrainingError:
        """The error that stops a stuck run; `tried` is a sentence about what was tried before."""
        limit = self._collapsed_loss
        of_a_point = "" if limit is None else f" (one point gives log(rows - 1) = {limit:.4f})"
        return TrainingError(
            f"{self._stage}: the representation collapsed by epoch {epoch}: the loss is {loss:.4f}{of_a_point}; the "
            f"spread of the embeddings is {spread:.4f} (0: one point). {tried}{' ' if tried else ''}Later numbers "
            f"would be noise, so the run stops. {advice(self._stage, contrastive=limit is not None)}. Use a new run "
            "folder."
        )
