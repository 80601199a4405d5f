"""A folder of predictions: its files, how they are written, and how they are read back.

```
predictions.csv      bag_id,source,n_instances,probability,calibrated_probability,predicted_label
instances.parquet    bag_id,instance,name,x,y,probability,tile_size_level0
problems.csv         bag_id,file,row,problem: what was not predicted, and why
prediction.json      which model gave these numbers, and the cohorts that hold the tiles; there from the beginning,
                     and with nothing but `unfinished` in it until the tables are whole
scores.json          the predictions against labels, where they were scored
cohort/              the tiles of new slides and images
```
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from its2clr.cohort import LeftOut
from its2clr.cohort.layout import INFO_FILE, PROBLEMS_FILE
from its2clr.errors import InputError
from its2clr.files import atomic_path, read_json, remove_half_written, write_json
from its2clr.run.decisions import USUAL_INSTANCE_THRESHOLD, Thresholds
from its2clr.version import __version__
from its2clr.wording import shortened_lines

PREDICTIONS = "predictions.csv"
INSTANCES = "instances.parquet"
PROVENANCE = "prediction.json"
SCORES = "scores.json"
COHORT = "cohort"
OUT_OF_FOLD = "out_of_fold"
"""Name of such a folder in a cross-validation: each bag by the fold that has not seen it."""
_UNFINISHED = "unfinished"
_PROBABILITIES = ["probability", "calibrated_probability"]


@dataclass(frozen=True, eq=False)
class Predicted:
    """The predictions for new bags.

    Attributes:
        out: Folder of the files.
        bags: One row per bag: `bag_id`, `source`, `n_instances`, `probability`, `calibrated_probability`,
            `predicted_label`.
        instances: One row per instance: `bag_id`, `instance`, `name`, `x`, `y`, `probability`, `tile_size_level0`.
        left_out: What was not predicted, and why.
        notes: What a person should know about the bags that were predicted.
        thresholds: Probabilities from which on the model calls a bag, and an instance, positive.
    """

    out: Path
    bags: pd.DataFrame
    instances: pd.DataFrame
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]
    thresholds: Thresholds

    def lines(self) -> list[str]:
        """The closing words: bags predicted, called positive, left out and why."""
        positive = int(self.bags["predicted_label"].sum())
        called = f"{positive} called positive (probability >= {self.thresholds.bag:.3f}, chosen on validation)"
        lines = [f"{self.out / PREDICTIONS}: {len(self.bags)} bags, {len(self.instances)} instances; {called}"]
        if self.left_out:
            lines.append(f"left out: {len(self.left_out)} ({self.out / PROBLEMS_FILE})")
            lines += [f"  {line}" for line in shortened_lines([on_one_line(one) for one in self.left_out])]
        return lines + shortened_lines([f"note: {note}" for note in self.notes], more="more notes")

    def write(self, provenance: dict[str, Any]) -> None:
        """Write the tables, and what is known about the model that gave them; until all is there, it is unfinished."""
        claim_folder(self.out, anew=True)
        (self.out / SCORES).unlink(missing_ok=True)  # they belong to the predictions that these replace
        with atomic_path(self.out / INSTANCES) as temporary:
            self.instances.to_parquet(temporary, index=False)
        with atomic_path(self.out / PREDICTIONS) as temporary:
            self.bags.to_csv(temporary, index=False, lineterminator="\n")
        write_json(self.out / PROVENANCE, provenance)


def check_folder(out: Path) -> None:
    """Check that predictions may be written into a folder.

    Raises:
        InputError: It is a file, a run or a cohort, or holds tables that are not predictions.
    """
    if out.is_file():
        raise InputError(f"{out}: is a file; give a folder for the predictions")
    for name, what in ((INFO_FILE, "a cohort"), ("config.yaml", "a run")):
        if (out / name).exists():
            raise InputError(f"{out}: is {what}; give a folder of its own for the predictions")
    foreign = [name for name in (PREDICTIONS, INSTANCES) if (out / name).exists()]
    if foreign and not (out / PROVENANCE).is_file():
        raise InputError(f"{out}: holds a {foreign[0]} that `its2clr predict` did not write; give another folder")


def claim_folder(out: Path, *, anew: bool = False) -> None:
    """Note that predictions are being written into a folder: the same command may go on in it, and no one reads it.

    Args:
        out: The folder, which `check_folder` has checked; made if missing.
        anew: Whether finished predictions there, if any, are about to be replaced.
    """
    remove_half_written(out, below=False)
    if anew or not (out / PROVENANCE).is_file():
        write_json(out / PROVENANCE, {"its2clr": __version__, _UNFINISHED: True})


def is_finished(out: Path) -> bool:
    """Whether a folder holds predictions that were written to their end."""
    try:
        read_provenance(out)
    except (OSError, ValueError):
        return False
    return True


def read_provenance(folder: Path) -> dict[str, Any]:
    """What is known about the model that gave the predictions.

    Raises:
        InputError: The predictions were not written to their end.
    """
    found: dict[str, Any] = read_json(folder / PROVENANCE)
    if _UNFINISHED in found:
        raise InputError(
            f"{folder}: its predictions are not finished; run the same `its2clr predict` again, which goes on there"
        )
    return found


def thresholds_of(provenance: dict[str, Any]) -> Thresholds:
    """From which probability on the model that gave the predictions calls a bag, and an instance, positive."""
    instance = provenance.get("instance_threshold", USUAL_INSTANCE_THRESHOLD)
    return Thresholds(float(provenance["threshold"]), float(instance))


def read_predictions(folder: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """What is known about the model, and the probabilities of each bag.

    Raises:
        InputError: The folder holds no predictions, or they cannot be read.
    """
    _require(folder, PROVENANCE)
    try:
        provenance = read_provenance(folder)
        _require(folder, PREDICTIONS)
        known = {"model": provenance["model"], "threshold": thresholds_of(provenance).bag}
        table = pd.read_csv(
            folder / PREDICTIONS,
            dtype={"bag_id": str},
            keep_default_na=False,
            converters=dict.fromkeys(_PROBABILITIES, float),  # exact: a probability may equal the threshold
        )[["bag_id", *_PROBABILITIES]]
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{folder}: its predictions cannot be read ({error}); run `its2clr predict` again") from error
    repeated = table["bag_id"][table["bag_id"].duplicated()].tolist()
    if repeated:
        raise InputError(f"{folder / PREDICTIONS}: bag_id {repeated[0]!r} is there twice; run `its2clr predict` again")
    return known, table.set_index("bag_id")


def read_sources(folder: Path) -> "pd.Series[str]":
    """The slide, or the folder of images, of each predicted bag."""
    table = pd.read_csv(folder / PREDICTIONS, dtype={"bag_id": str}, keep_default_na=False)
    sources: pd.Series[str] = table.set_index("bag_id")["source"].astype(str)
    return sources


def _require(folder: Path, name: str) -> None:
    if not (folder / name).is_file():
        raise InputError(
            f"{folder}: not a folder of predictions (it has no {name}); `its2clr predict MODEL INPUT --out FOLDER` "
            "makes one"
        )


def on_one_line(one: LeftOut) -> str:
    """What was left out, and why."""
    return ": ".join(part for part in (one.bag_id, one.file, one.problem) if part)
