"""Train and evaluate the run of every fold, then bring together what they say."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from its2clr.cluster.place import Cluster
from its2clr.cluster.workers import WorkersDied, workers_of
from its2clr.crossval.outcome import HANDED_OVER, OutOfFold, collect, join_folds
from its2clr.crossval.page import PAGE_FILE, write_page
from its2clr.crossval.study import CrossValidation, open_study
from its2clr.engine.devices import Engine
from its2clr.engine.shared_gpu import shared_gpu
from its2clr.engine.workers import LOCK, locked
from its2clr.errors import InputError, TrainingError
from its2clr.files import write_json
from its2clr.launcher import launched_processes
from its2clr.plugins import allow_plugins, allowed_plugins
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
    study: CrossValidation,
    *,
    cluster: Cluster = Cluster(),  # noqa: B008 (it cannot change)
    quiet: bool = False,
    ask: Callable[[str], bool] | None = None,
) -> dict[str, Any]:
    """Train, evaluate and report every fold; goes on where it stopped.

    Args:
        study: What to do; see `open_study`.
        cluster: Where folds are trained; on this machine with one worker, one after the other in this process.
        quiet: Say nothing.
        ask: Asks a person whether a long training shall begin; None: nobody is asked.

    Returns:
        The content of `results.json`.

    Raises:
        InputError: Several processes were started by a launcher, and several workers are wanted.
        TrainingError: A fold's workers were killed again and again.
    """
    alone = cluster.is_local and (cluster.workers or 1) == 1
    if not alone and launched_processes() != (1, 1):
        raise InputError("--workers and --cluster start processes themselves: run this without torchrun or srun")
    engine = Engine(resolve_config(study.recipe, study.settings).engine)
    engine.bars.enabled &= not quiet
    engine.on_writer(study.prepare)
    if alone:
        for fold in study.numbers:
            engine.say(f"fold {fold} of {study.folds}")
            train_fold(study, fold, engine, ask)
            ask = None  # who wants one fold wants all
    else:
        _side_by_side(study, cluster, engine)
    return engine.on_writer(lambda: conclude(study, engine))


def _side_by_side(study: CrossValidation, cluster: Cluster, engine: Engine) -> None:
    folds = iter(study.numbers)
    train = partial(_fold_in_worker, study.path.resolve(), dict(study.settings), allowed_plugins())
    with shared_gpu() if cluster.is_local else nullcontext(), workers_of(cluster, study.folds, engine.say) as workers:
        for fold, died in workers.work(train, lambda: next(((fold, fold) for fold in folds), None)):
            if isinstance(died, WorkersDied):
                raise TrainingError(
                    f"fold {fold}: its workers were killed from outside again and again, usually for want of memory: "
                    "try fewer --workers. The same command goes on where it stopped."
                )
            engine.say(f"fold {fold} of {study.folds} is done: {study.run(fold) / PAGE_FILE}")


def _fold_in_worker(path: Path, settings: dict[str, Any], plugins: list[str], fold: int) -> None:
    """Train a fold in a worker. The worker that had it before may only have been cut off, and still be at it."""
    allow_plugins(plugins)
    study = open_study(path, overrides=settings)
    engine = Engine(resolve_config(study.recipe, study.settings).engine)
    engine.bars.enabled = False
    with locked(study.run(fold) / LOCK):
        train_fold(study, fold, engine)


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
