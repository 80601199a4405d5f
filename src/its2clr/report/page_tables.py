"""The tables of a report, as text with what they are sorted by."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from its2clr.evaluation.bags import BAG_METRICS
from its2clr.evaluation.instances import INSTANCE_METRICS
from its2clr.evaluation.uncertainty import said_interval
from its2clr.report.run_facts import Decisions, RunFacts, Scored
from its2clr.run.decisions import Thresholds
from its2clr.run.results_file import describe_cohort, training_seconds
from its2clr.wording import readable_size

MOST_BAGS = 500
"""Rows of the table of bags; a page with every bag of a very large cohort could not be opened."""
NOTHING = "-"


class Cell(NamedTuple):
    """One cell: its text, a smaller second line, and the number it is sorted by (None: by its text)."""

    text: str
    small: str = ""
    value: float | None = None


@dataclass(frozen=True)
class Table:
    """A table of the page.

    Attributes:
        name: Its id.
        caption: What it shows.
        columns: Headings.
        rows: Cells of each row.
        note: A sentence below.
        long: Whether it gets a frame of its own that scrolls.
    """

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    long: bool = False


def number(value: float | None, shown: str = "{:.3f}", small: str = "") -> Cell:
    """A number, or a dash where there is none."""
    if value is None or not math.isfinite(value):
        return Cell(NOTHING, "", -math.inf)
    return Cell(shown.format(value), small, float(value))


def bag_results(models: Sequence[Scored]) -> Table:
    """Every model on the test bags."""
    rows = []
    for scored in models:
        found, intervals = scored.found.get("bag", {}), dict(scored.found.get("bag_intervals", {}))
        if "bag_auc_interval" in scored.found:
            intervals.setdefault("auc", scored.found["bag_auc_interval"])
        rows.append([Cell(scored.name), *(_measured(found.get(name), intervals.get(name)) for name in BAG_METRICS)])
    note = (
        "Mean ± sample deviation over the retrained aggregators; in brackets the 95% bootstrap interval of that mean "
        "over test bags. AUPRC is the average precision. Decisions are made at each retraining's threshold, chosen on "
        "validation bags."
    )
    titles = [metric.title for metric in BAG_METRICS.values()]
    return Table("bag-results", "Test bags", ["model", *titles], rows, note)


def instance_results(models: Sequence[Scored]) -> Table | None:
    """Every model on the instances of the test bags; None without ground truth."""
    known = [scored for scored in models if "instance" in scored.found]
    if not known:
        return None
    rows = []
    for scored in known:
        found, interval = scored.found["instance"], scored.found.get("instance_auc_interval")
        cells = [_measured(found.get(name), interval if name == "auc" else None) for name in INSTANCE_METRICS]
        rows.append([Cell(scored.name), *cells])
    note = (
        "Against ground truth that training never read. The interval is over whole bags. Max F1 is at the best "
        "threshold for the test instances, as in the paper; Dice and IoU take their settings from the validation bags."
    )
    caption = "Instances of the test bags"
    return Table("instance-results", caption, ["model", *INSTANCE_METRICS.values()], rows, note)


def decision_table(decisions: dict[str, Decisions]) -> Table:
    """Sensitivity and specificity with their counts."""
    rows = [
        [
            Cell(name),
            number(found.threshold),
            _share(found.sensitivity, found.true_positives, found.true_positives + found.false_negatives),
            _share(found.specificity, found.true_negatives, found.true_negatives + found.false_positives),
            number(found.false_negatives, "{:,.0f}"),
            number(found.false_positives, "{:,.0f}"),
        ]
        for name, found in decisions.items()
    ]
    columns = ["model", "threshold", "sensitivity", "specificity", "missed", "false alarms"]
    note = (
        "From the mean probability of the retrained aggregators, which is what bag_predictions.csv holds: sensitivity "
        "and specificity may differ from the means over retrainings above. The threshold has the highest balanced "
        "accuracy on the validation bags."
    )
    return Table("decisions", "Test bags called positive or negative", columns, rows, note)


def bag_table(facts: RunFacts, splits: Sequence[str], name: str) -> Table:
    """The bags of some splits with every model's probability; the most wrong ones of the best model first."""
    best = facts.best
    assert best is not None
    bags = best.bags[best.bags["split"].isin(list(splits))].reset_index(drop=True)
    error = (bags["label"] - bags["probability"]).abs()
    shown = bags.loc[error.sort_values(ascending=False, kind="stable").index[:MOST_BAGS]]
    counts: dict[str, int] = {}
    if facts.cohort is not None:
        counts = dict(zip(facts.cohort.bags["bag_id"], facts.cohort.bags["n_instances"], strict=True))
    wanted = set(shown["bag_id"])
    others = {scored.name: _probabilities(scored.bags[scored.bags["bag_id"].isin(wanted)]) for scored in facts.models}
    rows = []
    for row in shown.to_dict("records"):
        bag_id, label = str(row["bag_id"]), int(row["label"])
        cells = [
            Cell(bag_id),
            Cell(_class(label)),
            Cell(str(row["split"])),
            number(counts.get(bag_id), "{:,.0f}"),
        ]
        cells += [number(values.get(bag_id)) for values in others.values()]
        rows.append([*cells, Cell(_called(float(row["probability"]), label, best.thresholds))])
    note = f"{len(shown):,} of {len(bags):,} bags, the most wrong by {best.name} first; all are in bag_predictions.csv."
    columns = ["bag", "label", "split", "instances", *others, "called"]
    return Table(name, f"{' and '.join(splits).capitalize()} bags", columns, rows, note, long=True)


def _called(probability: float, label: int, thresholds: Thresholds | None) -> str:
    if thresholds is None:
        return "-"
    return "right" if (probability >= thresholds.bag) == (label == 1) else "WRONG"


def cohort_table(facts: RunFacts) -> Table | None:
    """Bags, classes, instances and groups of every split."""
    described = describe_cohort(facts.cohort)["splits"] if facts.cohort is not None else {}
    if facts.results is not None and not described:
        described = facts.results.get("cohort", {}).get("splits", {})
    if not described:
        return None
    rows = []
    for split in (name for name in ("train", "val", "test") if name in described):
        found = described[split]
        positive = found["positive_bags"]
        rows.append([Cell(split), *_counts(found["bags"], positive, found["instances"]), _groups(facts, split)])
    if facts.unseen is not None:
        unseen = facts.unseen
        rows.append([Cell("test"), *_counts(len(unseen), None, unseen.n_instances), number(None)])
    columns = ["split", "bags", "positive", "negative", "instances", "groups"]
    return Table("cohort-splits", "Splits", columns, rows)


def rounds_table(rounds: Sequence[dict[str, Any]]) -> Table:
    """One row per pseudo-label update."""
    optional = {
        "instance_auc": ("AUC", "{:.3f}"),
        "instance_max_f1": ("max F1", "{:.3f}"),
        "precision": ("precision", "{:.3f}"),
        "recall": ("recall", "{:.3f}"),
        "positive_share": ("positive share", "{:.1%}"),
        "false_positive_share": ("false-positive share", "{:.1%}"),
        "churn": ("churn", "{:.1%}"),
    }
    known = [name for name in optional if any(name in found for found in rounds)]
    rows = []
    for found in rounds:
        state = "replaced" if found.get("pseudo_labels_replaced") else "kept"
        cells = [number(found["epoch"], "{:.0f}"), number(found["validation_auc"]), Cell(state)]
        cells += [number(found.get("threshold"), "{:.2f}")]
        rows.append([*cells, *(number(found.get(name), optional[name][1]) for name in known)])
    columns = ["epoch", "validation bag AUC", "pseudo labels", "threshold", *(optional[name][0] for name in known)]
    return Table("rounds-table", "Every update of the pseudo labels", columns, rows)


def separation_table(results: dict[str, Any], names: dict[str, str]) -> Table | None:
    """Class separation and linear probe of every encoder's features, on test instances."""
    rows = []
    for encoder, name in names.items():
        found = results.get(encoder, {})
        if "class_separation" not in found:
            continue
        apart = found["class_separation"]["test"]
        spread = (apart["positive_deviation"] + apart["negative_deviation"]) / 2
        probe = found.get("linear_probe", {})
        distance = apart["inter_class_distance"]
        cells = [distance, apart["positive_deviation"], apart["negative_deviation"]]
        ratio = distance / spread if spread > 0 else None
        ends = [number(ratio, "{:.2f}"), number(probe.get("auc")), number(probe.get("bag_auc"))]
        rows.append([Cell(name), *(number(value, "{:.2f}") for value in cells), *ends])
    if not rows:
        return None
    columns = ["features", "distance of the classes", "deviation of positives", "deviation of negatives",
               "distance / deviation", "linear probe: instance AUC", "linear probe: bag AUC"]  # fmt: skip
    note = (
        "Test instances. Distance between the means of the classes, and the deviation of each class in the direction "
        "in which it spreads most. Compare encoders by the ratio: their features differ in scale. The linear probe is "
        "trained on true instance labels: it shows what the features allow, not what this run reached."
    )
    return Table("separation", "How far apart the classes are in the features", columns, rows, note)


def timings_table(facts: RunFacts) -> Table | None:
    """Time and memory of every stage."""
    seconds, epochs = training_seconds(facts.metrics), Counter(entry["stage"] for entry in facts.metrics)
    speed: dict[str, list[float]] = {}
    for entry in facts.metrics:
        if "tiles_per_second" in entry:
            speed.setdefault(entry["stage"], []).append(entry["tiles_per_second"])
    for stage, notes in facts.state.stages.items():
        if "seconds" in notes:
            seconds[stage] = notes["seconds"]
    rows = []
    for stage, spent in seconds.items():
        notes = facts.state.stages.get(stage, {})
        memory = ", ".join(f"{readable_size(size)} {place}" for place, size in notes.get("peak_memory", {}).items())
        name = "pseudo-label updates" if stage == "round" else stage.replace("_", " ")
        cells = [Cell(name), Cell(said_seconds(spent), "", spent), number(epochs.get(stage), "{:,.0f}")]
        rates = speed.get(stage)
        cells += [number(sum(rates) / len(rates) if rates else None, "{:,.0f}")]
        cells += [Cell(memory or NOTHING), Cell(str(notes.get("device", NOTHING)))]
        rows.append(cells)
    if not rows:
        return None
    columns = ["stage", "time", "epochs or updates", "tiles per second", "peak memory", "device"]
    if all(row[-1].text == NOTHING for row in rows):
        columns, rows = columns[:-2], [row[:-2] for row in rows]
    total = sum(seconds.values())
    note = f"Together {said_seconds(total)}, without extraction of features and evaluation."
    return Table("timings-table", "Time of training by stage", columns, rows, note)


def said_seconds(seconds: float) -> str:
    """A duration: `42 s`, `3 min 05 s`, `2 h 10 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _measured(found: dict[str, Any] | None, interval: Sequence[float] | None) -> Cell:
    if not found:
        return number(None)
    small = said_interval(interval)
    deviation = "" if found["std"] is None else f" ± {found['std']:.3f}"
    return Cell(f"{found['mean']:.3f}{deviation}", small, found["mean"])


def _share(value: float, count: int, of: int) -> Cell:
    return Cell(f"{value:.1%}", f"{count:,} of {of:,}", value)


def _counts(bags: int, positive: int | None, instances: int) -> list[Cell]:
    if positive is None:
        hidden = Cell("not looked at", "", -math.inf)
        return [number(bags, "{:,.0f}"), hidden, hidden, number(instances, "{:,.0f}")]
    return [number(value, "{:,.0f}") for value in (bags, positive, bags - positive, instances)]


def _groups(facts: RunFacts, split: str) -> Cell:
    if facts.cohort is None:
        return number(None)
    bags = facts.cohort.bags
    return number(int(bags.loc[bags["split"] == split, "group"].nunique()), "{:,.0f}")


def _class(label: int) -> str:
    return "positive" if label == 1 else "negative"


def _probabilities(bags: pd.DataFrame) -> dict[str, float]:
    return dict(zip(bags["bag_id"].astype(str), bags["probability"], strict=True))
