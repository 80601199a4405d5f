"""Pseudo labels of the refinement rounds, read when first asked for and kept in few bytes."""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from its2clr.errors import InputError
from its2clr.run.scores import rows_of_bags
from its2clr.viewer.shown import Shown

_HELD_INSTANCES = 100_000_000
"""Instances of all rounds in memory, at six bytes each."""


class RoundScores(NamedTuple):
    """What one round says about one training bag.

    Attributes:
        probability: (N,) of each instance to be positive.
        pseudo_label: (N,) 1 or 0.
        selected: (N,) 1 or -1 for those the next epoch uses as positive or as negative of a positive bag, else 0.
    """

    probability: NDArray[np.float32]
    pseudo_label: NDArray[np.int8]
    selected: NDArray[np.int8]


@dataclass(frozen=True, eq=False)
class _Round:
    bags: dict[str, slice]
    all: RoundScores

    def __len__(self) -> int:
        return len(self.all.probability)


class Rounds:
    """The rounds of a run; those not used for longest are dropped when they take too much memory.

    Args:
        shown: What is shown.
    """

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self.epochs = list(shown.rounds)
        self._held: OrderedDict[int, _Round] = OrderedDict()
        self._lock = threading.Lock()

    def bag(self, bag_id: str, epoch: int) -> RoundScores | None:
        """What the round after an epoch says about a bag; None if the bag took no part."""
        found = self._round(epoch)
        rows = found.bags.get(bag_id)
        if rows is None:
            return None
        return RoundScores(found.all.probability[rows], found.all.pseudo_label[rows], found.all.selected[rows])

    def _round(self, epoch: int) -> _Round:
        with self._lock:
            if epoch not in self._held:
                self._held[epoch] = _compact(self._shown.round(epoch))
                while len(self._held) > 1 and sum(map(len, self._held.values())) > _HELD_INSTANCES:
                    self._held.popitem(last=False)
            self._held.move_to_end(epoch)
            return self._held[epoch]


def _compact(table: pd.DataFrame) -> _Round:
    """The table as where each bag begins, and three plain arrays."""
    bags = rows_of_bags(table["bag_id"])
    expected = np.concatenate([np.arange(rows.stop - rows.start) for rows in bags.values()])
    if not np.array_equal(table["instance"].to_numpy(), expected):
        raise InputError("pseudo_labels.parquet: instances are out of order; run `its2clr refine` again")
    return _Round(
        bags,
        RoundScores(
            table["probability"].to_numpy(dtype=np.float32),
            table["pseudo_label"].to_numpy(dtype=np.int8),
            table["selected"].to_numpy(dtype=np.int8),
        ),
    )
