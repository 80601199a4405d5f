"""Where the tiles lie before and after refinement: a sample of features in the plane of two principal components."""

from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.decomposition import PCA

from its2clr.cohort.features.feature_file import feature_path

MOST_INSTANCES = 3000
MOST_BAGS = 200
FEW = 10
"""With fewer instances of a class, the components are those of all instances."""


@dataclass(frozen=True, eq=False)
class Embedding:
    """The same instances as several encoders see them.

    Attributes:
        places: Encoder -> (n, 2) two principal components of its features.
        shares: Encoder -> (2,) share of the variance on each.
        classes: (n,) ground truth, or without any the label of the bag; -1 for unknown.
        of_truth: Whether `classes` is ground truth.
        bags: How many bags the instances are of.
    """

    places: dict[str, NDArray[np.float64]]
    shares: dict[str, NDArray[np.float64]]
    classes: NDArray[np.int64]
    of_truth: bool
    bags: int


def embed(run: Path, encoders: list[str], instances: pd.DataFrame, bag_labels: dict[str, int]) -> Embedding | None:
    """Map a sample of the test instances; None where a feature file is missing.

    Every encoder's features are looked at in their own plane: they are different spaces. The components are those of
    as many instances of one class as of the other: few positives would not show in the variance of all.

    Args:
        run: Folder of the run.
        encoders: Whose features.
        instances: `bag_id`, `instance` and `label` of the test instances.
        bag_labels: Label of every test bag.
    """
    chosen = _sample(instances)
    there = [encoder for encoder in encoders if _all_there(run, encoder, chosen)]
    if not there or len(chosen) < 3:
        return None
    truth = chosen["label"].to_numpy(dtype=np.int64)
    of_truth = bool((instances["label"] >= 0).any())
    classes = truth if of_truth else np.array([bag_labels[bag] for bag in chosen["bag_id"]], dtype=np.int64)
    places, shares = {}, {}
    for encoder in there:
        features = _features(run, encoder, chosen)
        pca = PCA(n_components=2, random_state=0).fit(features[_balanced(classes)])
        places[encoder] = pca.transform(features)
        shares[encoder] = pca.explained_variance_ratio_
    return Embedding(places, shares, classes, of_truth, int(chosen["bag_id"].nunique()))


def _sample(instances: pd.DataFrame) -> pd.DataFrame:
    generator = np.random.default_rng(0)
    bags = instances["bag_id"].unique()
    if len(bags) > MOST_BAGS:
        bags = generator.choice(np.asarray(bags, dtype=object), MOST_BAGS, replace=False)
        instances = instances[instances["bag_id"].isin(list(bags))]
    if len(instances) > MOST_INSTANCES:
        instances = instances.iloc[np.sort(generator.choice(len(instances), MOST_INSTANCES, replace=False))]
    return instances


def _balanced(classes: NDArray[np.int64]) -> NDArray[np.int64]:
    """As many rows of one class as of the other; all rows where there are too few to say anything."""
    positive, negative = np.flatnonzero(classes == 1), np.flatnonzero(classes == 0)
    count = min(positive.size, negative.size)
    if count < FEW:
        return np.arange(classes.size)
    generator = np.random.default_rng(1)
    return np.concatenate([generator.choice(rows, count, replace=False) for rows in (positive, negative)])


def _all_there(run: Path, encoder: str, chosen: pd.DataFrame) -> bool:
    return all(feature_path(run / "features" / encoder, bag).is_file() for bag in chosen["bag_id"].unique())


def _features(run: Path, encoder: str, chosen: pd.DataFrame) -> NDArray[np.float64]:
    parts = []
    for bag, rows in chosen.groupby("bag_id", sort=False)["instance"]:
        with h5py.File(feature_path(run / "features" / encoder, str(bag)), "r") as file:
            parts.append(np.asarray(file["features"][np.sort(rows.to_numpy())], dtype=np.float64))
    return np.concatenate(parts)
