"""Predictions for new bags measured against their labels, which prediction never saw: external validation."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from its2clr.cohort.layout import PROBLEMS_FILE
from its2clr.cohort.tables import (
    Problem,
    at_row,
    check_bag_ids,
    parse_bag_labels,
    parse_instance_labels,
    raise_problems,
    read_columns,
)
from its2clr.errors import InputError
from its2clr.evaluation.arrays import UNKNOWN
from its2clr.evaluation.bags import BAG_METRICS, bag_metric_intervals, bag_metrics
from its2clr.evaluation.instances import instance_auc_interval, instance_metrics
from its2clr.evaluation.uncertainty import has_spread, said_interval
from its2clr.predict.prediction_folder import INSTANCES, PREDICTIONS, read_predictions, read_sources
from its2clr.predict.seen_bags import said_seen, seen_in_training
from its2clr.version import __version__
from its2clr.wording import shortened

_LISTED = 5
_COUNTED = {"sensitivity": "positive", "specificity": "negative"}  # metrics that are a share of these bags


def score(
    predictions: str | Path,
    bags: str | Path,
    instances: str | Path | None = None,
    split: str | None = None,
    *,
    annotations: str | Path | None = None,
    classes: Sequence[str] = (),
    positive: Collection[str] = (),
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure predictions on the bags that have both a prediction and a label.

    Args:
        predictions: Folder of what `its2clr predict` wrote.
        bags: Table with `bag_id` and `label`.
        instances: Table with `bag_id`, `file` and `label`; `file` as in the table that the images were packed with.
        split: Only bags with this value in column `split`.
        annotations: Folder of the annotations of slides, in place of `instances`: for each bag a file of its name.
        classes: Annotated classes that count as tumour; none: those that are known to.
        positive: Labels in words that mean 1; none: labels are 0 and 1.
        resamples: Bootstrap resamples of bags.
        seed: Seed of the resamples.

    Returns:
        The content of `scores.json`: `bag` with the metrics of `BAG_METRICS`, decisions being made at the model's
        `threshold`, and `brier` of the calibrated probabilities; `bag_intervals` of all but the last, None where every
        resample gives the same; `bags`, how many there are and which were left out; `seen_in_training`, by split the
        bags that the model was trained, validated or tested on. With instances or annotations `instance`,
        `instance_intervals` and `instances` too.

    Raises:
        InputError: The folder holds no predictions, a table is wrong, or the bags in both are not of both classes.
    """
    folder, table = Path(predictions), Path(bags)
    described, predicted = read_predictions(folder)
    labelled = _read_labels(table, split, positive)
    shared = predicted.index.intersection(labelled.index, sort=False)
    if shared.empty:
        raise InputError(
            f"{table}: none of its {len(labelled)} bags was predicted; bag_id is {labelled.index[0]!r} there and "
            f"{predicted.index[0]!r} in {folder / PREDICTIONS}"
        )
    labels, scored = labelled[shared].to_numpy(), predicted.loc[shared]
    _require_both_classes(labels, table, "predicted bags")
    probability = scored["probability"].to_numpy()
    threshold = described["threshold"]
    intervals = bag_metric_intervals(labels, probability, [threshold], resamples=resamples, seed=seed)
    found: dict[str, Any] = {
        "its2clr": __version__,
        "model": described["model"],
        "threshold": threshold,
        "predictions": str(folder),
        "table": str(table),
        "split": split,
        "bags": {
            **_counts(labels),
            "not_predicted": labelled.index.difference(shared, sort=False).tolist(),
            "without_label": predicted.index.difference(shared, sort=False).tolist(),
        },
        "bag": {
            **bag_metrics(labels, probability, threshold),
            "brier": float(np.mean((scored["calibrated_probability"].to_numpy() - labels) ** 2)),
        },
        "bag_intervals": {name: _known(interval) for name, interval in intervals.items()},
        "seen_in_training": seen_in_training(folder, set(shared)),
    }
    if instances is not None and annotations is not None:
        raise InputError("give labels of instances as --instances or as --annotations, not both")
    if instances is not None:
        truth = _read_instance_labels(Path(instances), set(shared))
        found |= _score_instances(folder, shared.tolist(), resamples, seed, partial(_by_name, truth, Path(instances)))
    if annotations is not None:
        from its2clr.cohort.slides.classes import check_chosen_classes
        from its2clr.predict.annotated import annotated_labels, annotations_of

        files = annotations_of(Path(annotations), shared.tolist())
        check_chosen_classes(files.values(), classes)
        by_place = partial(
            annotated_labels, labels=labelled[shared], sources=read_sources(folder), files=files, classes=classes
        )
        found |= _score_instances(folder, shared.tolist(), resamples, seed, by_place)
    return found


def score_rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Rows of the closing table: what is measured, of bags, and of instances where they were."""
    parts = [name for name in ("bag", "instance") if name in found]
    titles = {name: metric.title for name, metric in BAG_METRICS.items()} | {"brier": "Brier score, calibrated"}
    rows = [(title, *(_cell(found, part, metric) for part in parts)) for metric, title in titles.items()]
    rows += [(count, *(str(found[f"{part}s"][count]) for part in parts)) for count in ("positive", "negative")]
    return rows


def score_notes(found: dict[str, Any]) -> list[str]:
    """What a person should know about the numbers: the threshold, and what was left out."""
    table = found["table"] if found["split"] is None else f"{found['table']} (split {found['split']})"
    notes = [
        f"called positive from a probability of {found['threshold']:.3f} on, chosen on the model's validation bags"
    ]
    missing = [name for name, interval in found["bag_intervals"].items() if interval is None]
    if missing:
        bags = f"{found['bags']['positive']} positive and {found['bags']['negative']} negative bags"
        notes.append(f"no interval for {', '.join(missing)}: with these {bags}, every resample gives the same value")
    notes += said_seen(found["seen_in_training"])
    not_predicted, without_label = found["bags"]["not_predicted"], found["bags"]["without_label"]
    if not_predicted:
        tried = f"for those that were tried, {Path(found['predictions']) / PROBLEMS_FILE} says why"
        notes.append(
            f"{len(not_predicted)} bags of {table} have no prediction: {shortened(not_predicted, _LISTED)}; {tried}"
        )
    if without_label:
        notes.append(
            f"{len(without_label)} predicted bags have no label in {table}: {shortened(without_label, _LISTED)}"
        )
    if found.get("instances", {}).get("without_label"):
        notes.append(f"{found['instances']['without_label']} instances of these bags have no label and were left out")
    return notes


def _read_labels(path: Path, split: str | None, positive: Collection[str]) -> "pd.Series[int]":
    """The label of each bag of a table, or of one split of it."""
    table = read_columns(path, ["bag_id", "label", *([] if split is None else ["split"])])
    if split is not None:
        there = sorted(set(table["split"]))
        table = table[table["split"] == split]
        if table.empty:
            raise InputError(f"{path}: no bag is in split {split!r}; column split has {', '.join(map(repr, there))}")
    if table.empty:
        raise InputError(f"{path}: there are no bags below the header")
    problems: list[Problem] = []
    check_bag_ids(table, path, problems)
    labels = parse_bag_labels(table, path, problems, positive)
    raise_problems(problems)
    return pd.Series(labels, index=pd.Index(table["bag_id"].tolist(), dtype=object))


def _score_instances(
    folder: Path, bag_ids: list[str], resamples: int, seed: int, label: Callable[[pd.DataFrame], list[int]]
) -> dict[str, Any]:
    """Measure instances; `label` gives the ground truth of each of a table of predicted ones."""
    try:
        predicted = pd.read_parquet(folder / INSTANCES)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / INSTANCES}: cannot be read ({error}); run `its2clr predict` again") from error
    predicted = predicted[predicted["bag_id"].isin(bag_ids)].sort_values("bag_id", kind="stable")
    predicted = predicted.assign(label=label(predicted))
    known = predicted[predicted["label"] != UNKNOWN]
    labels, probability = known["label"].to_numpy(), known["probability"].to_numpy()
    if known.empty:
        raise InputError(f"{folder}: no predicted instance has a known label")
    _require_both_classes(labels, folder, "predicted instances")
    offsets = np.concatenate([[0], np.cumsum(known.groupby("bag_id", sort=False).size())])
    interval = instance_auc_interval(labels, probability, offsets, resamples=resamples, seed=seed)
    metrics = instance_metrics(labels, probability)
    return {
        "instances": {**_counts(labels), "without_label": len(predicted) - len(known)},
        "instance": {name: metrics[name] for name in ("auc", "auprc")},
        "instance_intervals": {"auc": _known(interval)},
    }


def _known(interval: tuple[float, float]) -> list[float] | None:
    return list(interval) if has_spread(interval) else None


def _by_name(truth: dict[tuple[str, str], int], path: Path, predicted: pd.DataFrame) -> list[int]:
    keys = list(zip(predicted["bag_id"], predicted["name"].str.strip(), strict=True))  # as cells of a table are
    _require_predicted(truth, keys, path)
    return [truth.get(key, UNKNOWN) for key in keys]


def _read_instance_labels(path: Path, bag_ids: set[str]) -> dict[tuple[str, str], int]:
    """The known labels of the instances of some bags, by bag and file."""
    table = read_columns(path, ["bag_id", "file", "label"])
    table = table[table["bag_id"].isin(bag_ids)]
    problems: list[Problem] = []
    labels = parse_instance_labels(table, path, problems)
    truth: dict[tuple[str, str], int] = {}
    for row, bag_id, file, label in zip(table.index, table["bag_id"], table["file"], labels, strict=True):
        if label != UNKNOWN and truth.setdefault((bag_id, file), label) != label:
            problems.append(Problem(at_row(path, row), f"file {file!r} of bag {bag_id!r} has another label further up"))
    raise_problems(problems)
    if not truth:
        raise InputError(f"{path}: no instance of the {len(bag_ids)} bags that are scored has a label there")
    return truth


def _require_predicted(truth: dict[tuple[str, str], int], keys: list[tuple[str, str]], path: Path) -> None:
    """Refuse labels of instances that were not predicted: their names differ, or they are other images."""
    there = set(keys)
    missing = [key for key in truth if key not in there]
    if not missing:
        return
    bag_id, file = missing[0]
    names = [name for bag, name in keys if bag == bag_id]
    example = f"bag {bag_id!r} has file {file!r} there and name {names[0] if names else ''!r} in {INSTANCES}"
    if len(missing) == len(truth):
        raise InputError(
            f"{path}: none of its {len(truth)} labelled instances of scored bags was predicted; {example}; "
            "column file must be written as when the images were packed (of a folder of images: the file's own name)"
        )
    raise InputError(
        f"{path}: {len(missing)} of {len(truth)} labelled instances of scored bags were not predicted; {example}; "
        "is it the table that the images were packed with? Leave the label of images that could not be packed empty"
    )


def _require_both_classes(labels: NDArray[np.integer[Any]], path: Path, what: str) -> None:
    if len(set(labels.tolist())) == 1:
        raise InputError(
            f"{path}: all {len(labels)} {what} with a label have label {labels[0]}; AUC is not defined without both "
            "classes"
        )


def _counts(labels: NDArray[np.integer[Any]]) -> dict[str, int]:
    positive = int(labels.sum())
    return {"scored": len(labels), "positive": positive, "negative": len(labels) - positive}


def _cell(found: dict[str, Any], part: str, metric: str) -> str:
    if metric not in found[part]:
        return "-"
    value, interval = found[part][metric], found[f"{part}_intervals"].get(metric)
    shown = f"{value:.3f} {said_interval(interval)}".rstrip()
    if metric not in _COUNTED:
        return shown
    count = found[f"{part}s"][_COUNTED[metric]]
    return f"{shown} ({round(value * count)} of {count})"
