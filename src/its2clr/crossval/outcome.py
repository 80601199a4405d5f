"""What the folds say together: every bag by the fold that tested it, measured once; and their models as one.

All decisions use one threshold: the best on the validation bags of all folds, each scored by its own fold. The model of
all folds has it too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from its2clr.crossval.study import CrossValidation
from its2clr.evaluation.arrays import both_classes
from its2clr.evaluation.bags import bag_auc_difference, bag_metric_intervals, bag_metrics
from its2clr.evaluation.instances import instance_auc_interval, instance_metrics
from its2clr.evaluation.thresholds import balanced_accuracy_threshold
from its2clr.evaluation.uncertainty import summarise
from its2clr.predict.calibration import fit_calibration
from its2clr.predict.model_file import MemberPart, TrainedModel, join_model
from its2clr.predict.model_of_run import model_of_run
from its2clr.predict.seen_bags import bag_hashes
from its2clr.run.decisions import read_thresholds
from its2clr.run.names import REFINED, START, encoder_names
from its2clr.run.results_file import measured
from its2clr.run.scores import PREDICTIONS_FILE, Model, RunScores

HANDED_OVER = "handed_over"


@dataclass(frozen=True, eq=False)
class OutOfFold:
    """What one kind of model says about every bag of the cohort, in the order of its bags.

    Attributes:
        bags: (bags,) probabilities.
        instances: One row per instance: `bag_id`, `instance`, `name`, `x`, `y`, `label` and `probability`.
        validation_labels: (V,) labels of the validation bags of all folds.
        validation: (V,) their probabilities, each by its own fold.
        of_folds: What was measured of each fold's model on its test bags.
    """

    bags: NDArray[np.float64]
    instances: pd.DataFrame
    validation_labels: NDArray[np.int64]
    validation: NDArray[np.float64]
    of_folds: list[dict[str, Any]]

    @property
    def threshold(self) -> float:
        """From which probability on a bag is called positive."""
        return balanced_accuracy_threshold(self.validation_labels, self.validation)


def gather(study: CrossValidation, models: Sequence[Model]) -> OutOfFold:
    """Bring together what a model of each fold says about the bags that this fold tested.

    Args:
        study: A cross-validation whose folds are evaluated.
        models: The model of each fold.
    """
    bag_tables, instance_tables, validation_tables, measurements = [], [], [], []
    for fold, model in zip(study.numbers, models, strict=True):
        scores = RunScores(study.run(fold))
        table = scores.bags
        of_model = table[(table["encoder"] == model.encoder) & (table["aggregator"] == model.aggregator)]
        bag_tables.append(of_model[of_model["split"] == "test"])
        validation_tables.append(of_model[of_model["split"] == "val"])
        wanted = [("encoder", "==", model.encoder), ("aggregator", "==", model.aggregator), ("split", "==", "test")]
        columns = ["bag_id", "instance", "name", "x", "y", "label", "probability"]
        instance_tables.append(pd.read_parquet(scores.run / PREDICTIONS_FILE, columns=columns, filters=wanted))
        measurements.append(measured(scores.results, model))
    ids = study.cohort.bags["bag_id"].tolist()
    place = {bag_id: number for number, bag_id in enumerate(ids)}
    bags = pd.concat(bag_tables).set_index("bag_id")["probability"].loc[ids].to_numpy(dtype=np.float64)
    instances = pd.concat(instance_tables, ignore_index=True)
    order = np.lexsort((instances["instance"], instances["bag_id"].map(place)))
    validation = pd.concat(validation_tables)
    return OutOfFold(
        bags,
        instances.iloc[order].reset_index(drop=True),
        validation["label"].to_numpy(dtype=np.int64),
        validation["probability"].to_numpy(dtype=np.float64),
        measurements,
    )


def collect(study: CrossValidation) -> tuple[dict[str, Any], dict[str, OutOfFold]]:
    """The content of `results.json`, and the scores it was made from, by kind of model."""
    runs = [RunScores(study.run(fold)) for fold in study.numbers]
    config = runs[0].config
    own, handed = config.aggregator.name, [run.best for run in runs]
    kinds = {
        encoder: [Model(encoder, own)] * study.folds
        for encoder in (START, REFINED)
        if all(Model(encoder, own) in run.models for run in runs)
    } | {HANDED_OVER: handed}
    found = {kind: gather(study, models) for kind, models in kinds.items()}
    resamples = config.evaluation.bootstrap
    bags = study.cohort.bags
    labels, groups = bags["label"].to_numpy(dtype=np.int64), bags["group"]
    results: dict[str, Any] = {
        "folds": study.folds,
        "cohort": {
            "path": str(study.cohort_path),
            "content": study.cohort.identity().digest,
            "bags": len(bags),
            "positive_bags": int(labels.sum()),
            "groups": int(groups.nunique()),
            "instances": study.cohort.n_instances,
        },
        "aggregator": own,
        "names": {**encoder_names(config), HANDED_OVER: "handed over"},
        "handed_over": [model.encoder for model in handed],
        "start_is_trained": config.pretrain.start is None and config.pretrain.epochs > 0
        if study.cohort.kind == "tiles"
        else False,
        "bags_of_fold": [_counted(labels[study.fold_of_bag == fold]) for fold in study.numbers],
        "models": {kind: measure(study, one, resamples) for kind, one in found.items()},
    }
    if START in found and REFINED in found:
        difference, interval = bag_auc_difference(
            labels, found[REFINED].bags, found[START].bags, resamples=resamples, seed=study.seed, groups=groups
        )
        results["comparison"] = {"bag_auc_difference": difference, "bag_auc_difference_interval": list(interval)}
    return results, found


def measure(study: CrossValidation, found: OutOfFold, resamples: int) -> dict[str, Any]:
    """Metrics of all bags at once with intervals over groups, and the spread of the folds' own metrics."""
    cohort = study.cohort
    labels, groups = cohort.bags["label"].to_numpy(dtype=np.int64), cohort.bags["group"]
    threshold, draws = found.threshold, {"resamples": resamples, "seed": study.seed, "groups": groups}
    intervals = bag_metric_intervals(labels, found.bags, [threshold], **draws)  # type: ignore[arg-type]
    of_folds = [{"bag_auc": one["bag_auc"]} for one in found.of_folds]
    measured_of: dict[str, Any] = {
        "threshold": threshold,
        "bag": bag_metrics(labels, found.bags, threshold),
        "bag_intervals": {name: list(interval) for name, interval in intervals.items()},
    }
    truth, scores = (found.instances[name].to_numpy() for name in ("label", "probability"))
    if both_classes(truth):
        interval = instance_auc_interval(truth, scores, cohort.offsets(), **draws)  # type: ignore[arg-type]
        measured_of |= {"instance": instance_metrics(truth, scores), "instance_auc_interval": list(interval)}
        if all("instance_auc" in one for one in found.of_folds):
            for fold, one in zip(of_folds, found.of_folds, strict=True):
                fold["instance_auc"] = one["instance_auc"]
    return measured_of | {"of_folds": summarise(of_folds)}


def join_folds(study: CrossValidation, results: dict[str, Any], found: OutOfFold) -> TrainedModel:
    """The models that the folds hand over as one, which predicts their mean."""
    runs = [RunScores(study.run(fold)) for fold in study.numbers]
    models = [model_of_run(run.run, run.best) for run in runs]
    measured_of, instance = results["models"][HANDED_OVER], results["models"][HANDED_OVER].get("instance")
    metrics = {
        "out_of_fold": True,
        "bag_auc": measured_of["bag"]["auc"],
        "bag_auc_std": measured_of["of_folds"]["bag_auc"]["std"],
        "bag_auc_interval": measured_of["bag_intervals"]["auc"],
    }
    if instance is not None:
        metrics |= {"instance_auc": instance["auc"], "instance_auc_interval": measured_of["instance_auc_interval"]}
    methods = " and ".join(dict.fromkeys(model.description.method for model in models))
    first = models[0].description
    thresholds = [read_thresholds(run.run, run.config, run.results, run.best).instance for run in runs]
    seen = bag_hashes(study.cohort.identity())
    description = first.model_copy(
        update={
            "method": f"{methods}, mean of {study.folds} folds",
            "encoder_name": HANDED_OVER,
            "more": tuple(
                MemberPart(encoder=one.description.encoder, aggregator=one.description.aggregator) for one in models[1:]
            ),
            "threshold": found.threshold,
            "instance_threshold": float(np.mean(thresholds)),
            "calibration": fit_calibration(found.validation_labels, found.validation).as_dict(),
            "metrics": metrics,
            "cohort": {key: value for key, value in results["cohort"].items() if key != "path"},
            "seen": {"train": sorted(name for names in seen.values() for name in names)},
        }
    )
    return join_model(description, *(one.members[0] for one in models))


def _counted(labels: NDArray[np.int64]) -> dict[str, int]:
    return {"bags": len(labels), "positive_bags": int(labels.sum())}
