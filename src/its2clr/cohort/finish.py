"""Divide the bags of a manifest into splits: planned before packing, settled when it is known what is left."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from its2clr.cohort.layout import PROBLEMS_FILE
from its2clr.cohort.manifest import Manifest
from its2clr.cohort.splits import assign_splits
from its2clr.cohort.table_checks import check_classes
from its2clr.cohort.tables import Problem, raise_problems
from its2clr.errors import InputError


class NoBagLeftError(InputError):
    """Not one bag to be predicted could be packed; `problems.csv` of the cohort says why."""


def plan_splits(manifest: Manifest, fractions: Sequence[float], seed: int) -> dict[str, Any]:
    """Say where the splits come from, as settings of the cohort.

    Raises:
        InputError: If the bags cannot be divided so; said before hours of packing, not after.
    """
    if not manifest.labelled:
        return {"splits": "all test"}
    if manifest.has_splits:
        return {"splits": "manifest"}
    assign_splits(manifest.bags["label"].tolist(), manifest.bags["group"].tolist(), fractions, seed)
    return {"splits": "assigned", "seed": seed, "fractions": list(fractions)}


def settle_splits(
    kept: pd.DataFrame, manifest: Manifest, out: Path, fractions: Sequence[float], seed: int
) -> pd.DataFrame:
    """Give the bags that were packed their splits.

    Args:
        kept: The rows of `manifest.bags` that were packed.
        manifest: What was asked for.
        out: The cohort folder, for messages.
        fractions: Shares of train, val and test, if the manifest has no splits.
        seed: Chooses the splits, if the manifest has none.

    Raises:
        NoBagLeftError: If no bag is left of those to be predicted.
        InputError: If no bag is left, or a split lacks a class because bags were left out.
    """
    if not manifest.has_splits:
        try:
            splits = assign_splits(kept["label"].tolist(), kept["group"].tolist(), fractions, seed)
        except InputError as error:
            raise InputError(f"{out}: after {_losses(manifest, kept, out)}, {error}") from error
        return kept.assign(split=splits.tolist())
    problems: list[Problem] = []
    where = f"{out}, after {_losses(manifest, kept, out)}"
    if not manifest.labelled:
        if kept.empty:
            raise NoBagLeftError(str(Problem(where, "no bag is left")))
        return kept
    check_classes(kept["label"].tolist(), kept["split"].tolist(), where, problems)
    raise_problems(problems)
    return kept


def _losses(manifest: Manifest, kept: pd.DataFrame, out: Path) -> str:
    lost = len(manifest.bags) - len(kept)
    return f"leaving out {lost} bags without usable images (see {out / PROBLEMS_FILE})"
