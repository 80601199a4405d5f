"""What the figures of a report show: curves, bins and lines of the models, and tile features in a plane."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from numpy.typing import NDArray

from its2clr.cohort.features.feature_file import feature_path
from its2clr.evaluation.arrays import both_classes
from its2clr.evaluation.thresholds import every_cut
from its2clr.hdf5 import open_hdf5
from its2clr.report import figures
from its2clr.report.figures import Curve, Line, Panel, Reliability
from its2clr.report.run_facts import Decisions, Scored
from its2clr.run.names import STAGE_OF

MOST_MODELS = len(figures.COLOURS)
"""Models of one figure; more could not be told apart."""
PANELS_ABREAST = 3
"""Models of a figure that has one panel for each."""
MOST_POINTS = 300
"""Of a curve on the page; more cannot be seen."""
MOST_INSTANCES = 3000
MOST_BAGS = 200
FEW = 10
"""With fewer instances of a class, the components are those of all instances."""


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
    bins = {scored.name: reliability(*scored.split("test")) for scored in models[:PANELS_ABREAST]}
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
    for stage in STAGE_OF.values():
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


def roc(labels: NDArray[np.int64], scores: NDArray[np.float64]) -> Curve:
    """Sensitivity over the share of false alarms; area: AUC."""
    cuts = every_cut(labels, scores)
    false_rate = np.append(0.0, cuts.false_positives / cuts.negatives)
    true_rate = np.append(0.0, cuts.true_positives / cuts.positives)
    return Curve(*_thinned(*_corners(false_rate, true_rate)), cuts.auc)


def precision_recall(labels: NDArray[np.int64], scores: NDArray[np.float64]) -> Curve:
    """Precision over recall, from high recall to low; area: average precision."""
    cuts = every_cut(labels, scores)
    precision = cuts.true_positives / (cuts.true_positives + cuts.false_positives)
    recall = cuts.true_positives / cuts.positives
    curve = _corners(np.append(recall[::-1], 0.0), np.append(precision[::-1], 1.0))
    return Curve(*_thinned(*curve), cuts.average_precision)


def reliability(labels: NDArray[np.int64], probabilities: NDArray[np.float64]) -> list[Reliability]:
    """How often bags with about the same predicted probability were positive; five bins, ten from 200 bags on."""
    bins = 10 if labels.size >= 200 else 5
    place = np.minimum((probabilities * bins).astype(np.int64), bins - 1)
    found = []
    for number in np.unique(place):
        inside = place == number
        count, positive = int(inside.sum()), int(labels[inside].sum())
        mean = float(probabilities[inside].mean())
        found.append(Reliability(mean, positive / count, *_wilson(positive / count, count), count))
    return found


def _wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share."""
    z = NormalDist().inv_cdf(0.975)
    middle = share + z**2 / (2 * count)
    reach = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    low, high = ((middle + way * reach) / (1 + z**2 / count) for way in (-1, 1))
    return max(low, 0.0), min(high, 1.0)


@dataclass(frozen=True, eq=False)
class Embedding:
    """The same instances as several encoders see them.

    Attributes:
        places: Encoder -> (n, 2) two principal components of its features.
        shares: Encoder -> (2,) share of the variance on each.
        classes: (n,) ground truth, or the label of the bag where there is none; -1 for unknown.
        of_truth: Whether `classes` is ground truth.
        bags: How many bags the instances come from.
    """

    places: dict[str, NDArray[np.float64]]
    shares: dict[str, NDArray[np.float64]]
    classes: NDArray[np.int64]
    of_truth: bool
    bags: int


def embed(run: Path, encoders: list[str], instances: pd.DataFrame, bag_labels: dict[str, int]) -> Embedding | None:
    """Place a sample of the test instances in a plane; None where a feature file is missing.

    Each encoder has a plane of its own, since its features are a space of their own. The components are fitted on as
    many instances of one class as of the other: few positives would not show in the variance of all.

    Args:
        run: Folder of the run.
        encoders: Whose features.
        instances: `bag_id`, `instance` and `label` of the test instances.
        bag_labels: Label of every test bag.
    """
    chosen = _sample(instances)
    there = [encoder for encoder in encoders if _all_there(run, encoder, chosen)]
    if not there or len(chosen) < 3:
        return None
    truth = chosen["label"].to_numpy(dtype=np.int64)
    of_truth = bool((instances["label"] >= 0).any())
    classes = truth if of_truth else np.array([bag_labels[bag] for bag in chosen["bag_id"]], dtype=np.int64)
    places, shares = {}, {}
    for encoder in there:
        features = _features(run, encoder, chosen)
        places[encoder], shares[encoder] = in_plane(features, _balanced(classes))
    return Embedding(places, shares, classes, of_truth, int(chosen["bag_id"].nunique()))


def in_plane(
    features: NDArray[np.float64], fitted: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The two largest principal components of features, and the share of the variance on each.

    Args:
        features: (n, D) features.
        fitted: The rows whose components they are.
    """
    middle = features[fitted].mean(axis=0)
    variances, axes = np.linalg.eigh(np.cov(features[fitted], rowvar=False, ddof=1).reshape(features.shape[1], -1))
    plane = axes[:, :-3:-1]  # the last two, the largest first
    signs = np.sign(plane[np.abs(plane).argmax(axis=0), np.arange(plane.shape[1])])  # a component has no direction
    shares = variances[:-3:-1] / max(float(variances.sum()), np.finfo(np.float64).tiny)
    return (features - middle) @ (plane * signs), shares


def _rates(name: str, what: str, pairs: dict[str, Any]) -> Markup | None:
    pairs = {model: pair for model, pair in pairs.items() if both_classes(pair[0])}
    if not pairs:
        return None
    labels = next(iter(pairs.values()))[0]
    return figures.rates(
        name,
        what,
        {model: roc(*pair) for model, pair in pairs.items()},
        {model: precision_recall(*pair) for model, pair in pairs.items()},
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


def _corners(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The points of a curve without those between two others on one upright or level line."""
    same = [np.diff(values) == 0 for values in (x, y)]
    between = (same[0][:-1] & same[0][1:]) | (same[1][:-1] & same[1][1:])
    kept = np.concatenate([[True], ~between, [True]])
    return x[kept], y[kept]


def _thinned(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """At most `MOST_POINTS` of the points, evenly along the curve, with both ends."""
    if x.size <= MOST_POINTS:
        return x, y
    way = np.concatenate([[0.0], np.cumsum(np.hypot(np.diff(x), np.diff(y)))])
    wanted = np.linspace(0.0, way[-1], MOST_POINTS)
    chosen = np.unique(np.minimum(np.searchsorted(way, wanted), x.size - 1))
    chosen = np.union1d(chosen, [0, x.size - 1])
    return x[chosen], y[chosen]


def _sample(instances: pd.DataFrame) -> pd.DataFrame:
    generator = np.random.default_rng(0)
    bags = instances["bag_id"].unique()
    if len(bags) > MOST_BAGS:
        bags = generator.choice(np.asarray(bags, dtype=object), MOST_BAGS, replace=False)
        instances = instances[instances["bag_id"].isin(list(bags))]
    if len(instances) > MOST_INSTANCES:
        instances = instances.iloc[np.sort(generator.choice(len(instances), MOST_INSTANCES, replace=False))]
    return instances


def _balanced(classes: NDArray[np.int64]) -> NDArray[np.int64]:
    """As many rows of one class as of the other; all rows where one class has too few."""
    positive, negative = np.flatnonzero(classes == 1), np.flatnonzero(classes == 0)
    count = min(positive.size, negative.size)
    if count < FEW:
        return np.arange(classes.size)
    generator = np.random.default_rng(1)
    return np.concatenate([generator.choice(rows, count, replace=False) for rows in (positive, negative)])


def _all_there(run: Path, encoder: str, chosen: pd.DataFrame) -> bool:
    return all(feature_path(run / "features" / encoder, bag).is_file() for bag in chosen["bag_id"].unique())


def _features(run: Path, encoder: str, chosen: pd.DataFrame) -> NDArray[np.float64]:
    parts = []
    for bag, rows in chosen.groupby("bag_id", sort=False)["instance"]:
        with open_hdf5(feature_path(run / "features" / encoder, str(bag))) as file:
            parts.append(np.asarray(file["features"][np.sort(rows.to_numpy())], dtype=np.float64))
    return np.concatenate(parts)
