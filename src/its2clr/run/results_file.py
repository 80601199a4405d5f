"""`results.json`: what stands in it beside the measurements (cohort, rounds, health, time), and how to read it."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from its2clr.cohort import Cohort
from its2clr.evaluation.arrays import both_classes
from its2clr.evaluation.health import HealthReport, health_report
from its2clr.evaluation.instances import pseudo_label_quality
from its2clr.evaluation.uncertainty import said_interval
from its2clr.files import damage_said, read_json
from its2clr.refine.remedies import RETRIES_FILE, Retry
from its2clr.run.names import ENCODERS
from its2clr.run.scores import Model


class Round(NamedTuple):
    """One round of the refinement, as its folder holds it.

    Attributes:
        metrics: The content of `metrics.json`.
        pseudo_labels: One row per training instance.
    """

    metrics: dict[str, Any]
    pseudo_labels: pd.DataFrame


def describe_cohort(cohort: Cohort) -> dict[str, Any]:
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


def read_rounds(run: Path) -> list[Round]:
    """The rounds of a run's refinement so far, in order."""
    folders = sorted(path.parent for path in (run / "rounds").glob("*/metrics.json"))
    return [Round(read_json(folder / "metrics.json"), _pseudo_labels(folder)) for folder in folders]


def _pseudo_labels(folder: Path) -> pd.DataFrame:
    path = folder / "pseudo_labels.parquet"
    with damage_said(f"{path}: is damaged", "restore it"):
        return pd.read_parquet(path)


def read_retries(run: Path) -> list[Retry]:
    """Every time that the run's refinement was stuck, and what it tried then."""
    path = run / RETRIES_FILE
    retries: list[Retry] = read_json(path, list) if path.is_file() else []
    return retries


def describe_rounds(rounds: list[Round], train: Cohort) -> list[dict[str, Any]]:
    """What each round found on the training bags; with ground truth also how good it was.

    `instance_auc` and `instance_max_f1` are of the round's instance probabilities, `precision` and `recall` of the
    pseudo-positives that the epoch after the round trains with.
    """
    truth = train.instance_labels() if train.has_instance_labels else None
    described = []
    for metrics, table in rounds:
        entry = dict(metrics)
        if truth is not None and both_classes(truth):
            quality = pseudo_label_quality(truth, table["probability"], table["selected"])
            entry |= {name: value for name, value in quality.items() if math.isfinite(value)}
        described.append(entry)
    return described


def rounds_health(
    rounds: list[Round], labels: NDArray[np.int64], offsets: NDArray[np.int64], threshold: float
) -> HealthReport:
    """What the labels of the training bags alone say about the pseudo labels of each round.

    Args:
        rounds: The rounds.
        labels: (bags,) labels of the training bags.
        offsets: (bags + 1,) where the instances of each bag begin.
        threshold: Threshold of a round that does not say its own.
    """
    probabilities = [table.filter(regex=r"^probability_\d+$").to_numpy().T for _, table in rounds]
    thresholds = [metrics.get("threshold", threshold) for metrics, _ in rounds]
    return health_report(probabilities, labels, offsets, thresholds)


def best_round(rounds: list[Round]) -> dict[str, Any]:
    """The round whose encoder was kept."""
    best = [metrics for metrics, _ in rounds if metrics["improved"]][-1]
    return {"best_epoch": best["epoch"], "best_validation_auc": best["validation_auc"]}


def training_seconds(metrics: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds of training by stage, over all starts of a run, from what it logged (`files.read_metrics`)."""
    seconds: dict[str, float] = {}
    for entry in metrics:
        seconds[entry["stage"]] = seconds.get(entry["stage"], 0.0) + entry.get("seconds", 0.0)
    return seconds


def measured(results: dict[str, Any], model: Model) -> dict[str, Any]:
    """What was measured of a model on the test bags; empty if it was not."""
    of_encoder = results.get(model.encoder, {})
    own = of_encoder.get("test") if model.aggregator == results.get("aggregator") else None
    found: dict[str, Any] = own or of_encoder.get("aggregators", {}).get(model.aggregator) or {}
    return found


def results_rows(results: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Rows of the closing table: model, test bag AUC, test instance AUC; each mean (deviation) [interval].

    A model that was trained once has no deviation.
    """
    rows = []
    for encoder in (name for name in ENCODERS if name in results):
        for aggregator in dict.fromkeys((results["aggregator"], *results[encoder].get("aggregators", {}))):
            if found := measured(results, Model(encoder, aggregator)):
                name = f"{results['names'][encoder]} + {aggregator}"
                rows.append((name, _cell(found, "bag_auc"), _cell(found, "instance_auc")))
    return rows


def _cell(found: dict[str, Any], metric: str) -> str:
    if metric not in found:
        return "-"
    deviation = found[f"{metric}_std"]
    shown = "" if deviation is None else f" ({deviation:.3f})"
    return f"{found[metric]:.3f}{shown} {said_interval(found[f'{metric}_interval'])}".rstrip()
