"""Train and evaluate the run of every fold, then bring together what they say."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from its2clr.crossval.outcome import HANDED_OVER, OutOfFold, collect, join_folds
from its2clr.crossval.page import write_page
from its2clr.crossval.study import CrossValidation
from its2clr.engine.devices import Engine
from its2clr.files import write_json
from its2clr.predict.model_file import MODEL_FILE, TrainedModel, save_model
from its2clr.predict.model_of_run import export_model
from its2clr.predict.new_bags import provenance_of
from its2clr.predict.prediction_folder import OUT_OF_FOLD, Predicted
from its2clr.report import reported
from its2clr.run.decisions import Thresholds
from its2clr.run.evaluation import evaluate
from its2clr.run.opening import open_run
from its2clr.run.scores import RESULTS_FILE
from its2clr.settings import resolve_config


def cross_validate(
    study: CrossValidation, *, quiet: bool = False, ask: Callable[[str], bool] | None = None
) -> dict[str, Any]:
    """Train, evaluate and report every fold, one after the other; goes on where it stopped.

    Args:
        study: What to do; see `open_study`.
        quiet: Say nothing.
        ask: Asks a person whether a long training shall begin; None: nobody is asked.

    Returns:
        The content of `results.json`.
    """
    engine = Engine(resolve_config(study.recipe, study.settings).engine)
    engine.bars.enabled &= not quiet
    engine.on_writer(study.prepare)
    for fold in study.numbers:
        engine.say(f"fold {fold} of {study.folds}")
        train_fold(study, fold, engine, ask)
        ask = None  # who wants one fold wants all
    return engine.on_writer(lambda: conclude(study, engine))


def train_fold(study: CrossValidation, fold: int, engine: Engine, ask: Callable[[str], bool] | None = None) -> None:
    """Train, evaluate and report one fold."""
    stages = open_run(study.run(fold), study.cohort_of(fold), study.recipe, study.settings, engine=engine)
    stages.ask = ask
    with reported(stages.run.path, engine.say, enabled=engine.is_writer):
        stages.fit()
        evaluate(stages)
    if engine.is_writer:
        export_model(stages.run.path)


def conclude(study: CrossValidation, engine: Engine) -> dict[str, Any]:
    """Measure all bags out of fold and write scores, model and page; needs every fold evaluated."""
    results, found = collect(study)
    model = join_folds(study, results, found[HANDED_OVER])
    _write_scores(study, model, found[HANDED_OVER], engine)
    save_model(model, study.path / MODEL_FILE)
    write_json(study.path / RESULTS_FILE, results)
    write_page(study, results)
    return results


def _write_scores(study: CrossValidation, model: TrainedModel, found: OutOfFold, engine: Engine) -> None:
    """The scores out of fold as a folder of predictions, for viewer, maps, GeoJSON and `score`."""
    cohort = study.cohort
    files = [cohort.tile_file(bag_id) for bag_id in cohort.bags["bag_id"]]
    bags = pd.DataFrame(
        {
            "bag_id": cohort.bags["bag_id"],
            "source": [file.source for file in files],
            "n_instances": cohort.bags["n_instances"].to_numpy(dtype=np.int64),
            "probability": found.bags,
            "calibrated_probability": model.calibration.apply(found.bags),
            "predicted_label": (found.bags >= model.thresholds.bag).astype(np.int64),
            "fold": study.fold_of_bag,
        }
    )
    sizes = np.repeat([file.tile_size_level0 for file in files], cohort.bags["n_instances"])
    instances = found.instances.drop(columns="label").assign(tile_size_level0=sizes)
    thresholds = Thresholds(model.thresholds.bag, model.thresholds.instance)
    predicted = Predicted(study.path / OUT_OF_FOLD, bags, instances, (), (), thresholds)
    provenance = provenance_of(model, [cohort.without_labels()], engine, predicted)
    predicted.write({**provenance, "seen_in_training": {}, "out_of_fold": True})
