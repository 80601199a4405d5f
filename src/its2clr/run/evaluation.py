"""Evaluation of a finished run: the one place that reads test labels, after every model is frozen."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import expit

from its2clr.aggregators.trained import TrainedAggregators
from its2clr.bag_features import BagFeatures
from its2clr.cohort import Cohort
from its2clr.cohort.splits import SPLITS
from its2clr.config import RunConfig
from its2clr.errors import InputError
from its2clr.evaluation.arrays import both_classes
from its2clr.evaluation.bags import bag_auc_difference, bag_metric_intervals, bag_metrics
from its2clr.evaluation.features import class_separation, linear_probe, linear_probe_metrics
from its2clr.evaluation.health import estimate_witness_rate, health_report, start_kept, warnings_of
from its2clr.evaluation.instances import instance_auc_interval, instance_metrics, pseudo_label_quality
from its2clr.evaluation.thresholds import balanced_accuracy_threshold
from its2clr.evaluation.uncertainty import summarise
from its2clr.files import atomic_path, read_json, read_metrics, write_json
from its2clr.refine.rounds import threshold_by_rule
from its2clr.run.names import ENCODERS, REFINED, START, encoder_names
from its2clr.run.stages import Stages


@dataclass(frozen=True)
class Scores:
    """What S retrained aggregators say about the bags of one split.

    Attributes:
        bags: (S, B) bag probabilities.
        instances: (S, N) instance probabilities.
    """

    bags: NDArray[np.float64]
    instances: NDArray[np.float64]

    @classmethod
    def of(cls, trained: TrainedAggregators, features: BagFeatures) -> "Scores":
        """Scores as probabilities in float64, so that confident instances stay ranked.

        Bags go through the aggregators one at a time: the last bits of a result depend on what it is padded to, and a
        bag should have one score, whichever bags are beside it.
        """
        predictions = trained.predict(features, bags_per_batch=1)
        return cls(predictions.bag_probability, expit(predictions.instance_logit.astype(np.float64)))

    @property
    def bag_probability(self) -> NDArray[np.float64]:
        """(B,) mean over the retrainings."""
        return _mean(self.bags)

    @property
    def instance_probability(self) -> NDArray[np.float64]:
        """(N,) mean over the retrainings."""
        return _mean(self.instances)


def _mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean of the rows, added one after the other: numpy's own mean adds in another order where there is one column."""
    total = np.zeros(values.shape[1])
    for row in values:
        total += row
    return total / len(values)


def evaluate(stages: Stages, *, of_features: bool = True) -> dict[str, Any]:
    """Measure every trained pair of encoder and aggregator on the test bags, and write what was found into the run.

    Leaves `results.json`, `predictions.parquet` (one row per instance and pair) and `bag_predictions.csv`; these hold
    all splits. Does nothing but read when it was done before and nothing was trained since.

    Args:
        stages: The run.
        of_features: Whether class separation and linear probe are measured too; the probe takes a while.

    Returns:
        The content of `results.json`.

    Raises:
        InputError: No aggregator is trained yet.
    """
    run = stages.run
    pairs = stages.trained()
    if not pairs:
        raise InputError(f"{run.path}: nothing to evaluate yet; run `its2clr fit` or `its2clr aggregate` on it first")
    done = run.done("evaluate") or {}
    of_features = of_features or done.get("of_features", False)
    notes = {"models": [" ".join(pair) for pair in pairs], "of_features": of_features, "splits": list(SPLITS)}
    if done == notes:
        stages.engine.say("evaluate: already done")
        results: dict[str, Any] = read_json(run.path / "results.json")
        return results
    cohort = Cohort.open(run.cohort)
    run.check_cohort(cohort.tile_size)
    unlabelled = {name: cohort.split(name).without_labels() for name in SPLITS}
    scores = {pair: {name: predict(stages, *pair, part) for name, part in unlabelled.items()} for pair in pairs}
    own = run.config.aggregator.name
    refined = (REFINED, own) in pairs
    health = _health(stages, scores[REFINED, own]) if refined else None
    # Every model is frozen and every score written down: from here on test labels may be read.
    validation, test = cohort.split("val"), cohort.split("test")
    config = run.config.evaluation
    results = {}
    for (encoder, aggregator), parts in scores.items():
        found = measure(test, parts["test"], validation, parts["val"], config.bootstrap, run.config.seed)
        entry = results.setdefault(encoder, {})
        if aggregator == own:
            entry["test"] = found
        else:
            entry.setdefault("aggregators", {})[aggregator] = found
    if (START, own) in pairs and refined:
        refined_scores, start_scores = scores[REFINED, own]["test"], scores[START, own]["test"]
        results["comparison"] = _comparison(test, refined_scores, start_scores, run.config)
    if cohort.has_instance_labels and of_features:
        for encoder in [name for name in ENCODERS if name in results]:
            results[encoder] |= represent_quality(stages, encoder, cohort)
    results |= {
        "cohort": {"path": str(run.cohort), **describe(cohort)},
        "aggregator": own,
        "names": encoder_names(run.config),
        "seconds": training_seconds(run.path),
    }
    if run.done("refine") is not None:
        results |= {"refine": _best_round(run.path), "rounds": _rounds(stages, cohort.split("train"))}
    if health is not None:
        results["health"] = health
    if stages.engine.is_writer:
        write_json(run.path / "results.json", results)
        _write_predictions(run.path, cohort, scores)
    run.mark_done("evaluate", **notes)
    return results


def predict(stages: Stages, encoder: str, aggregator: str, cohort: Cohort) -> Scores:
    """Scores of an encoder's trained aggregators for the bags of a cohort."""
    trained = stages.aggregate(encoder, aggregator)
    return Scores.of(trained, stages.features(encoder, cohort))


def measure(
    cohort: Cohort, scores: Scores, validation: Cohort, validation_scores: Scores, resamples: int, seed: int
) -> dict[str, Any]:
    """Bag metrics and, where there is instance ground truth, instance metrics; mean and spread over retrainings.

    What a metric needs beyond the scores (a threshold, the settings of Dice) comes from the validation bags.
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
    intervals = bag_metric_intervals(labels, scores.bags, thresholds, resamples=resamples, seed=seed)
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
        interval = instance_auc_interval(truth, scores.instances, cohort.offsets(), resamples=resamples, seed=seed)
        found |= {
            "instance_auc": instance["auc"]["mean"],
            "instance_auc_std": instance["auc"]["std"],
            "instance_auc_interval": list(interval),
            "instance": instance,
        }
    return found


def _comparison(cohort: Cohort, refined: Scores, start: Scores, config: RunConfig) -> dict[str, Any]:
    """How much the refinement added to the bag AUC, on the same test bags, with the run's own aggregator."""
    labels = cohort.bags["label"].to_numpy(dtype=np.int64)
    difference, interval = bag_auc_difference(
        labels, refined.bags, start.bags, resamples=config.evaluation.bootstrap, seed=config.seed
    )
    return {"bag_auc_difference": difference, "bag_auc_difference_interval": list(interval)}


def represent_quality(stages: Stages, encoder: str, cohort: Cohort) -> dict[str, Any]:
    """How well an encoder's features part the classes: class separation, and a linear probe on true labels."""
    parts = {name: cohort.split(name) for name in ("train", "val", "test")}
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


def describe(cohort: Cohort) -> dict[str, Any]:
    """Bags, positive bags and instances of every split; the witness rate where it is known."""
    splits = {
        str(name): {
            "bags": len(part),
            "positive_bags": int(part["label"].sum()),
            "instances": int(part["n_instances"].sum()),
        }
        for name, part in cohort.bags.groupby("split")
    }
    described: dict[str, Any] = {"splits": splits}
    if cohort.has_instance_labels:
        truth = cohort.instance_labels()
        in_positive = cohort.bags["label"].to_numpy()[cohort.bag_index()] == 1
        described["witness_rate"] = float((truth[in_positive & (truth >= 0)] == 1).mean())
    return described


def _round_tables(run: Path) -> list[tuple[dict[str, Any], pd.DataFrame]]:
    folders = sorted(path.parent for path in (run / "rounds").glob("*/metrics.json"))
    return [(read_json(f / "metrics.json"), pd.read_parquet(f / "pseudo_labels.parquet")) for f in folders]


def training_seconds(run: Path) -> dict[str, float]:
    """Seconds of training by stage, over all starts of the run."""
    seconds: dict[str, float] = {}
    for entry in read_metrics(run):
        seconds[entry["stage"]] = seconds.get(entry["stage"], 0.0) + entry.get("seconds", 0.0)
    return seconds


def _best_round(run: Path) -> dict[str, Any]:
    best = [found for found, _ in _round_tables(run) if found["improved"]][-1]
    return {"best_epoch": best["epoch"], "best_validation_auc": best["validation_auc"]}


def _rounds(stages: Stages, train: Cohort) -> list[dict[str, Any]]:
    """What each round found, on the training bags; with ground truth also how good it was.

    `instance_auc` and `instance_max_f1` are of the round's instance probabilities, `precision` and `recall` of the
    pseudo-positives that the epoch after the round trains with.
    """
    truth = train.instance_labels() if train.has_instance_labels else None
    rounds = []
    for metrics, table in _round_tables(stages.run.path):
        entry = dict(metrics)
        if truth is not None and both_classes(truth):
            quality = pseudo_label_quality(truth, table["probability"], table["selected"])
            entry |= {name: value for name, value in quality.items() if math.isfinite(value)}
        rounds.append(entry)
    return rounds


def _health(stages: Stages, final: dict[str, Scores]) -> dict[str, Any]:
    """What bag labels alone can tell about the pseudo labels, per round and for the final models."""
    train, validation = stages.context.train, stages.context.validation
    labels, offsets = train.labels, train.offsets
    tables = _round_tables(stages.run.path)
    probabilities = [table.filter(regex=r"^probability_\d+$").to_numpy().T for _, table in tables]
    thresholds = [found.get("threshold", stages.config.refine.threshold) for found, _ in tables]
    report = health_report(probabilities, labels, offsets, thresholds)
    own = threshold_by_rule(stages.config.refine, validation, final["val"].instance_probability)
    last = health_report([final["train"].instances], labels, offsets, [own])
    of_bag = validation.labels[validation.bag_of_instance]
    witness_rate = estimate_witness_rate(final["val"].instance_probability, of_bag)
    aucs = [found["validation_auc"] for found, _ in tables]
    kept = start_kept(aucs, [found["improved"] for found, _ in tables])
    warnings = [*([] if kept is None else [kept]), *warnings_of(last)]
    return {**report, "final": last["rounds"][0], "witness_rate": witness_rate, "warnings": warnings}


def _write_predictions(run: Path, cohort: Cohort, scores: dict[tuple[str, str], dict[str, Scores]]) -> None:
    tables, bag_tables = [], []
    for split in SPLITS:
        part = cohort.split(split)
        places = _places(part)
        for (encoder, aggregator), of_split in scores.items():
            found = of_split[split]
            model = {"encoder": encoder, "aggregator": aggregator}
            bag_probability = found.bag_probability
            tables.append(
                places.assign(
                    **model,
                    probability=found.instance_probability,
                    bag_probability=bag_probability[part.bag_index()],
                )
            )
            bag_tables.append(
                part.bags[["bag_id", "label", "split", "group"]].assign(**model, probability=bag_probability)
            )
    with atomic_path(run / "predictions.parquet") as temporary:
        pd.concat(tables).to_parquet(temporary, index=False)
    with atomic_path(run / "bag_predictions.csv") as temporary:
        pd.concat(bag_tables).to_csv(temporary, index=False)


def _places(cohort: Cohort) -> pd.DataFrame:
    """One row per instance: where it is, and its ground truth (-1: unknown)."""
    bag, coords = cohort.bag_index(), cohort.coords()
    return pd.DataFrame(
        {
            "split": cohort.bags["split"].to_numpy()[bag],
            "bag_id": cohort.bags["bag_id"].to_numpy()[bag],
            "instance": np.arange(len(bag)) - cohort.offsets()[bag],
            "name": cohort.names(),
            "x": coords[:, 0],
            "y": coords[:, 1],
            "label": cohort.instance_labels() if cohort.has_instance_labels else np.full(len(bag), -1, np.int8),
        }
    )


def results_rows(results: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Rows of the closing table: model, test bag AUC, test instance AUC; each mean (deviation) [interval]."""
    names = results["names"]
    rows = []
    for encoder in (name for name in ENCODERS if name in results):
        found = {results["aggregator"]: results[encoder].get("test")} | results[encoder].get("aggregators", {})
        rows += [
            (f"{names[encoder]} + {aggregator}", _cell(entry, "bag_auc"), _cell(entry, "instance_auc"))
            for aggregator, entry in found.items()
            if entry is not None
        ]
    return rows


def _cell(found: dict[str, Any], metric: str) -> str:
    if metric not in found:
        return "-"
    low, high = found[f"{metric}_interval"]
    return f"{found[metric]:.3f} ({found[f'{metric}_std']:.3f}) [{low:.3f}, {high:.3f}]"
