"""Which instances of bags to keep, where every instance's label is known: other witness rates, bags of about one size.

Appendix "Experiments on Synthetic Versions of Camelyon16" of the paper. What is kept of a bag depends on the
seed and the bag's identifier only, never on the order of the bags; and with the same seed, keeping fewer
instances keeps some of those that keeping more does, so the versions of a sweep are nested.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from its2clr.cohort.tables import UNKNOWN_LABEL, Problem, contradiction, raise_problems
from its2clr.errors import InputError
from its2clr.seeds import numpy_generator

SUB_BAG_SIZE = 500
"""Instances of a sub-bag in the paper."""

Indices = npt.NDArray[np.int64]
Labels = npt.NDArray[np.int8]


def witness_rate(labels_per_instance: npt.ArrayLike, bag_labels: npt.ArrayLike, offsets: npt.ArrayLike) -> float:
    """The share of positives among the instances of positive bags, all those bags taken together.

    Args:
        labels_per_instance: (N,) 1 or 0; instances of unknown label (-1) do not count.
        bag_labels: (B,) 1 or 0.
        offsets: (B+1,) where the instances of each bag begin.

    Raises:
        InputError: If no instance of a positive bag is labelled, or the arrays do not fit together.
    """
    labels, of_bags, starts = _as_arrays(labels_per_instance, bag_labels, offsets)
    within = labels[np.repeat(of_bags == 1, np.diff(starts))]
    known = within[within != UNKNOWN_LABEL]
    if not len(known):
        raise InputError("there is no witness rate to measure: no positive bag has labelled instances")
    return float((known == 1).mean())


def resample_witness_rate(
    labels_per_instance: npt.ArrayLike,
    bag_labels: npt.ArrayLike,
    offsets: npt.ArrayLike,
    *,
    keep_negatives: float = 1.0,
    keep_positives: float = 1.0,
    negative_bags: bool = False,
    seed: int = 0,
    bag_ids: Sequence[str] | None = None,
) -> Indices:
    """Choose which instances to keep so that the witness rate rises (fewer negatives) or falls (fewer positives).

    The share is kept in each bag; where it is no whole number of instances, it is rounded up or down at random
    so that the mean over bags is right. A positive bag keeps at least one positive, and no bag becomes empty;
    where that binds, the reached rate (`witness_rate` of what is kept) stays above the one aimed at.

    Args:
        labels_per_instance: (N,) 1 or 0; in negative bags -1 (unknown) means 0.
        bag_labels: (B,) 1 or 0.
        offsets: (B+1,) where the instances of each bag begin.
        keep_negatives: Share of the negatives to keep, 0 to 1.
        keep_positives: Share of the positives to keep, 0 to 1.
        negative_bags: Whether negatives are dropped in negative bags too. The paper drops them "in each bag",
            which leaves the size of a bag saying less about its label; by default negative bags stay whole.
        seed: Another seed keeps other instances.
        bag_ids: (B,) what the choice within each bag depends on, besides the seed; their numbers if None.

    Returns:
        Indices of the instances kept, rising.

    Raises:
        InputError: If a share is out of range, the arrays do not fit together, or the labels contradict.
    """
    check_share("keep_negatives", keep_negatives)
    check_share("keep_positives", keep_positives)
    labels, of_bags, starts = _as_arrays(labels_per_instance, bag_labels, offsets)
    names = [str(number) for number in range(len(of_bags))] if bag_ids is None else list(bag_ids)
    if len(names) != len(of_bags):
        raise InputError(f"got {len(names)} bag_ids for {len(of_bags)} bag labels")
    problems: list[Problem] = []
    kept = [np.empty(0, dtype=np.int64)]
    for name, label, start, end in zip(names, of_bags.tolist(), starts[:-1], starts[1:], strict=True):
        bag = labels[start:end]
        problems += contradictions(f"bag {name!r}", label, bag)
        rng = numpy_generator(seed, "witness_rate", name)
        share = keep_negatives if label == 1 or negative_bags else 1.0
        positives = _draw(np.flatnonzero(bag == 1), keep_positives, label, rng)
        negatives = _draw(np.flatnonzero(bag != 1), share, 1 - label, rng)
        kept.append(start + np.sort(np.concatenate([positives, negatives])))
    raise_problems(problems)
    return np.concatenate(kept)


def split_into_sub_bags(
    labels_per_instance: npt.ArrayLike, bag_label: int, *, size: int = SUB_BAG_SIZE, seed: int = 0
) -> list[Indices]:
    """Divide the instances of one bag at random into the fewest sub-bags of at most `size`, equal to within one.

    Positives and negatives are dealt out separately, so each sub-bag of a positive bag is truly positive, with a
    witness rate near that of the bag. A positive bag of fewer positives than that gives only as many sub-bags as
    it has positives, which are then larger than `size`: every instance is in exactly one sub-bag.

    Args:
        labels_per_instance: (N,) 1 or 0; in a negative bag -1 (unknown) means 0.
        bag_label: 1 or 0.
        size: The most instances of a sub-bag; a bag that is not larger stays whole.
        seed: Another seed divides otherwise.

    Returns:
        The indices of each sub-bag, rising.

    Raises:
        InputError: If the size is below 1, the bag empty, or the labels contradict.
    """
    if size < 1:
        raise InputError(f"the size of sub-bags must be at least 1, got {size}")
    labels, of_bag, _ = _as_arrays(labels_per_instance, [bag_label], [0, np.size(labels_per_instance)])
    raise_problems(contradictions("the bag", int(of_bag[0]), labels))
    positives, negatives = np.flatnonzero(labels == 1), np.flatnonzero(labels != 1)
    count = math.ceil(len(labels) / size)
    if bag_label == 1:
        # The paper says "cannot be less than the number of positive instances"; only "more" keeps labels true.
        count = min(count, len(positives))
    rng = np.random.default_rng(seed)
    dealt = np.concatenate([rng.permutation(positives), rng.permutation(negatives)])
    return [np.sort(dealt[number::count]) for number in range(count)]


def _as_arrays(
    labels_per_instance: npt.ArrayLike, bag_labels: npt.ArrayLike, offsets: npt.ArrayLike
) -> tuple[Labels, Indices, Indices]:
    """The arrays with one type each, after checking that they fit together."""
    labels = np.asarray(labels_per_instance)
    of_bags = np.asarray(bag_labels)
    starts = np.asarray(offsets, dtype=np.int64)
    if not np.isin(labels, (UNKNOWN_LABEL, 0, 1)).all():
        raise InputError("instance labels must be 1, 0 or -1 (unknown)")
    if not np.isin(of_bags, (0, 1)).all():
        raise InputError("bag labels must be 1 or 0")
    if labels.ndim != 1 or of_bags.ndim != 1 or starts.shape != (len(of_bags) + 1,):
        shapes = f"instance labels {labels.shape}, bag labels {of_bags.shape}, offsets {starts.shape}"
        raise InputError(f"expected shapes (N,), (B,) and (B+1,), got {shapes}")
    if starts[0] != 0 or starts[-1] != len(labels) or (np.diff(starts) < 1).any():
        raise InputError(f"offsets must rise from 0 to the {len(labels)} instances, and no bag may be empty")
    return labels.astype(np.int8), of_bags.astype(np.int64), starts


def check_share(name: str, share: float) -> None:
    """Check a share that a person gave.

    Raises:
        InputError: If it is not from 0 to 1.
    """
    if not 0 <= share <= 1:
        raise InputError(f"{name} must be a share from 0 to 1, got {share}")


def contradictions(where: str, label: int, labels: Labels) -> list[Problem]:
    """What keeps a bag from being resampled: labels that are missing or do not fit the bag's."""
    unknown = int((labels == UNKNOWN_LABEL).sum())
    if label == 1 and unknown:
        advice = "label them in the table of instances and pack the cohort again, or leave this bag out of it"
        return [Problem(where, f"is positive and {unknown} of its {len(labels)} instances have no label; {advice}")]
    found = contradiction(label, labels)
    return [] if found is None else [Problem(where, f"{found}; correct either")]


def _draw(members: Indices, share: float, least: int, rng: np.random.Generator) -> Indices:
    """A random share of the members, at least `least` of them.

    What the generator gives does not depend on the share, so a smaller share is part of a larger one.
    """
    shuffled = rng.permutation(members)
    count = math.floor(share * len(members) + rng.random())
    return shuffled[: min(max(count, least), len(members))]
