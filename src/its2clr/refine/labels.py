"""Where the labels of training instances come from: the reader, the reader corrected by a person, or ground truth."""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from its2clr.refine.pseudo_labels import Indices, Pools

Trusted = NDArray[np.int8]
"""What a person marked each instance as: 1 (positive), 0 (negative), -1 (not marked)."""


class InstanceLabels(NamedTuple):
    """Labels of the training instances, as probabilities and a threshold.

    Attributes:
        probabilities: (N,) probability that each instance is positive.
        threshold: eta; above it an instance is labelled positive.
        epoch: The labels come from the round after this epoch; -1 if from no round.
    """

    probabilities: NDArray[np.float32]
    threshold: float
    epoch: int = -1


class LabelSource(Protocol):
    """Decides which labels the training uses after a round."""

    def labels(self, read: InstanceLabels, current: InstanceLabels | None) -> InstanceLabels:
        """Line 13: the labels from here on.

        Args:
            read: The reader's labels of this round.
            current: The labels so far; None in the first round.
        """

    def pools(self, pools: Pools) -> Pools:
        """Pools of an epoch, corrected by what this source knows for certain."""

    def columns(self) -> dict[str, NDArray[np.int8]]:
        """Additional columns for the table of a round."""


class PseudoLabels:
    """The reader's scores, as in the paper.

    Args:
        iterative: Whether later rounds replace them; if not, the first ones stay.
    """

    def __init__(self, *, iterative: bool) -> None:
        self._iterative = iterative

    def labels(self, read: InstanceLabels, current: InstanceLabels | None) -> InstanceLabels:
        """See `LabelSource`."""
        return read if current is None or self._iterative else current

    def pools(self, pools: Pools) -> Pools:
        """See `LabelSource`."""
        return pools

    def columns(self) -> dict[str, NDArray[np.int8]]:
        """See `LabelSource`."""
        return {}


class CorrectedLabels(PseudoLabels):
    """The reader's scores, except for instances that a person marked.

    Args:
        trusted: (N,) what the person marked.
        iterative: See `PseudoLabels`.
    """

    def __init__(self, trusted: Trusted, *, iterative: bool) -> None:
        super().__init__(iterative=iterative)
        self._trusted = trusted

    def labels(self, read: InstanceLabels, current: InstanceLabels | None) -> InstanceLabels:
        """See `LabelSource`; a marked instance gets probability 1 or 0."""
        known = np.where(self._trusted < 0, read.probabilities, self._trusted).astype(np.float32)
        return super().labels(read._replace(probabilities=known), current)

    def pools(self, pools: Pools) -> Pools:
        """Every marked instance is used, regardless of pacing; a negative one counts like one of a negative bag."""

        def others(rows: Indices) -> Indices:
            return rows[self._trusted[rows] < 0]

        return Pools(
            negative_bag=np.union1d(others(pools.negative_bag), np.flatnonzero(self._trusted == 0)),
            pseudo_positive=np.union1d(others(pools.pseudo_positive), np.flatnonzero(self._trusted == 1)),
            pseudo_negative=others(pools.pseudo_negative),
        )

    def columns(self) -> dict[str, NDArray[np.int8]]:
        """What was marked."""
        return {"trusted": self._trusted}


class GroundTruth(PseudoLabels):
    """True instance labels: an upper bound, not the method.

    Args:
        truth: (N,) 1 or 0.
        threshold: Any number between them.
    """

    def __init__(self, truth: NDArray[np.int8], threshold: float) -> None:
        super().__init__(iterative=False)
        self._truth = InstanceLabels(truth.astype(np.float32), threshold)

    def labels(self, read: InstanceLabels, current: InstanceLabels | None) -> InstanceLabels:  # noqa: ARG002
        """See `LabelSource`; what the reader says is ignored."""
        return current or self._truth
