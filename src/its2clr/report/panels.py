"""Which lines go into which figure of a report."""

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from its2clr.evaluation.arrays import both_classes
from its2clr.report import curves, figures
from its2clr.report.collect import Scored
from its2clr.report.curves import Decisions
from its2clr.report.figures import Line, Panel

MOST_MODELS = len(figures.COLOURS)
"""Models of one figure; more could not be told apart."""
PANELS_ABREAST = 3
"""Models of a figure that has one panel for each."""


def interval_figure(models: Sequence[Scored]) -> Markup | None:
    """Bag and instance AUC of every model with their intervals."""
    shown = [scored for scored in models if "bag_auc" in scored.found][:MOST_MODELS]
    if not shown:
        return None
    metrics = {"test bag AUC": [_interval(scored, "bag_auc") for scored in shown]}
    if any("instance_auc" in scored.found for scored in shown):
        metrics["test instance AUC"] = [_interval(scored, "instance_auc") for scored in shown]
    return figures.intervals([scored.name for scored in shown], metrics)


def bag_curves(models: Sequence[Scored]) -> Markup | None:
    """ROC, precision and recall of the test bags."""
    pairs = {scored.name: scored.split("test") for scored in models[:MOST_MODELS]}
    return _rates("bag-curves", "test bags", pairs)


def instance_curves(models: Sequence[Scored]) -> Markup | None:
    """ROC, precision and recall of the test instances of known ground truth."""
    known = {scored.name: scored.known_instances() for scored in models[:MOST_MODELS]}
    return _rates("instance-curves", "test instances", {name: pair for name, pair in known.items() if pair is not None})


def calibration(models: Sequence[Scored]) -> Markup | None:
    """Reliability of the bag probabilities."""
    bins = {scored.name: curves.reliability(*scored.split("test")) for scored in models[:PANELS_ABREAST]}
    bins = {name: found for name, found in bins.items() if found}
    return figures.calibration(bins) if bins else None


def distributions(models: Sequence[Scored], called: dict[str, Decisions]) -> Markup | None:
    """Bag probabilities of both classes, and the threshold."""
    shown = [scored for scored in models if scored.name in called][:PANELS_ABREAST]
    if not shown:
        return None
    scores = {scored.name: scored.split("test")[::-1] for scored in shown}
    thresholds = {scored.name: called[scored.name].threshold for scored in shown}
    return figures.distributions({name: (found[0], found[1]) for name, found in scores.items()}, thresholds)


def rounds(found: Sequence[dict[str, Any]]) -> Markup:
    """How validation, pseudo labels and their health went from round to round."""
    kept = [not one.get("pseudo_labels_replaced", True) for one in found]
    panels = [
        Panel("validation bag AUC", "epoch", _lines(found, {"validation_auc": "AUC"}), hollow=kept),
        Panel(
            "pseudo labels against truth", "epoch",
            _lines(found, {"instance_auc": "AUC", "instance_max_f1": "max F1"}), unit=True,
        ),
        Panel(
            "pseudo-positives used", "epoch", _lines(found, {"precision": "precision", "recall": "recall"}), unit=True
        ),
        Panel(
            "shares of instances", "epoch",
            _lines(found, {
                "positive_share": "positive, in positive bags",
                "false_positive_share": "positive, in negative bags",
                "churn": "flipped since last round",
            }),
        ),
    ]  # fmt: skip
    shown = [panel for panel in panels if panel.lines]
    return figures.lines("rounds-figure", "Per round: " + ", ".join(panel.title for panel in shown), shown)


def training(metrics: Sequence[dict[str, Any]]) -> Markup | None:
    """Loss and spread (or validation AUC) per epoch of every stage."""
    panels = []
    for stage in ("pretrain", "refine", "end_to_end"):
        entries = [entry for entry in metrics if entry["stage"] == stage]
        name = stage.replace("_", " ")
        if losses := _lines(entries, {"loss": "loss"}):
            limits = [entry["collapsed_loss"] for entry in entries if "collapsed_loss" in entry]
            limit = ("one point", limits[-1]) if limits else None
            panels.append(Panel(f"{name}: loss", "epoch", losses, limit=limit))
        if spreads := _lines(entries, {"spread": "spread"}):
            panels.append(Panel(f"{name}: spread of embeddings", "epoch", spreads))
        checks = [entry for entry in metrics if entry["stage"] == f"{stage}_check"]
        if validation := _lines([*entries, *checks], {"validation_auc": "validation"}):
            panels.append(Panel(f"{name}: validation bag AUC", "epoch", validation))
    if not panels:
        return None
    return figures.lines("training-figure", "Per epoch: " + ", ".join(panel.title for panel in panels), panels)


def _rates(name: str, what: str, pairs: dict[str, Any]) -> Markup | None:
    pairs = {model: pair for model, pair in pairs.items() if both_classes(pair[0])}
    if not pairs:
        return None
    labels = next(iter(pairs.values()))[0]
    return figures.rates(
        name,
        what,
        {model: curves.roc(*pair) for model, pair in pairs.items()},
        {model: curves.precision_recall(*pair) for model, pair in pairs.items()},
        float(labels.mean()),
    )


def _interval(scored: Scored, metric: str) -> tuple[float, float, float] | None:
    if metric not in scored.found:
        return None
    low, high = scored.found[f"{metric}_interval"]
    return scored.found[metric], low, high


def _lines(entries: Sequence[dict[str, Any]], names: dict[str, str]) -> list[Line]:
    """One line per key that any entry has; the epochs where it is defined."""
    lines = []
    for key, name in names.items():
        points = [
            (entry["epoch"], entry[key])
            for entry in entries
            if entry.get(key) is not None and math.isfinite(entry[key])
        ]
        if points:
            x, y = zip(*points, strict=True)
            lines.append(Line(name, x, y))
    return lines
