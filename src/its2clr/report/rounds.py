"""The rounds of a refinement with what is known of each: as evaluated, or while it still goes, from training bags."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from its2clr.cohort import Cohort
from its2clr.evaluation.arrays import both_classes
from its2clr.evaluation.health import HealthReport, health_report, warnings_of
from its2clr.evaluation.instances import pseudo_label_quality
from its2clr.files import read_json


def rounds_of_results(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Rounds as `results.json` has them, quality and health together."""
    health = results.get("health", {}).get("rounds", [])
    rounds = results.get("rounds", [])
    healthy = health if len(health) == len(rounds) else [{}] * len(rounds)
    return [{**of_health, **found} for found, of_health in zip(rounds, healthy, strict=True)]


def rounds_of_training(run: Path, cohort: Cohort | None) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Rounds of a run that was not evaluated, and its health; nothing of the test bags is looked at.

    Args:
        run: Folder of the run.
        cohort: Its training and validation bags; None leaves what needs their labels out.
    """
    folders = sorted(path.parent for path in run.glob("rounds/*/metrics.json"))
    rounds = [dict(read_json(folder / "metrics.json")) for folder in folders]
    if cohort is None or not rounds:
        return rounds, None
    train = cohort.split("train")
    tables = [pd.read_parquet(folder / "pseudo_labels.parquet") for folder in folders]
    seeds = [table.filter(regex=r"^probability_\d+$").to_numpy().T for table in tables]
    labels = train.bags["label"].to_numpy(dtype=np.int64)
    report = health_report(seeds, labels, train.offsets(), [found["threshold"] for found in rounds])
    truth = train.instance_labels() if train.has_instance_labels else None
    for number, (found, table) in enumerate(zip(rounds, tables, strict=True)):
        quality = {}
        if truth is not None and both_classes(truth):
            quality = pseudo_label_quality(truth, table["probability"], table["selected"])
        rounds[number] = {**report["rounds"][number], **found, **quality}
    return rounds, _health(report)


def _health(report: HealthReport) -> dict[str, Any]:
    return {**report, "final": report["rounds"][-1], "warnings": warnings_of(report)}
