"""The list of bags: searched, sorted and paged on the server, so that ten thousand bags stay quick."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from its2clr.run.scores import Model
from its2clr.viewer.shown import UNKNOWN, Shown

SortName = Literal["bag", "score", "label", "split", "error", "disagreement"]
SORTS: tuple[str, ...] = get_args(SortName)
PAGE_SIZE = 100


@dataclass(frozen=True)
class Question:
    """Which bags are wanted, in which order.

    Attributes:
        model: Whose scores.
        split: Only this split; None: all.
        query: Text that bag or group must contain, in any case.
        errors: Only bags on the wrong side of the threshold.
        sort: What to sort by.
        descending: Largest first.
        page: Number of the page, from 0.
    """

    model: Model
    split: str | None = None
    query: str = ""
    errors: bool = False
    sort: SortName = "bag"
    descending: bool = False
    page: int = 0


class BagTable:
    """Every bag with the probabilities of all models, in the order of their numbers.

    Args:
        shown: What is shown.
    """

    def __init__(self, shown: Shown) -> None:
        self.bags = list(shown.bags)
        self.bag_id = [bag.bag_id for bag in self.bags]
        self.split = [bag.split for bag in self.bags]
        self.label: NDArray[np.int64] = np.array([bag.label for bag in self.bags], dtype=np.int64)
        self.n_instances = [bag.n_instances for bag in self.bags]
        self.number = {bag_id: number for number, bag_id in enumerate(self.bag_id)}
        self.models = [one.model for one in shown.models]
        self.probability = shown.probability()
        self.thresholds = [one.thresholds for one in shown.models]
        self.wrong = self._wrong()
        self.disagreement = self._disagreement()
        self._text = [f"{bag.bag_id}\n{bag.group}".casefold() for bag in self.bags]

    def __len__(self) -> int:
        """The number of bags."""
        return len(self.bag_id)

    def row(self, number: int, model: Model) -> dict[str, Any]:
        """One bag as the list shows it."""
        own = self.models.index(model)
        probability = self.probability[own, number]
        return {
            "n": number,
            "bag_id": self.bag_id[number],
            "group": self.bags[number].group,
            "split": self.split[number],
            "label": None if self.label[number] == UNKNOWN else int(self.label[number]),
            "n_instances": self.n_instances[number],
            "probability": None if np.isnan(probability) else float(probability),
            "error": bool(self.wrong[own, number]),
            "disagreement": float(self.disagreement[number]),
        }

    def page(self, question: Question) -> dict[str, Any]:
        """One page of the bags asked for, and how many there are in all."""
        own = self.models.index(question.model)
        wanted = np.ones(len(self), dtype=bool)
        if question.split is not None:
            wanted &= np.array([split == question.split for split in self.split], dtype=bool)
        if text := question.query.strip().casefold():
            wanted &= np.array([text in searched for searched in self._text], dtype=bool)
        if question.errors:
            wanted &= self.wrong[own]
        numbers = np.flatnonzero(wanted)
        keys = self._keys(question.sort, own)[numbers]
        order = np.argsort(-keys if question.descending else keys, kind="stable")
        start = question.page * PAGE_SIZE
        return {
            "total": len(numbers),
            "page": question.page,
            "page_size": PAGE_SIZE,
            "rows": [self.row(int(n), question.model) for n in numbers[order][start : start + PAGE_SIZE]],
        }

    def _keys(self, sort: SortName, own: int) -> NDArray[np.float64]:
        """(bags,) sort keys; bags without a score come first."""
        if sort in {"score", "error"}:
            found: NDArray[np.float64] = np.abs(self.probability[own] - (self.label if sort == "error" else 0))
            found[np.isnan(found) | ((self.label == UNKNOWN) & (sort == "error"))] = -1.0
            return found
        if sort == "label":
            return self.label.astype(np.float64)
        if sort == "disagreement":
            return self.disagreement
        values = self.split if sort == "split" else self.bag_id
        place = {value: rank for rank, value in enumerate(sorted(set(values)))}
        return np.array([place[value] for value in values], dtype=np.float64)

    def _wrong(self) -> NDArray[np.bool_]:
        """(models, bags) whether a bag is on the wrong side of the threshold for its label."""
        called: NDArray[np.bool_] = self.probability >= np.array([found.bag for found in self.thresholds])[:, None]
        known = ~np.isnan(self.probability) & (self.label != UNKNOWN)
        wrong: NDArray[np.bool_] = (called != (self.label == 1)) & known
        return wrong

    def _disagreement(self) -> NDArray[np.float64]:
        """(bags,) largest difference between the probabilities of two models."""
        unknown = np.isnan(self.probability)
        largest = np.where(unknown, -np.inf, self.probability).max(axis=0)
        smallest = np.where(unknown, np.inf, self.probability).min(axis=0)
        difference: NDArray[np.float64] = np.maximum(largest - smallest, 0.0)
        return difference
