"""Folds of training bags: aggregator i is not trained on fold i, so each bag has a score by one that never saw it."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from its2clr.bag_features import BagFeatures
from its2clr.seeds import numpy_generator


def fold_of_bags(bags: BagFeatures, seeds: Sequence[int]) -> NDArray[np.int64]:
    """(bags,) the fold of every bag, one per seed; a group is in one fold, and both classes are spread evenly."""
    assert bags.labels is not None
    labels = bags.labels.cpu().numpy().astype(np.int64)
    groups = np.arange(len(bags)) if bags.groups is None else np.unique(bags.groups, return_inverse=True)[1]
    order = numpy_generator(seeds[0], "folds").permutation(groups.max() + 1)
    positive = np.bincount(groups, weights=labels) > 0
    # Groups with a positive bag are dealt first, then the others: each fold gets its share of both.
    dealt = np.concatenate([order[positive[order]], order[~positive[order]]])
    fold = np.empty(len(dealt), dtype=np.int64)
    fold[dealt] = np.arange(len(dealt)) % len(seeds)
    return fold[groups]


def training_bags(bags: BagFeatures, seeds: Sequence[int], *, folds: bool) -> Tensor:
    """(seeds, bags) which bags each seed is trained on: all, or with folds all but its own fold.

    A seed whose bags would all be of one class is trained on all bags.
    """
    assert bags.labels is not None
    every = torch.ones(len(seeds), len(bags), dtype=torch.bool)
    if not folds or len(seeds) == 1:
        return every
    kept = torch.from_numpy(fold_of_bags(bags, seeds)) != torch.arange(len(seeds))[:, None]
    labels = bags.labels.cpu().bool()
    both = (kept & labels).any(1) & (kept & ~labels).any(1)
    return torch.where(both[:, None], kept, every)
