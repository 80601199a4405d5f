"""One section of the page per table or figure: its numbers, its picture, and what they say in words."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from its2clr.cohort import Cohort
from its2clr.cohort.tiles import decode
from its2clr.experiments import plots
from its2clr.experiments.collect import Collector, Found, Point
from its2clr.experiments.metrics import SWEPT
from its2clr.experiments.spec import Experiment
from its2clr.experiments.verdicts import Comparison, compare, sentences
from its2clr.files import atomic_path, write_json, write_text

NOTHING = "No run that this needs has a result."
SURE = 0.1
"""A probability closer than this to 0 or 1 counts as sure."""
LONGEST_NOTE = 200
"""Characters of a reason below a table; the whole reason is in the CSV."""


class Section(NamedTuple):
    """What is known of an experiment: table or sentence in Markdown, numbers, and how they compare with the paper."""

    body: str
    frame: pd.DataFrame
    comparisons: Sequence[Comparison] = ()


def write_section(spec: Experiment, collector: Collector, settings: Mapping[str, Any]) -> str:
    """Write the folder of an experiment (README.md, table.csv, result.json, plot.png) and give its section of the page.

    Args:
        spec: The experiment.
        collector: Where its numbers are.
        settings: What the runs were made with, for result.json.
    """
    folder = collector.planner.out / spec.folder
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / "plot.png"
    picture.unlink(missing_ok=True)
    body, frame, comparisons = _KINDS[spec.kind](spec, collector, picture)
    about = f"Paper: {spec.paper_data}. {spec.about}".strip()
    parts = [f"## `{spec.label}`: {spec.title}", about, body, sentences(spec, comparisons)]
    if picture.is_file():
        parts.append(f"![{spec.title}]({spec.folder}/plot.png)")
    text = "\n\n".join(filter(None, parts)) + "\n"
    with atomic_path(folder / "table.csv") as temporary:
        frame.to_csv(temporary, index=False)
    write_json(
        folder / "result.json",
        {
            "label": spec.label,
            "title": spec.title,
            **settings,
            "rows": frame.astype(object).where(frame.notna(), None).to_dict("records"),
            "comparisons": [vars(one) for one in comparisons],
        },
    )
    write_text(folder / "README.md", text.replace(f"({spec.folder}/", "(").replace("## ", "# ", 1))
    return text


def _table(spec: Experiment, collector: Collector, picture: Path) -> Section:
    found = {place: collector.cell(cell, spec.scale) for place, cell in spec.cells().items()}
    plots.draw_table(picture, spec, found)
    return Section(table_markdown(spec, found), table_frame(spec, found), compare(spec, found))


def table_markdown(spec: Experiment, found: Mapping[tuple[str, str], Found]) -> str:
    """A table with our number and the paper's in every cell; why numbers are missing is listed below it."""
    notes: dict[str, int] = {}

    def cell(row: str, column: str) -> str:
        paper, printed = spec.number(row, column), "not in the paper"
        if paper is not None:
            spread = "" if paper.std is None else f" ± {paper.std:.{spec.digits}f}"
            printed = f"paper {paper.mean:.{spec.digits}f}{spread}"
        return f"{_ours(found[row, column], spec.digits, notes)}<br>*{printed}*"

    rows = [[row, *(cell(row, column) for column in spec.columns)] for row in spec.rows]
    return _markdown(["", *spec.columns], rows, notes)


def table_frame(spec: Experiment, found: Mapping[tuple[str, str], Found]) -> pd.DataFrame:
    """One row per cell: our number, its spread, the paper's number."""
    rows = []
    for (row, column), ours in found.items():
        paper = spec.number(row, column)
        mean, std = (None, None) if paper is None else (paper.mean, paper.std)
        rows.append({"row": row, "column": column, **_numbers(ours), "paper": mean, "paper_std": std})
    return pd.DataFrame(rows)


def _sweep(spec: Experiment, collector: Collector, picture: Path) -> Section:
    found = collector.sweep(spec)
    plots.draw_sweep(picture, spec, found)
    notes: dict[str, int] = {}
    rows = [
        [name, value, *(_ours(metrics[metric], spec.digits, notes) for metric in SWEPT)]
        for (name, value), metrics in found.items()
    ]
    frame = pd.DataFrame(
        [
            {"setting": name, "value": float(value), "metric": metric, **_numbers(ours)}
            for (name, value), metrics in found.items()
            for metric, ours in metrics.items()
        ]
    )
    return Section(_markdown(["setting", "value", *SWEPT.values()], rows, notes), frame)


def _curves(spec: Experiment, collector: Collector, picture: Path) -> Section:
    panels = {
        title: {name: collector.rounds(cell, field) for (name, _), cell in spec.cells().items()}
        for field, title in spec.y.items()
    }
    of_instances = any(field.startswith("instance") for field in spec.y)
    return _drawn_curves(panels, picture, "refinement epoch", start=of_instances)


def _training(spec: Experiment, collector: Collector, picture: Path) -> Section:
    cells = {name: cell for (name, _), cell in spec.cells().items()}
    losses = {name: collector.training(cell, "train_loss") for name, cell in cells.items()}
    losses |= {f"{name}{plots.VALIDATION}": collector.training(cell, "validation_loss") for name, cell in cells.items()}
    aucs = {name: collector.training(cell, "validation_auc") for name, cell in cells.items()}
    return _drawn_curves({"Loss": losses, "Bag AUC (validation bags)": aucs}, picture, "bags seen", start=False)


def _drawn_curves(
    panels: Mapping[str, Mapping[str, Sequence[Point]]], picture: Path, x_title: str, *, start: bool
) -> Section:
    curves = {(name, title): points for title, lines in panels.items() for name, points in lines.items() if points}
    frame = pd.DataFrame(
        [(*place, point.x, point.mean, point.spread) for place, points in curves.items() for point in points],
        columns=["line", "quantity", "x", "ours", "spread"],
    )
    if not curves:
        return Section(NOTHING, frame)
    plots.draw_curves(picture, panels, x_title, start=start)
    return Section(curves_markdown(curves), frame)


def curves_markdown(curves: Mapping[tuple[str, str], Sequence[Point]]) -> str:
    """A table with a row per curve: first, highest and last value, and where it went back the most, if it did."""
    rows = []
    for place, points in curves.items():
        shown = [points[0], max(points, key=lambda point: point.mean), points[-1]]
        rows.append([", ".join(place), *map(_point, shown), _way_back(points)])
    return _markdown(["line", "first", "highest", "last", "largest way back"], rows)


def _point(point: Point) -> str:
    spread = f" ± {point.spread:.3f}" if point.spread is not None else ""
    return f"{point.mean:.3f}{spread} (at {point.x:g})"


def _way_back(points: Sequence[Point]) -> str:
    """The largest fall of a curve that ends no lower than it began, the largest rise of one that ends lower."""
    sign = 1 if points[-1].mean >= points[0].mean else -1
    pairs = combinations(points, 2)
    ends = max(pairs, key=lambda pair: sign * (pair[0].mean - pair[1].mean), default=(points[0], points[0]))
    before, after = (f"{end.mean:.3f}" for end in ends)
    if sign * (ends[0].mean - ends[1].mean) <= 0 or before == after:
        return "none"
    return f"{before} (at {ends[0].x:g}) to {after} (at {ends[1].x:g})"


def _histogram(spec: Experiment, collector: Collector, picture: Path) -> Section:
    """Probabilities and pseudo labels of the positive bags' instances in the last round of the first seed."""
    columns = ["bag_id", "instance", "probability", "pseudo_label"]
    jobs = collector.finished(next(iter(spec.cells().values())))
    if not jobs:
        return Section(NOTHING, pd.DataFrame(columns=columns))
    last = max(collector.planner.folder(jobs[0]).glob("rounds/*/pseudo_labels.parquet"))
    table = pd.read_parquet(last, columns=columns)
    in_positive_bag = table.groupby("bag_id")["pseudo_label"].transform("max") == 1
    table = table[in_positive_bag].reset_index(drop=True)
    config = collector.planner.config(jobs[0]).refine
    plots.draw_histogram(picture, table, config.threshold, config.final_ratio)
    sure = float(((table["probability"] < SURE) | (table["probability"] > 1 - SURE)).mean())
    body = f"{100 * sure:.1f}% of the {len(table)} instances have a probability below {SURE} or above {1 - SURE}."
    return Section(body, table)


def _maps(spec: Experiment, collector: Collector, picture: Path) -> Section:
    """Predictions of every model, first seed, on positive test bags at some quantiles of the share of positives."""
    planner, columns = collector.planner, ["model", "bag_id", "instance", "x", "y", "probability", "label"]
    finished = {name: collector.finished(cell) for (name, _), cell in spec.cells().items()}
    first = {name: jobs[0] for name, jobs in finished.items() if jobs}
    if not first:
        return Section(NOTHING, pd.DataFrame(columns=columns))
    cohort = Cohort.open(next(iter(first.values())).cohort)
    names = _bags_at(cohort.split("test"), spec.bags)
    models: dict[str, pd.DataFrame] = {}
    for name, job in first.items():
        table = pd.read_parquet(planner.folder(job) / "predictions.parquet")
        own = table["aggregator"] == planner.config(job).aggregator.name
        table = table[own & table["bag_id"].isin(names)]
        if len(table):
            models[name] = table
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


def _examples(_: Experiment, collector: Collector, picture: Path) -> Section:
    cohorts = collector.planner.cohorts
    tiles = _example_tiles(Cohort.open(cohorts.get("", next(iter(cohorts.values())))))
    plots.draw_examples(picture, tiles)
    return Section("", pd.DataFrame({"tile": [words for _, words in tiles]}))


def _example_tiles(cohort: Cohort, count: int = 5) -> list[tuple[NDArray[np.uint8], str]]:
    """A tile of each of some bags, negative bags first; of a positive bag a positive tile, where that is known."""
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


_KINDS: dict[str, Callable[[Experiment, Collector, Path], Section]] = {
    "table": _table,
    "sweep": _sweep,
    "curves": _curves,
    "training": _training,
    "histogram": _histogram,
    "maps": _maps,
    "examples": _examples,
    "drawing": lambda *_: Section("", pd.DataFrame()),
}


def _markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], notes: Mapping[str, int] | None = None) -> str:
    """A table in Markdown, with numbered notes below it."""
    lines = [f"| {' | '.join(cells).lstrip()} |" for cells in (headings, *rows)]
    lines.insert(1, "|---" * len(headings) + "|")
    footnotes = [f"<sup>{number}</sup> {reason}  " for reason, number in (notes or {}).items()]
    return "\n".join([*lines, *([""] if footnotes else []), *footnotes])


def _ours(ours: Found, digits: int, notes: dict[str, int]) -> str:
    """A number of ours in Markdown; why it or some seeds are missing becomes a note."""
    reason = (ours.reason or "").split("\n")[0][:LONGEST_NOTE]
    mark = f"<sup>{notes.setdefault(reason, len(notes) + 1)}</sup>" if reason else ""
    if ours.mean is None:
        return f"-{mark}"
    spread = f" ± {ours.spread:.{digits}f}" if ours.spread is not None else ""
    return f"**{ours.mean:.{digits}f}**{spread}{mark}"


def _numbers(ours: Found) -> dict[str, Any]:
    return {
        "ours": ours.mean,
        "spread": ours.spread,
        "spread_over": ours.over,
        "values": " ".join(f"{seed}:{value:.6g}" for seed, value in ours.values.items()),
        "reason": ours.reason,
    }
