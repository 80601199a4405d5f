"""One section of the page per experiment: collects its numbers, draws its picture, puts them into words."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from its2clr.cohort import Cohort
from its2clr.cohort.tiles import decode
from its2clr.experiments import plots, render
from its2clr.experiments.collect import Collector, Point
from its2clr.experiments.spec import Experiment
from its2clr.experiments.verdicts import Comparison, compare, sentences

NOTHING = "No run that this needs has a result."
SURE = 0.1
"""A probability closer than this to 0 or 1 counts as sure."""


@dataclass(frozen=True)
class Context:
    """What a section is made from: the experiment, where its numbers are, and where its picture goes."""

    spec: Experiment
    collector: Collector
    picture: Path


class Section(NamedTuple):
    """What is known of an experiment: table or sentence in Markdown, numbers, and how they compare with the paper."""

    body: str
    frame: pd.DataFrame
    comparisons: Sequence[Comparison] = ()


def write_section(spec: Experiment, collector: Collector, settings: Mapping[str, Any]) -> str:
    """Write the folder of an experiment and give its section of the page.

    Args:
        spec: The experiment.
        collector: Where its numbers are.
        settings: What the runs were made with, for result.json.
    """
    folder = collector.planner.out / spec.folder
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / "plot.png"
    picture.unlink(missing_ok=True)
    section = _KINDS[spec.kind](Context(spec, collector, picture))
    verdict = sentences(spec, section.comparisons)
    return render.write_experiment(folder, spec, section.body, verdict, section.frame, section.comparisons, settings)


def _table(context: Context) -> Section:
    spec, found = context.spec, context.collector.cells(context.spec)
    plots.draw_table(context.picture, spec, found)
    return Section(render.table_markdown(spec, found), render.table_frame(spec, found), compare(spec, found))


def _sweep(context: Context) -> Section:
    found = context.collector.sweep(context.spec)
    plots.draw_sweep(context.picture, context.spec, found)
    return Section(render.sweep_markdown(context.spec, found), render.sweep_frame(found))


def _curves(context: Context) -> Section:
    spec = context.spec
    panels = {
        title: {name: context.collector.rounds(cell, field) for (name, _), cell in spec.cells().items()}
        for field, title in spec.y.items()
    }
    of_instances = any(field.startswith("instance") for field in spec.y)
    return _drawn_curves(panels, context.picture, "refinement epoch", start=of_instances)


def _training(context: Context) -> Section:
    cells = {name: cell for (name, _), cell in context.spec.cells().items()}
    read = context.collector.training
    losses = {name: read(cell, "train_loss") for name, cell in cells.items()}
    losses |= {f"{name}{plots.VALIDATION}": read(cell, "validation_loss") for name, cell in cells.items()}
    panels = {"Loss": losses}
    panels["Bag AUC (validation bags)"] = {name: read(cell, "validation_auc") for name, cell in cells.items()}
    return _drawn_curves(panels, context.picture, "bags seen", start=False)


def _drawn_curves(
    panels: Mapping[str, Mapping[str, Sequence[Point]]], picture: Path, x_title: str, *, start: bool
) -> Section:
    flat = {(name, title): points for title, lines in panels.items() for name, points in lines.items()}
    if not any(flat.values()):
        return Section(NOTHING, render.curves_frame(flat))
    plots.draw_curves(picture, panels, x_title, start=start)
    return Section(render.curves_markdown(flat), render.curves_frame(flat))


def _histogram(context: Context) -> Section:
    """Probabilities and pseudo labels of the positive bags' instances in the last round of the first seed."""
    planner = context.collector.planner
    jobs = context.collector.finished(next(iter(context.spec.cells().values())))
    if not jobs:
        return Section(NOTHING, pd.DataFrame(columns=["bag_id", "instance", "probability", "pseudo_label"]))
    last = max(planner.folder(jobs[0]).glob("rounds/*/pseudo_labels.parquet"))
    table = pd.read_parquet(last, columns=["bag_id", "instance", "probability", "pseudo_label"])
    in_positive_bag = table.groupby("bag_id")["pseudo_label"].transform("max") == 1
    table = table[in_positive_bag].reset_index(drop=True)
    config = planner.config(jobs[0]).refine
    plots.draw_histogram(context.picture, table, config.threshold, config.final_ratio)
    sure = float(((table["probability"] < SURE) | (table["probability"] > 1 - SURE)).mean())
    body = f"{100 * sure:.1f}% of the {len(table)} instances have a probability below {SURE} or above {1 - SURE}."
    return Section(body, table)


def _maps(context: Context) -> Section:
    """Predictions of every model, first seed, on positive test bags at some quantiles of the share of positives."""
    columns = ["model", "bag_id", "instance", "x", "y", "probability", "label"]
    jobs = {name: context.collector.finished(cell)[:1] for (name, _), cell in context.spec.cells().items()}
    found = {name: job for name, some in jobs.items() for job in some}
    if not found:
        return Section(NOTHING, pd.DataFrame(columns=columns))
    cohort = Cohort.open(next(iter(found.values())).cohort)
    names = _bags_at(cohort.split("test"), context.spec.bags)
    models: dict[str, pd.DataFrame] = {}
    for name, job in found.items():
        planner = context.collector.planner
        table = pd.read_parquet(planner.folder(job) / "predictions.parquet")
        own = table["aggregator"] == planner.config(job).aggregator.name
        models[name] = table[own & table["bag_id"].isin(names)]
    models = {name: table for name, table in models.items() if len(table)}
    if not models:
        return Section(NOTHING, pd.DataFrame(columns=columns))
    bags = {bag: {name: table[table["bag_id"] == bag] for name, table in models.items()} for bag in names}
    plots.draw_maps(context.picture, bags, float(cohort.tile_file(names[0]).tile_size_level0))
    frame = pd.concat([table.assign(model=name) for name, table in models.items()])
    return Section("", frame[columns])


def _bags_at(test: Cohort, quantiles: Sequence[float]) -> list[str]:
    """Positive bags at some quantiles of their share of positives; of their order, where that is not known."""
    rows = np.flatnonzero(test.bags["label"].to_numpy() == 1)
    if test.has_instance_labels:
        share = pd.Series(test.instance_labels() == 1).groupby(test.bag_index()).mean().to_numpy()
        rows = rows[np.argsort(share[rows], kind="stable")]
    return [str(test.bags["bag_id"].iloc[rows[round(quantile * (len(rows) - 1))]]) for quantile in quantiles]


def _examples(context: Context) -> Section:
    cohorts = context.collector.planner.cohorts
    tiles = example_tiles(Cohort.open(cohorts.get("", next(iter(cohorts.values())))))
    plots.draw_examples(context.picture, tiles)
    return Section("", pd.DataFrame({"tile": [words for _, words in tiles]}))


def example_tiles(cohort: Cohort, count: int = 5) -> list[tuple[NDArray[np.uint8], str]]:
    """A tile of each of some bags, negative bags first; of positive bags a positive one where they are known."""
    tiles = []
    bags = cohort.bags.sort_values(["label", "bag_id"])
    chosen = np.linspace(0, len(bags) - 1, count).round().astype(int)
    for bag_id, label in bags.iloc[chosen][["bag_id", "label"]].itertuples(index=False):
        file = cohort.tile_file(bag_id)
        positive = np.flatnonzero(file.labels == 1) if file.labels is not None else np.empty(0, dtype=int)
        number = int(positive[0]) if len(positive) else len(file.coords) // 2
        kind = "positive" if len(positive) else "of a positive bag" if label else "of a negative bag"
        tiles.append((decode(file.encoded(number)), f"{bag_id}\n{kind}"))
    return tiles


def _drawing(context: Context) -> Section:  # noqa: ARG001
    return Section("", pd.DataFrame())


_KINDS: dict[str, Callable[[Context], Section]] = {
    "table": _table,
    "sweep": _sweep,
    "curves": _curves,
    "training": _training,
    "histogram": _histogram,
    "maps": _maps,
    "examples": _examples,
    "drawing": _drawing,
}
