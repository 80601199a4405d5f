"""Predict new bags with a trained model: cut as the model's own, scored bag by bag, written as tables."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from its2clr.cohort import Cohort, LeftOut, write_problems
from its2clr.cohort.layout import PROBLEMS_FILE
from its2clr.engine.devices import Engine
from its2clr.errors import InputError
from its2clr.predict.inference import open_for_prediction, score_bags
from its2clr.predict.inputs import distinct_names, sort_inputs
from its2clr.predict.model_file import TrainedModel
from its2clr.predict.new_cohort import pack_inputs
from its2clr.predict.prediction_folder import (
    COHORT,
    PREDICTIONS,
    Predicted,
    check_folder,
    claim_folder,
    is_finished,
    on_one_line,
)
from its2clr.predict.seen_bags import said_seen, seen_bags, tiles_of
from its2clr.units import MicronsPerPixel
from its2clr.version import __version__
from its2clr.wording import shortened_lines


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
        workers: Parallel workers that cut tiles; all cores if None.
        overrides: `engine.` settings and `plugins`, as after `--set`.
        quiet: Say nothing.

    Returns:
        The tables, also written to `out`.

    Raises:
        InputError: The model cannot be used, an input does not exist, or nothing can be predicted.
    """
    model, engine = open_for_prediction(model, overrides, quiet=quiet)
    out, tiling = Path(out), model.tiling
    check_folder(out)
    found = sort_inputs([inputs] if isinstance(inputs, str | Path) else inputs, tiling.kind)
    engine.on_writer(lambda: claim_folder(out))
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
        write_problems(out, left_out)
    if not cohorts:
        _refuse(out, left_out)
    predicted = _tables(model, cohorts, engine, out, left_out, notes)
    provenance = provenance_of(model, cohorts, engine, predicted)
    predicted = replace(predicted, notes=(*predicted.notes, *said_seen(provenance["seen_in_training"])))
    if engine.is_writer:
        predicted.write(provenance)
    engine.barrier()
    return predicted


def _fitting(cohort: Cohort, model: TrainedModel, left_out: list[LeftOut], notes: list[str]) -> Cohort | None:
    """The bags of a given cohort that fit the model, the others go to `left_out`; None if no bag fits."""
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
    lines = "\n  ".join(shortened_lines([on_one_line(one) for one in left_out]))
    earlier = f"; the {PREDICTIONS} there is from an earlier call" if is_finished(out) else ""
    raise InputError(f"nothing could be predicted ({out / PROBLEMS_FILE}{earlier}):\n  {lines}")


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
                    "predicted_label": (probability >= model.thresholds.bag).astype(np.int64),
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
    return Predicted(out, bags, instances, tuple(left_out), tuple(notes), model.thresholds)


def provenance_of(
    model: TrainedModel, cohorts: Sequence[Cohort], engine: Engine, predicted: Predicted
) -> dict[str, Any]:
    """The content of `prediction.json`.

    Args:
        model: What predicted.
        cohorts: Where the tiles are; their bags come in the order of the predicted ones.
        engine: Where it was computed.
        predicted: The tables.
    """
    description, names = model.description, iter(predicted.bags["bag_id"])
    listed = [
        {
            "path": str(cohort.path.resolve()),
            "bags": {next(names): bag_id for bag_id in cohort.bags["bag_id"].tolist()},
            "tiles": {bag.bag_id: bag.tiles for bag in cohort.identity().bags},
        }
        for cohort in cohorts
    ]
    return {
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
        "instance_threshold": description.instance_threshold,
        "calibration": {"slope": model.calibration.slope, "intercept": model.calibration.intercept},
        "device": engine.device.type,
        "precision": engine.precision,
        "cohorts": listed,
        "seen_in_training": seen_bags(description.seen, tiles_of(listed)),
    }
