"""One section of the page per experiment: collects its numbers, draws its picture, puts them into words."""

from collections.abc import Callable, Mapping, Sequence
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


class Section(NamedTuple):
    """What is known of an experiment: table or sentence in Markdown, numbers, and how they compare with the paper."""

    body: str
    frame: pd.DataFrame
    comparisons: Sequence[Comparison] = ()


def write_section(spec: Experiment, collector: Collector, cohort: Cohort, settings: Mapping[str, Any]) -> str:
    """Write the folder of an experiment and give its section of the page.

    Args:
        spec: The experiment.
        collector: Where its numbers are.
        cohort: Bags for maps and examples.
        settings: What the runs were made with, for result.json.
    """
    folder = collector.out / spec.folder
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / "plot.png"
    picture.unlink(missing_ok=True)
    section = _KINDS[spec.kind](spec, collector, cohort, picture)
    verdict = sentences(spec, list(section.comparisons))
    return render.write_experiment(folder, spec, section.body, verdict, section.frame, section.comparisons, settings)


def _table(spec: Experiment, collector: Collector, cohort: Cohort, picture: Path) -> Section:  # noqa: ARG001
    found = collector.cells(spec)
    plots.draw_table(picture, spec, found)
    return Section(render.table_markdown(spec, found), render.table_frame(spec, found), compare(spec, found))


def _sweep(spec: Experiment, collector: Collector, cohort: Cohort, picture: Path) -> Section:  # noqa: ARG001
    found = collector.sweep(spec)
    plots.draw_sweep(picture, spec, found)
    return Section(render.sweep_markdown(spec, found), render.sweep_frame(found))


def _curves(spec: Experiment, collector: Collector, cohort: Cohort, picture: Path) -> Section:  # noqa: ARG001
    panels = {
        title: {name: collector.rounds(cell, field) for (name, _), cell in spec.cells().items()}
        for field, title in spec.y.items()
    }
    of_instances = any(field.startswith("instance") for field in spec.y)
    return _drawn_curves(panels, picture, "refinement epoch", start=of_instances)


def _training(spec: Experiment, collector: Collector, cohort: Cohort, picture: Path) -> Section:  # noqa: ARG001
    cells = {name: cell for (name, _), cell in spec.cells().items()}
    losses = {name: collector.training(cell, "train_loss") for name, cell in cells.items()}
    for name, cell in cells.items():
        losses[f"{name}{plots.VALIDATION}"] = collector.training(cell, "validation_loss")
    auc = {name: collector.training(cell, "validation_auc") for name, cell in cells.items()}
    return _drawn_curves({"Loss": losses, "Bag AUC (validation bags)": auc}, picture, "training step", start=False)


def _drawn_curves(
    panels: Mapping[str, Mapping[str, Sequence[Point]]], picture: Path, x_title: str, *, start: bool
) -> Section:
    flat = {(name, title): points for title, lines in panels.items() for name, points in lines.items()}
    if not any(flat.values()):
        return Section(NOTHING, render.curves_frame(flat))
    plots.draw_curves(picture, panels, x_title, start=start)
    return Section(render.curves_markdown(flat), render.curves_frame(flat))


def _histogram(spec: Experiment, collector: Collector, cohort: Cohort, picture: Path) -> Section:  # noqa: ARG001
    """Probabilities and pseudo labels of the positive bags' instances in the last round of the first seed."""
    jobs = collector.finished(next(iter(spec.cells().values())))
    if not jobs:
        return Section(NOTHING, pd.DataFrame(columns=["bag_id", "instance", "probability", "pseudo_label"]))
    last = max(jobs[0].folder(collector.out).glob("rounds/*/pseudo_labels.parquet"))
    table = pd.read_parquet(last, columns=["bag_id", "instance", "probability", "pseudo_label"])
    in_positive_bag = table.groupby("bag_id")["pseudo_label"].transform("max") == 1
    table = table[in_positive_bag].reset_index(drop=True)
    config = collector.planner.base.refine
    plots.draw_histogram(picture, table, config.threshold, config.final_ratio)
    sure = float(((table["probability"] < SURE) | (table["probability"] > 1 - SURE)).mean())
    body = f"{100 * sure:.1f}% of the {len(table)} instances have a probability below {SURE} or above {1 - SURE}."
    return Section(body, table)


def _maps(spec: Experiment, collector: Collector, cohort: Cohort, picture: Path) -> Section:
    """Predictions of every model, first seed, on positive test bags at some quantiles of the share of positives."""
    names = _bags_at(cohort.split("test"), spec.bags)
    models: dict[str, pd.DataFrame] = {}
    for (name, _), cell in spec.cells().items():
        for job in collector.finished(cell)[:1]:
            table = pd.read_parquet(job.folder(collector.out) / "predictions.parquet")
            own = table["aggregator"] == table["aggregator"].iloc[0]
            models[name] = table[own & table["bag_id"].isin(names)]
    columns = ["model", "bag_id", "instance", "x", "y", "probability", "label"]
    if not models:
        return Section(NOTHING, pd.DataFrame(columns=columns))
    bags = {bag: {name: table[table["bag_id"] == bag] for name, table in models.items()} for bag in names}
    plots.draw_maps(picture, bags, float(cohort.tile_file(names[0]).tile_size_level0))
    frame = pd.concat([table.assign(model=name) for name, table in models.items()])
    return Section("", frame[columns])


def _bags_at(test: Cohort, quantiles: Sequence[float]) -> list[str]:
    """Positive bags at some quantiles of their share of positives; of their order, where that is not known."""
    rows = np.flatnonzero(test.bags["label"].to_numpy() == 1)
    if test.has_instance_labels:
        share = pd.Series(test.instance_labels() == 1).groupby(test.bag_index()).mean().to_numpy()
        rows = rows[np.argsort(share[rows], kind="stable")]
    return [str(test.bags["bag_id"].iloc[rows[round(quantile * (len(rows) - 1))]]) for quantile in quantiles]


def _examples(spec: Experiment, collector: Collector, cohort: Cohort, picture: Path) -> Section:  # noqa: ARG001
    tiles = example_tiles(cohort)
    plots.draw_examples(picture, tiles)
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


def _drawing(spec: Experiment, collector: Collector, cohort: Cohort, picture: Path) -> Section:  # noqa: ARG001
    return Section("", pd.DataFrame())


_KINDS: dict[str, Callable[[Experiment, Collector, Cohort, Path], Section]] = {
    "table": _table,
    "sweep": _sweep,
    "curves": _curves,
    "training": _training,
    "histogram": _histogram,
    "maps": _maps,
    "examples": _examples,
    "drawing": _drawing,
}
