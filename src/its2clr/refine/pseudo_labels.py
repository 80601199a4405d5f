"""Pseudo labels and the three pools of section 3.2."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Indices = NDArray[np.int64]


class Pools(NamedTuple):
    """Instances to sample from, as ascending indices into the flat order of all instances.

    Attributes:
        negative_bag: X-neg, all instances of negative bags; truly negative.
        pseudo_positive: X+pos(r), the most confident share of the pseudo-positives of positive bags.
        pseudo_negative: X-pos(r), the most confident share of the pseudo-negatives of positive bags.
    """

    negative_bag: Indices
    pseudo_positive: Indices
    pseudo_negative: Indices


def partition(
    probabilities: ArrayLike | Sequence[ArrayLike],
    bag_labels: ArrayLike,
    threshold: float,
    ratio: float,
    bag_ids: ArrayLike | None = None,
    most_negatives: float = 1.0,
    *,
    top_instance: bool = False,
) -> Pools:
    """Split instances into the pools, and keep the most confident share of the two pseudo-labelled ones.

    Args:
        probabilities: (N,) instance probabilities in flat order; or one array per bag, joined in order.
        bag_labels: With flat probabilities (N,), the label of each instance's bag; otherwise one label per bag.
        threshold: eta; an instance of a positive bag with a probability above it is pseudo-positive.
        ratio: r in (0, 1]; share of each pool that is kept, rounded up.
        most_negatives: Largest share of the pseudo-negatives that is kept; 0: none.
        bag_ids: (N,) bag of each flat instance; without it all flat instances of positive bags count as one bag.
        top_instance: See `pseudo_labels`.

    Raises:
        ValueError: Shapes do not fit together, or ratio or threshold is out of range.
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio must be in (0, 1], got {ratio}")
    scores, in_positive_bag, bags = _flat(probabilities, bag_labels, bag_ids)
    positive = pseudo_labels(scores, in_positive_bag, bags, threshold, top_instance=top_instance)
    pseudo_positive = np.flatnonzero(positive)
    pseudo_negative = np.flatnonzero(in_positive_bag & ~positive)
    return Pools(
        negative_bag=np.flatnonzero(~in_positive_bag),
        pseudo_positive=_most_confident(pseudo_positive, -scores, ratio),
        pseudo_negative=_most_confident(pseudo_negative, scores, min(ratio, most_negatives)),
    )


def pseudo_labels(
    probabilities: NDArray[np.floating[Any]],
    in_positive_bag: NDArray[np.bool_],
    bags: NDArray[np.int64],
    threshold: float,
    *,
    top_instance: bool = False,
) -> NDArray[np.bool_]:
    """Line 13 of Algorithm 1: an instance of a positive bag is positive if it passes the threshold.

    With `top_instance`, which is not in the paper, the top instance of a positive bag is positive if none of it passes.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold must be in [0, 1], got {threshold}")
    positive = in_positive_bag & (probabilities > threshold)
    if not top_instance:
        return positive
    without = in_positive_bag & ~np.isin(bags, bags[positive])
    rows = np.flatnonzero(without)
    # Sorted by bag, then from high to low probability: the first row of a bag is its top instance.
    rows = rows[np.lexsort((rows, -probabilities[rows], bags[rows]))]
    _, first = np.unique(bags[rows], return_index=True)
    positive[rows[first]] = True
    return positive


def negative_bag_threshold(probabilities: NDArray[np.floating[Any]], rate: float) -> float:
    """The smallest score that at most a share `rate` of known negatives exceed.

    Args:
        probabilities: (N,) scores of instances of negative bags, preferably bags the aggregator was not trained on.
        rate: Share of them that may pass.
    """
    return float(np.quantile(probabilities, 1 - rate, method="higher"))


def false_discovery_threshold(
    probabilities: NDArray[np.floating[Any]], in_positive_bag: NDArray[np.bool_], rate: float
) -> float | None:
    """The lowest score above which at most a share `rate` of the instances of positive bags is expected to be negative.

    Instances of negative bags show how negatives score. As hardly a positive scores below their median, the instances
    of positive bags that do are about half of the negatives there (Storey's estimate, 2002). Of those negatives the
    same share passes a threshold as in negative bags.

    Args:
        probabilities: (N,) scores of instances of bags that the aggregator was not trained on.
        in_positive_bag: (N,) whether each is of a positive bag.
        rate: Share of those that pass which may be negative.

    Returns:
        The threshold; None if there is none with so few negatives above it.
    """
    known, mixed = np.sort(probabilities[~in_positive_bag]), np.sort(probabilities[in_positive_bag])
    negatives = min(1.0, 2.0 * float(np.mean(mixed <= np.median(known))))
    passing = 1 - np.searchsorted(mixed, mixed, side="right") / len(mixed)
    wrong = negatives * (1 - np.searchsorted(known, mixed, side="right") / len(known))
    fitting = mixed[(passing > 0) & (wrong <= rate * passing)]
    return float(fitting[0]) if len(fitting) else None


def same_share_threshold(
    threshold: float, known: NDArray[np.floating[Any]], probabilities: NDArray[np.floating[Any]]
) -> float:
    """The score that the same share of `probabilities` exceeds as `known` exceeds `threshold`, or a little less.

    A reader scores the bags that it was trained on higher than others, so a threshold set on others lets too many of
    their instances pass.

    Args:
        threshold: Set on `known`.
        known: (M,) scores of instances of positive bags that the reader was not trained on.
        probabilities: (N,) scores of instances of positive bags that it was trained on.
    """
    passing = int(np.mean(known > threshold) * len(probabilities))
    return float(np.sort(probabilities)[::-1][min(passing, len(probabilities) - 1)])


def _flat(
    probabilities: ArrayLike | Sequence[ArrayLike], bag_labels: ArrayLike, bag_ids: ArrayLike | None
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64]]:
    labels = np.asarray(bag_labels)
    if np.isin(labels, (0, 1)).sum() != labels.size:
        raise ValueError("bag_labels must be 0 or 1")
    per_bag = _per_bag(probabilities)
    if per_bag is None:
        scores = np.asarray(probabilities, dtype=np.float64)
        in_positive_bag = labels.astype(bool)
        bags = (
            np.zeros(len(scores), dtype=np.int64)
            if bag_ids is None
            else np.unique(np.asarray(bag_ids), return_inverse=True)[1].astype(np.int64)
        )
    else:
        if bag_ids is not None:
            raise ValueError("give bag_ids with flat probabilities only; one array per bag says which bags there are")
        if len(per_bag) != len(labels):
            raise ValueError(f"{len(per_bag)} bags of probabilities but {len(labels)} bag labels")
        sizes = [len(bag) for bag in per_bag]
        scores = np.concatenate([*per_bag, np.empty(0)])
        in_positive_bag = np.repeat(labels.astype(bool), sizes)
        bags = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
    if not scores.shape == in_positive_bag.shape == bags.shape:
        raise ValueError(
            f"expected one bag label per instance, got {scores.shape} probabilities, {in_positive_bag.shape} labels"
            f" and {bags.shape} bag ids"
        )
    if np.isnan(scores).any():
        raise ValueError("probabilities contain NaN")
    return scores, in_positive_bag, bags


def _per_bag(probabilities: ArrayLike | Sequence[ArrayLike]) -> list[NDArray[np.float64]] | None:
    if isinstance(probabilities, np.ndarray) and probabilities.dtype != object:
        return list(probabilities.astype(np.float64)) if probabilities.ndim == 2 else None
    rows = list(probabilities)  # type: ignore[arg-type]
    if not rows or np.ndim(rows[0]) == 0:
        return None
    return [np.asarray(row, dtype=np.float64) for row in rows]


def _most_confident(rows: Indices, key: NDArray[np.float64], ratio: float) -> Indices:
    keep = math.ceil(ratio * len(rows) - 1e-9)
    order = np.lexsort((rows, key[rows]))
    return np.sort(rows[order[:keep]]).astype(np.int64)
