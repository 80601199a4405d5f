"""Divide bags into train, val and test: groups stay whole, classes are shared out evenly."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from its2clr.errors import InputError

SPLITS = ("train", "val", "test")
DEFAULT_FRACTIONS = (0.6, 0.15, 0.25)
FEWEST_BAGS = 2 * len(SPLITS)
"""Fewer bags can be packed and looked at, but not trained with: each split needs a bag of either class."""

_MANY_GROUPS = 200
_RESTARTS = 10
_SMALLEST_GAIN = 1e-9

_Counts = npt.NDArray[np.float64]
_Places = npt.NDArray[np.int64]


def assign_splits(
    labels: Sequence[int] | npt.NDArray[np.integer],
    groups: Sequence[str],
    fractions: Sequence[float] = DEFAULT_FRACTIONS,
    seed: int = 0,
    splits: Sequence[str] = SPLITS,
) -> npt.NDArray[np.str_]:
    """Assign each bag to train, val or test.

    All bags of a group go to the same split; every split gets both classes whenever that is possible; the
    share of each class in each split is as close to the fractions as the groups allow. The answer depends on
    the seed and on which bags there are, not on their order.

    Args:
        labels: Bag labels, 0 or 1, (B,).
        groups: What must not be divided, such as the patient of each bag, (B,).
        fractions: Shares of train, val and test, or of `splits`; positive, summing to 1.
        seed: Chooses among the good divisions.
        splits: The splits that are wanted.

    Returns:
        The split name of each bag, (B,).

    Raises:
        InputError: If the fractions are wrong, or no division gives each split both classes.
    """
    shares = np.asarray(fractions, dtype=np.float64)
    if shares.shape != (len(splits),) or not (shares > 0).all() or abs(shares.sum() - 1) > 1e-6:
        given = ", ".join(f"{share:g}" for share in fractions)
        raise InputError(f"fractions must be three positive numbers that sum to 1, got {given}")
    positive = np.asarray(labels, dtype=np.int64)
    if len(positive) != len(groups):
        raise InputError(f"got {len(positive)} labels for {len(groups)} groups")
    names = {name: number for number, name in enumerate(sorted(set(groups)))}
    group_of_bag = np.array([names[group] for group in groups], dtype=np.int64)
    sizes = np.zeros((len(names), 2))  # bags of class 0 and 1 in each group
    np.add.at(sizes, (group_of_bag, positive), 1)
    _check_possible(sizes, splits)

    targets = shares[:, None] * sizes.sum(axis=0)  # (splits, 2)
    rng = np.random.default_rng(seed)
    best: _Places | None = None
    best_cost = np.inf
    for _ in range(_RESTARTS if len(names) <= _MANY_GROUPS else 1):
        places = _improve(_place(sizes, targets, rng), sizes, targets)
        cost = float((_deviation(places, sizes, targets) ** 2 / targets).sum())
        if best is None or cost < best_cost - _SMALLEST_GAIN:
            best, best_cost = places, cost
    assert best is not None
    return np.array(splits)[best[group_of_bag]]


def _check_possible(sizes: _Counts, splits: Sequence[str]) -> None:
    """A split has both classes by one mixed group or by a pair of pure ones; as many such units are needed."""
    mixed = int(((sizes[:, 0] > 0) & (sizes[:, 1] > 0)).sum())
    negative = int((sizes[:, 1] == 0).sum())
    positive = int((sizes[:, 0] == 0).sum())
    if mixed + min(negative, positive) >= len(splits):
        return
    raise InputError(
        f"{', '.join(splits[:-1])} and {splits[-1]} cannot each get bags of both classes without dividing a group: "
        "each of them needs a group with both labels, or one group of each label, and there are only "
        f"{mixed} groups with both labels, {positive} with only label 1 and {negative} with only label 0. "
        "Add bags of the missing class from other groups, or check that column 'group' does not join unrelated bags"
    )


def _deviation(places: _Places, sizes: _Counts, targets: _Counts) -> _Counts:
    counts = np.zeros_like(targets)
    np.add.at(counts, places, sizes)
    return counts - targets


def _place(sizes: _Counts, targets: _Counts, rng: np.random.Generator) -> _Places:
    """Give each split a random unit with both classes, then place the other groups, the largest first."""
    order = rng.permutation(len(sizes))
    mixed = [[g] for g in order if sizes[g].all()]
    pure = ([g for g in order if sizes[g, 1] == 0], [g for g in order if sizes[g, 0] == 0])
    units = mixed + [list(pair) for pair in zip(*pure, strict=False)]
    places = np.full(len(sizes), -1, dtype=np.int64)
    for split, unit in enumerate(rng.permutation(len(units))[: len(targets)]):
        places[units[unit]] = split
    rest = order[places[order] < 0]
    taken = places >= 0
    deviation = _deviation(places[taken], sizes[taken], targets)
    for group in rest[np.argsort(-sizes[rest].sum(axis=1), kind="stable")]:
        added = ((sizes[group] ** 2 + 2 * deviation * sizes[group]) / targets).sum(axis=1)
        places[group] = int(added.argmin())
        deviation[places[group]] += sizes[group]
    return places


def _improve(places: _Places, sizes: _Counts, targets: _Counts) -> _Places:
    """Move and exchange groups while that brings the splits closer to the targets and keeps both classes."""
    places = places.copy()
    everyone = np.arange(len(places))
    while True:
        deviation = _deviation(places, sizes, targets)
        counts = deviation + targets
        own, own_target = deviation[places], targets[places]
        leaving = ((sizes**2 - 2 * own * sizes) / own_target).sum(axis=1)  # (G,)
        squared = (sizes**2)[:, None] + 2 * deviation[None] * sizes[:, None]
        moving = leaving[:, None] + (squared / targets).sum(axis=2)  # (G, splits)
        moving[everyone, places] = np.inf
        moving[~((counts[places] - sizes) > 0.5).all(axis=1)] = np.inf
        group, split = np.unravel_index(moving.argmin(), moving.shape)
        if moving[group, split] < -_SMALLEST_GAIN:
            places[group] = split
            continue
        pair = _best_exchange(places, sizes, deviation, targets)
        if pair is None:
            return places
        places[list(pair)] = places[list(pair[::-1])]


def _best_exchange(places: _Places, sizes: _Counts, deviation: _Counts, targets: _Counts) -> tuple[int, int] | None:
    """Find the two groups whose exchange helps most; with very many groups moving them is enough."""
    if len(places) > _MANY_GROUPS:
        return None
    gained = sizes[None] - sizes[:, None]  # (G, G, 2): what the split of the first group gains
    own, own_target, counts = deviation[places], targets[places], (deviation + targets)[places]
    cost = ((gained**2 + 2 * own[:, None] * gained) / own_target[:, None]).sum(axis=2)
    keeps_classes = (counts[:, None] + gained > 0.5).all(axis=2)
    allowed = keeps_classes & keeps_classes.T & (places[:, None] != places[None])
    total = np.where(allowed, cost + cost.T, np.inf)
    first, second = np.unravel_index(total.argmin(), total.shape)
    return (int(first), int(second)) if total[first, second] < -_SMALLEST_GAIN else None
