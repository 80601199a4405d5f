import itertools

import numpy as np
import pytest

from its2clr.cohort import SPLITS, assign_splits
from its2clr.errors import InputError

FRACTIONS = (0.6, 0.15, 0.25)


def random_bags(seed, n_groups=60):
    """Groups of 1 to 6 bags; some pure, some mixed."""
    rng = np.random.default_rng(seed)
    labels, groups = [], []
    for g in range(n_groups):
        kind = rng.choice(["negative", "positive", "mixed"])
        for _ in range(rng.integers(1, 7)):
            groups.append(f"p{g:03d}")
            labels.append({"negative": 0, "positive": 1, "mixed": int(rng.random() < 0.5)}[kind])
    return np.array(labels), groups


@pytest.mark.parametrize("seed", range(25))
def test_properties_over_many_seeds(seed):
    labels, groups = random_bags(seed)
    splits = assign_splits(labels, groups, FRACTIONS, seed)
    of_group = {}
    for group, split in zip(groups, splits, strict=True):
        assert of_group.setdefault(group, split) == split
    for name, fraction in zip(SPLITS, FRACTIONS, strict=True):
        inside = splits == name
        assert set(labels[inside]) == {0, 1}
        assert abs(inside.mean() - fraction) < 0.02
        assert abs(labels[inside].mean() - labels.mean()) < 0.05


def test_does_not_depend_on_row_order():
    labels, groups = random_bags(3)
    splits = assign_splits(labels, groups, seed=5)
    order = np.random.default_rng(0).permutation(len(labels))
    shuffled = assign_splits(labels[order], [groups[i] for i in order], seed=5)
    assert shuffled.tolist() == splits[order].tolist()


def test_same_seed_same_splits_other_seed_other_splits():
    labels, groups = random_bags(3)
    assert assign_splits(labels, groups, seed=1).tolist() == assign_splits(labels, groups, seed=1).tolist()
    assert assign_splits(labels, groups, seed=1).tolist() != assign_splits(labels, groups, seed=2).tolist()


def test_bags_that_stand_alone_are_divided_exactly():
    labels = [0] * 100 + [1] * 20
    splits = assign_splits(labels, [f"b{i}" for i in range(120)])
    counts = {name: (int((splits[:100] == name).sum()), int((splits[100:] == name).sum())) for name in SPLITS}
    assert counts == {"train": (60, 12), "val": (15, 3), "test": (25, 5)}


def test_many_bags_are_fast_and_even():
    labels = np.arange(5000) % 5 == 0
    splits = assign_splits(labels.astype(int), [f"b{i}" for i in range(5000)])
    assert [int((splits == name).sum()) for name in SPLITS] == [3000, 750, 1250]


def test_every_small_case_gets_both_classes_whenever_that_is_possible():
    kinds = {"n": [0], "p": [1], "m": [0, 1], "P": [1, 1, 1, 1]}
    for size in (3, 4, 5, 6):
        for case in itertools.combinations_with_replacement(kinds, size):
            labels, groups = [], []
            for number, kind in enumerate(case):
                labels += kinds[kind]
                groups += [f"g{number}"] * len(kinds[kind])
            possible = any(
                all(
                    {label for k, s in zip(case, places, strict=True) if s == split for label in kinds[k]} == {0, 1}
                    for split in range(3)
                )
                for places in itertools.product(range(3), repeat=size)
            )
            if not possible:
                with pytest.raises(InputError, match="cannot each get bags of both classes"):
                    assign_splits(labels, groups)
                continue
            splits = assign_splits(labels, groups)
            for name in SPLITS:
                inside = {label for label, s in zip(labels, splits, strict=True) if s == name}
                assert inside == {0, 1}, (case, splits)


def test_impossible_division_counts_the_groups():
    with pytest.raises(
        InputError, match=r"only 0 groups with both labels, 2 with only label 1 and 10 with only label 0"
    ):
        assign_splits([1, 1] + [0] * 10, [f"g{i}" for i in range(12)])


@pytest.mark.parametrize("fractions", [(0.5, 0.5), (0.6, 0.2, 0.1), (1.0, 0.0, 0.0), (1.2, -0.1, -0.1)])
def test_wrong_fractions_are_refused(fractions):
    with pytest.raises(InputError, match="fractions must be three positive numbers"):
        assign_splits([0, 1] * 10, [f"g{i}" for i in range(20)], fractions)
