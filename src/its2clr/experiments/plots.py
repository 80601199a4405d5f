"""Pictures of the experiments, in colours and shapes that the colour-blind can tell apart."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from its2clr.experiments.collect import Found, Point
from its2clr.experiments.metrics import SWEPT
from its2clr.experiments.spec import Experiment
from its2clr.files import atomic_path

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
"""Okabe and Ito's palette."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":")
PANELS_ABREAST = 4
VALIDATION = " (validation)"
"""Ending of the name of a dashed line; it has the colour of the line whose name is the same without it."""
VISIBLE = 0.2
"""Probability below which a tile of a map stays grey, as in the paper."""


def draw_table(path: Path, spec: Experiment, found: Mapping[tuple[str, str], Found]) -> None:
    """One panel per row or column in which methods are compared: ours on the lower axis, the paper's on the upper."""
    by_rows = spec.methods == "rows"
    panels, methods = (spec.columns, spec.rows) if by_rows else (spec.rows, spec.columns)
    names = [name for name, cell in methods.items() if cell.metric != "witness_rate"]
    rates = [name for name in methods if name not in names]
    with figure(path, len(panels), height=0.3 * len(names) + 1.3) as axes:
        for number, (axis, panel) in enumerate(zip(axes, panels, strict=True)):
            upper = axis.twiny()
            for position, name in enumerate(names):
                place = (name, panel) if by_rows else (panel, name)
                ours, paper = found[place], spec.number(*place)
                if paper is not None:
                    upper.plot(paper.mean, position, "D", color=COLOURS[1], mfc="none", label="paper (upper axis)")
                if ours.mean is not None:
                    axis.errorbar(
                        ours.mean, position, xerr=ours.spread, fmt="o", color=COLOURS[0], label="ours (lower axis)"
                    )
            upper.tick_params(axis="x", colors=COLOURS[1], labelsize=7)
            axis.tick_params(axis="x", colors=COLOURS[0], labelsize=7)
            axis.set_yticks(range(len(names)), names if number % PANELS_ABREAST == 0 else [""] * len(names))
            axis.set_ylim(len(names) - 0.5, -0.5)
            rate = [f"WR {found[panel, name].mean:.1f}%" for name in rates if found[panel, name].mean is not None]
            axis.set_title("\n".join([*wrap(panel, 30), *rate]), fontsize=9)
        _legend([*axes, *(other for axis in axes for other in axis.figure.axes if other not in axes)])


def draw_sweep(path: Path, spec: Experiment, found: Mapping[tuple[str, str], Mapping[str, Found]]) -> None:
    """One panel per setting: what was measured over its values."""
    with figure(path, len(spec.sweeps)) as axes:
        for axis, (name, sweep) in zip(axes, spec.sweeps.items(), strict=True):
            for number, (metric, title) in enumerate(SWEPT.items()):
                points = [(value, found[name, f"{value:g}"][metric]) for value in sweep.values]
                known = [(value, one.mean, one.spread or 0.0) for value, one in points if one.mean is not None]
                if known:
                    x, mean, spread = zip(*known, strict=True)
                    axis.errorbar(
                        x, mean, spread, fmt=MARKERS[number] + LINES[number], color=COLOURS[number], label=title
                    )
            axis.set_xlabel(name)
            axis.set_ylabel("AUC (x 100)")
        _legend(axes)


def draw_curves(
    path: Path, panels: Mapping[str, Mapping[str, Sequence[Point]]], x_title: str, *, start: bool = False
) -> None:
    """One panel per quantity, one line with a band of one deviation per method.

    Args:
        path: Picture to write.
        panels: Title of the vertical axis -> name of the line -> points.
        x_title: Title of the horizontal axis.
        start: Whether to draw a dashed line at the first point: what the features were before refinement.
    """
    with figure(path, len(panels)) as axes:
        names = list(next(iter(panels.values())))
        for axis, (title, lines) in zip(axes, panels.items(), strict=True):
            for name, points in lines.items():
                number = names.index(name.removesuffix(VALIDATION))
                x = [point.x for point in points]
                mean = np.array([point.mean for point in points])
                spread = np.array([point.spread or 0.0 for point in points])
                marker = MARKERS[number % len(MARKERS)] if len(points) < 30 else ""
                style = "--" if name.endswith(VALIDATION) else "-"
                colour = COLOURS[number % len(COLOURS)]
                label = "validation (dashed)" if name.endswith(VALIDATION) else name
                axis.plot(x, mean, marker + style, color=colour, label=label, markersize=4)
                axis.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)
            first = next((points[0].mean for points in lines.values() if points), None)
            if start and first is not None:
                axis.axhline(first, color="black", linestyle="--", linewidth=1, label="SimCLR features")
            axis.set_xlabel(x_title)
            axis.set_ylabel(title)
        _legend(axes)


def draw_histogram(path: Path, table: pd.DataFrame, threshold: float, ratio: float) -> None:
    """Instance probabilities of positive bags: all, and those on either side of the threshold with the share used."""
    with figure(path, 3) as axes:
        bins = np.linspace(0, 1, 41)
        axes[0].hist(table["probability"], bins=bins, color=COLOURS[7])
        axes[0].axvline(threshold, color="black", linestyle="--", label=f"η = {threshold:g}")
        axes[0].set_title("instances of positive bags", fontsize=9)
        axes[0].legend(fontsize=8)
        for axis, label, colour in ((axes[1], 0, COLOURS[0]), (axes[2], 1, COLOURS[1])):
            values = np.sort(table.loc[table["pseudo_label"] == label, "probability"].to_numpy())
            values = values if label == 0 else values[::-1]
            axis.hist(values, bins=bins, color=colour)
            if len(values):
                cut = values[min(int(np.ceil(ratio * len(values))), len(values)) - 1]
                axis.axvline(cut, color="black", linestyle=":", label=f"r = {ratio:g}")
                axis.legend(fontsize=8)
            axis.set_title(f"pseudo-{'positive' if label else 'negative'}", fontsize=9)
        for axis in axes:
            axis.set_yscale("symlog", linthresh=1)
            axis.set_ylim(bottom=0)
            axis.set_xlabel("probability")


def draw_maps(path: Path, bags: Mapping[str, Mapping[str, pd.DataFrame]], size: float) -> None:
    """One row per bag, one panel per model: tiles coloured by probability, true positives outlined.

    Args:
        path: Picture to write.
        bags: Name of the bag -> name of the model -> its instances (x, y, probability, label).
        size: Side of a tile in the units of x and y.
    """
    tables = {bag: next(iter(models.values())) for bag, models in bags.items()}
    panels = [
        (bag, name, values)
        for bag, models in bags.items()
        for name, values in {
            **({"Truth": (tables[bag]["label"] == 1).to_numpy(float)} if (tables[bag]["label"] >= 0).all() else {}),
            **{name: table["probability"].to_numpy() for name, table in models.items()},
        }.items()
    ]
    abreast = len(panels) // len(bags)
    with figure(path, len(panels), abreast=abreast, width=1.5, height=1.75) as axes:
        for number, (axis, (bag, name, values)) in enumerate(zip(axes, panels, strict=True)):
            drawn = _tiles(axis, tables[bag], values, size)
            axis.set_title("\n".join(wrap(name, 14)) if number < abreast else "", fontsize=7)
            if number % abreast == 0:
                axis.set_ylabel(bag, fontsize=7)
        axes[0].figure.colorbar(drawn, ax=axes, shrink=0.6, label="probability")


def draw_examples(path: Path, tiles: Sequence[tuple[NDArray[np.uint8], str]]) -> None:
    """Some tiles, each with words below it."""
    with figure(path, len(tiles), abreast=len(tiles), width=1.6, height=1.9) as axes:
        for axis, (image, words) in zip(axes, tiles, strict=True):
            axis.imshow(image)
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_xlabel(words, fontsize=7)


@contextmanager
def figure(
    path: Path, panels: int, *, abreast: int = PANELS_ABREAST, width: float = 2.6, height: float = 2.8
) -> Iterator[list[Any]]:
    """The axes of a figure, some panels abreast; it is written when the block ends."""
    columns = min(panels, abreast)
    rows = -(-panels // columns)
    drawn, grid = plt.subplots(
        rows, columns, figsize=(width * columns + 1.9, height * rows), squeeze=False, layout="constrained"
    )
    for unused in grid.flat[panels:]:
        unused.remove()
    try:
        yield list(grid.flat[:panels])
        with atomic_path(path) as temporary:
            drawn.savefig(temporary, dpi=110, format="png")
    finally:
        plt.close(drawn)


def _tiles(axis: Any, table: pd.DataFrame, values: NDArray[np.float64], size: float) -> Any:
    """Draw the tiles of a bag, and give what a colour bar needs."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    corners = table[["x", "y"]].to_numpy(float)
    squares = [Rectangle((x, y), size, size) for x, y in corners]
    shown = np.ma.masked_less(values, VISIBLE)
    colours = mpl.colormaps["cividis"].with_extremes(bad="#dddddd")
    tiles = PatchCollection(squares, array=shown, cmap=colours, clim=(0, 1), linewidth=0)
    axis.add_collection(tiles)
    true = [square for square, label in zip(squares, table["label"], strict=True) if label == 1]
    axis.add_collection(PatchCollection(true, facecolor="none", edgecolor="#D55E00", linewidth=0.6))
    axis.set_xlim(corners[:, 0].min(), corners[:, 0].max() + size)
    axis.set_ylim(corners[:, 1].max() + size, corners[:, 1].min())
    axis.set_aspect("equal")
    axis.set_xticks([])
    axis.set_yticks([])
    return tiles


def _legend(axes: Sequence[Any]) -> None:
    """One legend for all panels, beside them."""
    unique: dict[str, Any] = {}
    for axis in axes:
        handles, names = axis.get_legend_handles_labels()
        unique |= dict(zip(names, handles, strict=True))
    if unique:
        axes[0].figure.legend(unique.values(), unique.keys(), fontsize=8, loc="outside right upper")
