"""A cross-validation on disk: the run of every fold, and what they say together.

```
crossval.json        cohort, number of folds, seed and settings; another command is refused
folds.csv            bag_id,label,group,fold: in which fold each bag is tested
cohorts/fold-1/      the cohort of a fold; its tile files are links
fold-1/              the run of a fold
out_of_fold/         every bag and instance scored by the fold that has not seen it, as `its2clr predict` writes it
results.json         metrics of these scores, and of each fold
report.html          the same as a page
model.its2clr        the models of all folds as one; it predicts their mean
```
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from its2clr.cohort import Cohort
from its2clr.cohort.folds import fold_cohort, fold_of_bags
from its2clr.errors import InputError
from its2clr.files import atomic_path, read_json, write_json
from its2clr.run.opening import usual_recipe
from its2clr.run.saved import read_run_config
from its2clr.settings import parse_override, resolve_config

STUDY_FILE, FOLDS_FILE, COHORTS = "crossval.json", "folds.csv", "cohorts"
FORMAT = 1


@dataclass(frozen=True, eq=False)
class CrossValidation:
    """A cohort, its folds, and how they are trained.

    Attributes:
        path: Folder of everything.
        cohort_path: The whole cohort.
        folds: How many.
        seed: Decides which bags are in which fold.
        recipe: Recipe of every run.
        settings: What changes the recipe, by dotted key.
    """

    path: Path
    cohort_path: Path
    folds: int
    seed: int
    recipe: str
    settings: Mapping[str, Any]

    @cached_property
    def cohort(self) -> Cohort:
        """The whole cohort."""
        return Cohort.open(self.cohort_path)

    @cached_property
    def fold_of_bag(self) -> NDArray[np.int64]:
        """(bags,) in which fold, from 1, each bag is tested."""
        return fold_of_bags(self.cohort, self.folds, self.seed)

    @property
    def numbers(self) -> range:
        """The folds, from 1."""
        return range(1, self.folds + 1)

    def run(self, fold: int) -> Path:
        """Folder of a fold's run."""
        return self.path / f"fold-{fold}"

    def cohort_of(self, fold: int) -> Path:
        """Folder of a fold's cohort."""
        return self.path / COHORTS / f"fold-{fold}"

    def prepare(self) -> None:
        """Write what is needed to train the folds; what is there and right stays."""
        table = self.cohort.bags[["bag_id", "label", "group"]].assign(fold=self.fold_of_bag)
        with atomic_path(self.path / FOLDS_FILE) as temporary:
            table.to_csv(temporary, index=False, lineterminator="\n")
        self.cohort.identity()  # so that no fold hashes the tiles again
        for fold in self.numbers:
            fold_cohort(self.cohort, self.fold_of_bag, fold, self.cohort_of(fold), self.seed)


def open_study(
    out: str | Path,
    cohort: str | Path | None = None,
    folds: int | None = None,
    recipe: str | Path | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
) -> CrossValidation:
    """Begin a cross-validation, or open the one that is there.

    Args:
        out: Its folder.
        cohort: The whole cohort; None for one that has begun.
        folds: How many folds; None for one that has begun.
        recipe: Recipe name or file of every run; None: the usual one for the cohort.
        overrides: Settings that change it.

    Raises:
        InputError: The folder holds something else, or one that was begun otherwise.
    """
    path = Path(out)
    given = dict(overrides) if isinstance(overrides, Mapping) else dict(parse_override(text) for text in overrides)
    if read_run_config(path) is not None:
        raise InputError(f"{path}: holds a run; give a cross-validation a folder of its own")
    engine = {key: value for key, value in given.items() if key.startswith("engine.")}
    asked: dict[str, Any] = {
        "cohort": None if cohort is None else str(Path(cohort).resolve()),
        "folds": folds,
        "recipe": None if recipe is None else str(recipe),
        "settings": {key: value for key, value in given.items() if key not in engine} or None,
    }
    if (path / STUDY_FILE).is_file():
        begun = read_json(path / STUDY_FILE)
        for name, value in asked.items():
            if value is not None and value != begun[name]:
                raise InputError(
                    f"{path}: was begun with {name} {begun[name]}, not {value}; go on with the same, or give another "
                    "folder"
                )
    else:
        if cohort is None or folds is None:
            raise InputError(f"{path}: no cross-validation has begun here; begin one: `its2clr fit COHORT --folds 5`")
        whole = Cohort.open(cohort)
        if not whole.labels_visible:
            raise InputError(f"{cohort}: has no labels; a cross-validation needs them")
        asked["recipe"] = asked["recipe"] or usual_recipe(whole.info)
        seed = resolve_config(asked["recipe"], given).seed
        fold_of_bags(whole, folds, seed)  # before anything is written: it may not be possible
        begun = {"format": FORMAT, **asked, "settings": asked["settings"] or {}, "seed": seed}
        write_json(path / STUDY_FILE, begun)
    settings = {**begun["settings"], **engine}
    return CrossValidation(path, Path(begun["cohort"]), begun["folds"], begun["seed"], begun["recipe"], settings)


def is_study(folder: str | Path) -> bool:
    """Whether a folder holds a cross-validation."""
    return (Path(folder) / STUDY_FILE).is_file()
