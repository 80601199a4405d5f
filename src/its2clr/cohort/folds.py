"""A cohort cut into folds: each is a cohort of its own, with the same tile files and other splits."""

import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt

from its2clr.cohort.cohort import Cohort
from its2clr.cohort.identity import CONTENT_FILE
from its2clr.cohort.layout import BAGS_FILE, tile_path, write_bags, write_info
from its2clr.cohort.splits import assign_splits
from its2clr.errors import InputError

VALIDATION_SHARE = 0.2
"""Share of the bags outside a fold that choose epochs and thresholds; the others train."""


def fold_of_bags(cohort: Cohort, folds: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """(bags,) the fold, from 1, in which each bag is tested: groups stay whole, classes are shared out evenly.

    Raises:
        InputError: There are too few groups with bags of either class.
    """
    if folds < 2:
        raise InputError(f"--folds must be at least 2, got {folds}")
    names = [f"fold {number}" for number in range(1, folds + 1)]
    labels, groups = cohort.bags["label"].to_numpy(dtype=np.int64), cohort.bags["group"].tolist()
    assigned = assign_splits(labels, groups, [1 / folds] * folds, seed, names)
    return np.array([names.index(name) + 1 for name in assigned.tolist()], dtype=np.int64)


def fold_cohort(cohort: Cohort, folds: npt.NDArray[np.int64], number: int, out: Path, seed: int = 0) -> Path:
    """Write the cohort of a fold: its bags are test, the others train and val; tile files are links.

    Args:
        cohort: The whole cohort.
        folds: (bags,) what `fold_of_bags` gave.
        number: Which fold.
        out: Its folder; what is right there stays as it is.
        seed: Chooses among the good divisions into train and val.
    """
    bags, tested = cohort.bags, folds == number
    rest = bags[~tested]
    split = np.full(len(bags), "test", dtype=object)
    split[~tested] = assign_splits(
        rest["label"].to_numpy(dtype=np.int64),
        rest["group"].tolist(),
        (1 - VALIDATION_SHARE, VALIDATION_SHARE),
        seed,
        ("train", "val"),
    )
    if not (out / BAGS_FILE).is_file():
        for bag_id in bags["bag_id"].tolist():
            link, target = tile_path(out, bag_id), tile_path(cohort.path, bag_id).resolve()
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(target)
        if (cohort.path / CONTENT_FILE).is_file():  # so that no file has to be read again
            shutil.copy2(cohort.path / CONTENT_FILE, out / CONTENT_FILE)
        write_info(out, cohort.info)
    write_bags(out, bags.assign(split=split))
    return out
