"""Predict new bags with a trained model: cut as the model's own, scored bag by bag, written as tables.

```
predictions.csv      bag_id,source,n_instances,probability,calibrated_probability,predicted_label
instances.parquet    bag_id,instance,name,x,y,probability,tile_size_level0
problems.csv         bag_id,file,row,problem: what was not predicted, and why
prediction.json      which model gave these numbers, and the cohorts that hold the tiles
cohort/              the tiles of new slides and images
```
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from its2clr.cohort import Cohort, LeftOut, write_problems
from its2clr.cohort.layout import INFO_FILE, PROBLEMS_FILE
from its2clr.engine.devices import Engine
from its2clr.errors import InputError
from its2clr.files import atomic_path, write_json
from its2clr.plugins import import_plugins
from its2clr.predict.bag_names import distinct_names
from its2clr.predict.inference import score_bags
from its2clr.predict.inputs import sort_inputs
from its2clr.predict.model_file import TrainedModel
from its2clr.predict.model_of_run import open_model
from its2clr.predict.packing import pack_inputs
from its2clr.predict.prediction_files import INSTANCES, PREDICTIONS, PROVENANCE, SCORES
from its2clr.settings import parse_override, resolve_config
from its2clr.units import MicronsPerPixel
from its2clr.version import __version__
from its2clr.wording import shortened_lines

COHORT = "cohort"


@dataclass(frozen=True, eq=False)
class Predicted:
    """What a prediction found.

    Attributes:
        out: Folder of the files.
        bags: One row per bag: `bag_id`, `source`, `n_instances`, `probability`, `calibrated_probability`,
            `predicted_label`.
        instances: One row per instance: `bag_id`, `instance`, `name`, `x`, `y`, `probability`, `tile_size_level0`.
        left_out: What was not predicted, and why.
        notes: What a person should know of bags that were.
        threshold: Probability from which on a bag is called positive.
    """

    out: Path
    bags: pd.DataFrame
    instances: pd.DataFrame
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]
    threshold: float

    def lines(self) -> list[str]:
        """The closing words: bags predicted, called positive, left out and why."""
        positive = int(self.bags["predicted_label"].sum())
        called = f"{positive} called positive (probability >= {self.threshold:.3f}, chosen on validation)"
        lines = [f"{self.out / PREDICTIONS}: {len(self.bags)} bags, {len(self.instances)} instances; {called}"]
        if self.left_out:
            lines.append(f"left out: {len(self.left_out)} ({self.out / PROBLEMS_FILE})")
            lines += [f"  {line}" for line in shortened_lines([_said(one) for one in self.left_out])]
        return lines + shortened_lines([f"note: {note}" for note in self.notes], more="more notes")


def predict(
    model: str | Path | TrainedModel,
    inputs: str | Path | Iterable[str | Path],
    out: str | Path,
    *,
    default_mpp: MicronsPerPixel | None = None,
    workers: int | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    quiet: bool = False,
) -> Predicted:
    """Predict new bags; labels are neither needed nor looked at.

    Args:
        model: A run folder, a model file, or a model.
        inputs: Cohort folders, slides, folders of slides, folders of images, folders of such folders, or manifests.
        out: Folder for the tables and, below `cohort`, the tiles; the same call again does not cut tiles twice.
        default_mpp: Microns per pixel of slides where neither file nor manifest says.
        workers: Parallel workers of cutting tiles; all cores if None.
        overrides: `engine.` settings and `plugins`, as after `--set`.
        quiet: Say nothing.

    Returns:
        The tables, also written to `out`.

    Raises:
        InputError: The model cannot be used, an input does not exist, or nothing can be predicted.
    """
    model, engine = open_for_prediction(model, overrides, quiet=quiet)
    out = _checked_folder(Path(out))
    tiling = model.tiling
    found = sort_inputs([inputs] if isinstance(inputs, str | Path) else inputs, tiling.kind)
    packed = engine.on_writer(lambda: pack_inputs(found, out / COHORT, tiling, engine, default_mpp, workers))
    left_out, notes = [*found.left_out, *packed.left_out], list(packed.notes)
    cohorts = [Cohort.open(out / COHORT).without_labels()] if packed.any_bag else []
    if tiling.kind == "features":
        notes += [f"{out / COHORT}: {one}" for cohort in cohorts for one in tiling.differences(cohort.info)]
    for path in found.cohorts:
        fitting = _fitting(Cohort.open(path).without_labels(), model, left_out, notes)
        cohorts += [] if fitting is None else [fitting]
    left_out.sort(key=lambda one: one.row)
    if engine.is_writer:
        out.mkdir(parents=True, exist_ok=True)
        write_problems(out, left_out)
    if not cohorts:
        _refuse(out, left_out)
    predicted = _tables(model, cohorts, engine, out, left_out, notes)
    if engine.is_writer:
        _write(predicted, model, cohorts, engine)
    engine.barrier()
    return predicted


def open_for_prediction(
    model: str | Path | TrainedModel, overrides: Sequence[str] | Mapping[str, Any] = (), *, quiet: bool = False
) -> tuple[TrainedModel, Engine]:
    """A model, and the engine it is to run on: with the run's precision, unless the overrides say otherwise.

    Raises:
        InputError: There is no model, or a setting of the model is to be changed.
    """
    given = dict(overrides) if isinstance(overrides, Mapping) else dict(parse_override(text) for text in overrides)
    for key in given:
        if key != "plugins" and key.partition(".")[0] != "engine":
            raise InputError(
                f"--set {key}: a trained model keeps its settings; only `engine.` settings and `plugins` can be given"
            )
    import_plugins(resolve_config(None, given).plugins)
    opened = model if isinstance(model, TrainedModel) else open_model(model)
    precision = {"engine.precision": opened.description.precision}
    engine = Engine(resolve_config(None, {**precision, **given}).engine)
    engine.bars.enabled &= not quiet
    return opened, engine


def _checked_folder(out: Path) -> Path:
    if out.is_file():
        raise InputError(f"{out}: is a file; give a folder for the predictions")
    for name, what in ((INFO_FILE, "a cohort"), ("config.yaml", "a run")):
        if (out / name).exists():
            raise InputError(f"{out}: is {what}; give a folder of its own for the predictions")
    foreign = [name for name in (PREDICTIONS, INSTANCES) if (out / name).exists()]
    if foreign and not (out / PROVENANCE).is_file():
        raise InputError(f"{out}: holds {foreign[0]} that no prediction wrote; give a folder of its own")
    return out


def _fitting(cohort: Cohort, model: TrainedModel, left_out: list[LeftOut], notes: list[str]) -> Cohort | None:
    """The bags of a given cohort that fit the model; the others are noted."""
    misfit = model.tiling.misfit_of_cohort(cohort.info)
    if misfit is not None:
        left_out.append(LeftOut("", str(cohort.path), 0, misfit))
        return None
    kept = []
    for row, bag_id in enumerate(cohort.bags["bag_id"].tolist()):
        misfit = model.tiling.misfit_of_bag(cohort.tile_file(bag_id))
        if misfit is None:
            kept.append(row)
        else:
            left_out.append(LeftOut(bag_id, str(cohort.path), 0, misfit))
    if not kept:
        return None
    notes += [f"{cohort.path}: {difference}" for difference in model.tiling.differences(cohort.info)]
    return Cohort(cohort.path, cohort.bags.iloc[kept].reset_index(drop=True), cohort.info, labels_visible=False)


def _refuse(out: Path, left_out: list[LeftOut]) -> None:
    lines = "\n  ".join(shortened_lines([_said(one) for one in left_out]))
    earlier = f"; {PREDICTIONS} there is of an earlier call" if (out / PROVENANCE).is_file() else ""
    raise InputError(f"nothing could be predicted ({out / PROBLEMS_FILE}{earlier}):\n  {lines}")


def _said(one: LeftOut) -> str:
    return ": ".join(part for part in (one.bag_id, one.file, one.problem) if part)


def _tables(
    model: TrainedModel, cohorts: list[Cohort], engine: Engine, out: Path, left_out: list[LeftOut], notes: list[str]
) -> Predicted:
    names = distinct_names(
        [(bag_id, cohort.path.absolute() / "bag") for cohort in cohorts for bag_id in cohort.bags["bag_id"]]
    )
    bag_tables, instance_tables = [], []
    for cohort in cohorts:
        own, names = names[: len(cohort)], names[len(cohort) :]
        scores = score_bags(model, cohort, engine)
        files = [cohort.tile_file(bag_id) for bag_id in cohort.bags["bag_id"]]
        index, coords = cohort.bag_index(), cohort.coords()
        probability = scores.bag_probability
        bag_tables.append(
            pd.DataFrame(
                {
                    "bag_id": own,
                    "source": [file.source for file in files],
                    "n_instances": cohort.bags["n_instances"].to_numpy(dtype=np.int64),
                    "probability": probability,
                    "calibrated_probability": model.calibration.apply(probability),
                    "predicted_label": (probability >= model.description.threshold).astype(np.int64),
                }
            )
        )
        instance_tables.append(
            pd.DataFrame(
                {
                    "bag_id": np.array(own, dtype=object)[index],
                    "instance": np.arange(len(index)) - cohort.offsets()[index],
                    "name": cohort.names(),
                    "x": coords[:, 0],
                    "y": coords[:, 1],
                    "probability": scores.instance_probability,
                    "tile_size_level0": np.array([file.tile_size_level0 for file in files])[index],
                }
            )
        )
    bags, instances = (pd.concat(tables, ignore_index=True) for tables in (bag_tables, instance_tables))
    return Predicted(out, bags, instances, tuple(left_out), tuple(notes), model.description.threshold)


def _write(predicted: Predicted, model: TrainedModel, cohorts: list[Cohort], engine: Engine) -> None:
    out, description = predicted.out, model.description
    (out / SCORES).unlink(missing_ok=True)  # of the predictions that these replace
    with atomic_path(out / INSTANCES) as temporary:
        predicted.instances.to_parquet(temporary, index=False)
    with atomic_path(out / PREDICTIONS) as temporary:
        predicted.bags.to_csv(temporary, index=False, lineterminator="\n")
    names = iter(predicted.bags["bag_id"])
    write_json(
        out / PROVENANCE,
        {
            "its2clr": __version__,
            "model": {
                "fingerprint": model.fingerprint,
                "its2clr": description.its2clr,
                "method": description.method,
                "encoder": description.encoder_name,
                "aggregator": description.aggregator.name,
                "label": description.label,
            },
            "threshold": description.threshold,
            "calibration": {"slope": model.calibration.slope, "intercept": model.calibration.intercept},
            "device": engine.device.type,
            "precision": engine.precision,
            "cohorts": [
                {
                    "path": str(cohort.path.resolve()),
                    "bags": {next(names): bag_id for bag_id in cohort.bags["bag_id"].tolist()},
                }
                for cohort in cohorts
            ],
        },
    )
