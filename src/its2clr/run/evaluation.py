"""Evaluation of a finished run: the one place that reads test labels, after every model is frozen."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from its2clr.cohort import Cohort
from its2clr.cohort.splits import SPLITS
from its2clr.config import RunConfig
from its2clr.engine.guard import advice, ended_stuck
from its2clr.errors import InputError
from its2clr.evaluation.arrays import both_classes
from its2clr.evaluation.bags import bag_auc_difference, bag_metric_intervals, bag_metrics
from its2clr.evaluation.features import class_separation, linear_probe, linear_probe_metrics
from its2clr.evaluation.health import estimate_witness_rate, health_report, start_kept, warnings_of
from its2clr.evaluation.instances import instance_auc_interval, instance_metrics
from its2clr.evaluation.thresholds import balanced_accuracy_threshold
from its2clr.evaluation.uncertainty import summarise
from its2clr.files import read_json, read_metrics, write_json
from its2clr.refine.remedies import said_retry
from its2clr.run.decisions import Thresholds, choose_thresholds
from its2clr.run.handover import HANDOVER_FILE
from its2clr.run.made_from import model_digest
from its2clr.run.names import ENCODERS, REFINED, START, encoder_names
from its2clr.run.results_file import (
    Round,
    best_round,
    describe_cohort,
    describe_rounds,
    read_retries,
    read_rounds,
    rounds_health,
    training_seconds,
)
from its2clr.run.scores import RESULTS_FILE, Model, Scores, write_predictions
from its2clr.run.stages import Stages
from its2clr.settings import flatten


def evaluate(stages: Stages, *, of_features: bool = True) -> dict[str, Any]:
    """Measure every trained pair of encoder and aggregator on the test bags, and write what was found into the run.

    Writes `results.json`, and for all splits `predictions.parquet` (one row per instance and pair) and
    `bag_predictions.csv`. If models and cohort are those of the last evaluation, its results are read and nothing is
    done. After labels of test bags were corrected, everything is measured anew.

    Args:
        stages: The run.
        of_features: Whether class separation and linear probe are measured too; the probe takes a while.

    Returns:
        The content of `results.json`.

    Raises:
        InputError: No aggregator is trained yet, or cohort or models have changed since they were trained.
    """
    run, models = stages.run, stages.trained()
    if not models:
        raise InputError(f"{run.path}: nothing to evaluate yet; run `its2clr fit` or `its2clr aggregate` on it first")
    done = run.done("evaluate") or {}
    of_features = of_features or done.get("of_features", False)
    cohort = Cohort.open(run.cohort)
    made_from = {
        "cohort": run.check_cohort(cohort).digest,
        "models": {" ".join(model): model_digest(run.path, run.config, *model) for model in models},
    }
    notes: dict[str, Any] = {
        "models": [" ".join(model) for model in models],
        "of_features": of_features,
        "splits": list(SPLITS),
        "made_from": made_from,
    }
    for stage in run.finished():
        run.check_written(stage)
    results: dict[str, Any]
    if done == notes:
        stages.engine.say("evaluate: already done")
        results = read_json(run.path / RESULTS_FILE)
        return results
    unlabelled = {name: cohort.split(name).without_labels() for name in SPLITS}
    scores = _score(stages, models, unlabelled)
    validation = stages.context.validation
    thresholds = {model: choose_thresholds(run.config.refine, validation, scores[model]["val"]) for model in models}
    rounds = read_rounds(run.path)
    refined = Model(REFINED, run.config.aggregator.name)
    health = _health(stages, rounds, scores[refined], thresholds[refined].instance) if refined in scores else None
    # Every model is frozen and every score computed: from here on test labels may be read.
    results = _measure_models(cohort, scores, thresholds, run.config)
    if cohort.has_instance_labels and of_features:
        for encoder in [name for name in ENCODERS if name in results]:
            results[encoder] |= _feature_quality(stages, encoder, cohort)
    results |= {
        "cohort": {"path": str(run.cohort), **describe_cohort(cohort)},
        "made_from": made_from,
        "aggregator": run.config.aggregator.name,
        "names": encoder_names(run.config),
        "seconds": training_seconds(read_metrics(run.path)),
    }
    if run.done("refine") is not None:
        results |= {"refine": best_round(rounds), "rounds": describe_rounds(rounds, cohort.split("train"))}
    if (run.path / HANDOVER_FILE).is_file():
        results["hand_over"] = read_json(run.path / HANDOVER_FILE)
    if health is not None:
        results["health"] = health
    if stages.engine.is_writer:
        write_predictions(run.path, cohort, scores, made_from)
        write_json(run.path / RESULTS_FILE, results)  # last: it says what the tables were made from
        if run.mlflow is not None:
            with run.mlflow.watched():
                run.mlflow.log(0, _scores_of(results))
    run.mark_done("evaluate", **notes)
    return results


def _score(stages: Stages, models: list[Model], unlabelled: Mapping[str, Cohort]) -> dict[Model, dict[str, Scores]]:
    """What every model says about every split; features are read once for all models of an encoder."""
    aggregators = {model: stages.aggregate(*model) for model in models}
    scores: dict[Model, dict[str, Scores]] = {model: {} for model in models}
    for encoder in dict.fromkeys(model.encoder for model in models):
        for name, part in unlabelled.items():
            features = stages.features(encoder, part)
            for model in models:
                if model.encoder == encoder:
                    scores[model][name] = Scores.of(aggregators[model], features)
    return scores


def _scores_of(results: Mapping[str, Any]) -> dict[str, float]:
    """The numbers about the test bags of every encoder, by one name each."""
    of_encoders = {f"test/{name}": results[name]["test"] for name in ENCODERS if "test" in results.get(name, {})}
    flat = flatten({**of_encoders, "comparison": results.get("comparison", {})})
    return {key: value for key, value in flat.items() if isinstance(value, float)}


def _measure_models(
    cohort: Cohort,
    scores: Mapping[Model, Mapping[str, Scores]],
    thresholds: Mapping[Model, Thresholds],
    config: RunConfig,
) -> dict[str, Any]:
    """Every model on the test bags, by encoder; and what the refinement added, with the run's own aggregator."""
    validation, test, own = cohort.split("val"), cohort.split("test"), config.aggregator.name
    resamples, seed = config.evaluation.bootstrap, config.seed
    results: dict[str, Any] = {}
    for model, parts in scores.items():
        found = measure(test, parts["test"], validation, parts["val"], resamples, seed)
        found["thresholds"] = thresholds[model]._asdict()
        entry = results.setdefault(model.encoder, {})
        if model.aggregator == own:
            entry["test"] = found
        else:
            entry.setdefault("aggregators", {})[model.aggregator] = found
    start, refined = Model(START, own), Model(REFINED, own)
    if start in scores and refined in scores:
        difference, interval = bag_auc_difference(
            test.bags["label"].to_numpy(dtype=np.int64),
            scores[refined]["test"].bags,
            scores[start]["test"].bags,
            resamples=resamples,
            seed=seed,
            groups=test.bags["group"],
        )
        results["comparison"] = {"bag_auc_difference": difference, "bag_auc_difference_interval": list(interval)}
    return results


def measure(
    cohort: Cohort, scores: Scores, validation: Cohort, validation_scores: Scores, resamples: int, seed: int
) -> dict[str, Any]:
    """Bag metrics and, where there is instance ground truth, instance metrics; mean and spread over retrainings.

    What a metric needs beyond the scores (a threshold, the settings of Dice) comes from the validation bags. Each
    retraining is measured alone, at its own threshold; the model's one decision, on their mean, is
    `decisions.Thresholds`.
    """
    labels = cohort.bags["label"].to_numpy(dtype=np.int64)
    validation_labels = validation.bags["label"].to_numpy(dtype=np.int64)
    thresholds = [balanced_accuracy_threshold(validation_labels, one) for one in validation_scores.bags]
    bag = summarise(
        [
            {**bag_metrics(labels, one, threshold), "threshold": threshold}
            for one, threshold in zip(scores.bags, thresholds, strict=True)
        ]
    )
    groups = cohort.bags["group"]
    intervals = bag_metric_intervals(labels, scores.bags, thresholds, resamples=resamples, seed=seed, groups=groups)
    found: dict[str, Any] = {
        "bag_auc": bag["auc"]["mean"],
        "bag_auc_std": bag["auc"]["std"],
        "bag_auc_interval": list(intervals["auc"]),
        "bag": bag,
        "bag_intervals": {name: list(interval) for name, interval in intervals.items()},
    }
    if cohort.has_instance_labels and both_classes(cohort.instance_labels()):
        truth = cohort.instance_labels()
        known = validation.instance_labels()
        references: list[tuple[Any, ...]] = [()] * len(scores.instances)
        if both_classes(known):
            references = [(known, other) for other in validation_scores.instances]
        instance = summarise(
            [
                instance_metrics(truth, one, *reference)
                for one, reference in zip(scores.instances, references, strict=True)
            ]
        )
        interval = instance_auc_interval(
            truth, scores.instances, cohort.offsets(), resamples=resamples, seed=seed, groups=groups
        )
        found |= {
            "instance_auc": instance["auc"]["mean"],
            "instance_auc_std": instance["auc"]["std"],
            "instance_auc_interval": list(interval),
            "instance": instance,
        }
    return found


def _feature_quality(stages: Stages, encoder: str, cohort: Cohort) -> dict[str, Any]:
    """How well an encoder's features part the classes: class separation, and a linear probe on true labels."""
    parts = {name: cohort.split(name) for name in SPLITS}
    truth = {name: part.instance_labels() for name, part in parts.items()}
    if not all(both_classes(labels) for labels in truth.values()):
        return {}
    features = {
        name: stages.features(encoder, part.without_labels()).features.cpu().numpy() for name, part in parts.items()
    }
    probe = linear_probe(features["train"], truth["train"], features["val"], truth["val"])
    metrics = linear_probe_metrics(
        probe,
        features["test"],
        truth["test"],
        parts["test"].offsets(),
        parts["test"].bags["label"].to_numpy(dtype=np.int64),
        features["val"],
        truth["val"],
    )
    separation = {name: class_separation(features[name], truth[name])._asdict() for name in ("train", "test")}
    return {"class_separation": separation, "linear_probe": {**metrics, "c": probe.c}}


def _health(stages: Stages, rounds: list[Round], final: Mapping[str, Scores], threshold: float) -> dict[str, Any]:
    """What the labels of training and validation bags tell about the pseudo labels: of each round, and at the end."""
    train, validation = stages.context.train, stages.context.validation
    config = stages.config.refine
    report = rounds_health(rounds, train.labels, train.offsets, config.threshold)
    last = health_report([final["train"].instances], train.labels, train.offsets, [threshold])
    of_bag = validation.labels[validation.bag_of_instance]
    witness_rate = estimate_witness_rate(final["val"].instance_probability, of_bag)
    retries = read_retries(stages.run.path)
    stuck = bool(retries) or ended_stuck("refine", read_metrics(stages.run.path))
    aucs, improved = zip(*((one.metrics["validation_auc"], one.metrics["improved"]) for one in rounds), strict=True)
    kept = start_kept(aucs, improved, advice("refine") if stuck else None)
    warnings = [*map(said_retry, retries), *([] if kept is None else [kept]), *warnings_of(last)]
    found = {"final": last["rounds"][0], "witness_rate": witness_rate, "retries": retries, "warnings": warnings}
    return {**report, **found}
