"""Cross-validation: every bag scored by a model that has not seen it, and the folds' models as one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["cross_validate"]


def cross_validate(
    cohort: str | Path,
    out: str | Path = "runs/folds",
    *,
    folds: int = 5,
    recipe: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    verbose: bool = True,
) -> dict[str, Any]:
    """Cross-validate on a cohort, as `its2clr fit COHORT --folds 5` does; goes on where it stopped.

    Args:
        cohort: Folder of the cohort; its own splits are not used.
        out: Folder of the folds' runs, the scores out of fold and the model of all folds.
        folds: How many; groups of bags stay in one fold.
        recipe: Recipe of every run; None: the usual one for the cohort.
        overrides: Settings that change it, by dotted key.
        verbose: Whether to print progress.

    Returns:
        The content of `results.json`.

    Raises:
        InputError: The bags cannot be divided so, or the folder holds something else.

    Example:
        >>> cross_validate("cohorts/mine", "runs/folds")["models"]["handed_over"]["bag"]["auc"]  # doctest: +SKIP
    """
    from its2clr.crossval.study import open_study
    from its2clr.crossval.train import cross_validate as train
    from its2clr.plugins import allow_named

    allow_named(overrides or {})
    return train(open_study(out, cohort, folds, recipe, overrides or {}), quiet=not verbose)
