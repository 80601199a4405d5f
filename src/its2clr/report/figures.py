"""The figures of a report: shapes and colours that the colour-blind can tell apart."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from its2clr.report.svg import INK, NO_LINE, Axes, Look, ends, figure, ticks

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Of Okabe and Ito's palette, those that are readable on white and on black."""
MARKERS = ("o", "s", "^", "D", "v", "P")
LINES = ("", "6 2.5", "9 2.5 1.6 2.5", "1.6 2.5", "8 2", "5 2 1.6 2 1.6 2")
DOTTED = Look(INK, "1 1.6")
UNIT = (-0.02, 1.02)


class Curve(NamedTuple):
    """Points from left to right, and the area below all of them (before some were left out)."""

    x: NDArray[np.float64]
    y: NDArray[np.float64]
    area: float


class Reliability(NamedTuple):
    """One bin of predicted probability: its mean, the share that was positive with a 95% interval, how many bags."""

    predicted: float
    positive: float
    low: float
    high: float
    bags: int


class Line(NamedTuple):
    """One line of a panel."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


class Panel(NamedTuple):
    """One panel of lines.

    Attributes:
        title: What is on the vertical axis.
        x_title: What is on the horizontal axis.
        lines: The lines.
        limit: A dotted horizontal line with its name.
        hollow: Points of the first line drawn hollow.
        unit: Whether the vertical axis is 0 to 1.
    """

    title: str
    x_title: str
    lines: Sequence[Line]
    limit: tuple[str, float] | None = None
    hollow: Sequence[bool] | None = None
    unit: bool = False


def look_of(number: int, width: float = 1.6) -> Look:
    """Colour and line of the model of this number; the same in every figure."""
    return Look(COLOURS[number % len(COLOURS)], LINES[number % len(LINES)], width)


def intervals(models: Sequence[str], metrics: Mapping[str, Sequence[tuple[float, float, float] | None]]) -> Markup:
    """One panel per metric: each model's value with its interval (value, low, high)."""
    panels: list[Axes] = []
    for title, values in metrics.items():
        lowest = min((found[1] for found in values if found is not None), default=0.5)
        x = (min(0.5, lowest) - 0.02, 1.02)
        names = {} if panels else {float(row): _plain(model) for row, model in enumerate(models)}
        axes = Axes(x, (len(models) - 0.4, -0.7), x_title=title, y_ticks=names)
        if lowest < 0.55:
            axes.draw([0.5, 0.5], axes.y, DOTTED)
        for number, found in enumerate(values):
            if found is None:
                continue
            look = look_of(number, 2.5)._replace(dash="", mark=MARKERS[number % len(MARKERS)], size=4.5)
            axes.draw(found[1:], [number] * 2, look._replace(mark=""))
            axes.draw(found[:1], [number], look)
            axes.notes.append((found[0], number, f"{found[0]:.3f}"))
        panels.append(axes)
    alt = "; ".join(
        f"{title}: " + ", ".join(f"{model} {v[0]:.3f}" for model, v in zip(models, values, strict=True) if v)
        for title, values in metrics.items()
    )
    return figure("intervals", alt, panels, 30 + 30 * len(models))


def rates(
    name: str, what: str, roc: Mapping[str, Curve], precision_recall: Mapping[str, Curve], prevalence: float
) -> Markup:
    """ROC beside precision and recall, one line per model."""
    titles = f"ROC of {what}, with AUC", f"Precision and recall of {what}, with average precision"
    panels = [
        Axes(UNIT, UNIT, title=titles[0], x_title="1 - specificity (false alarms)", y_title="sensitivity"),
        Axes(UNIT, UNIT, title=titles[1], x_title="recall", y_title="precision"),
    ]
    panels[0].draw([0, 1], [0, 1], DOTTED, "guessing 0.500")
    panels[1].draw(UNIT, [prevalence] * 2, DOTTED, f"guessing {prevalence:.3f}")
    for number, (model, curve) in enumerate(roc.items()):
        panels[0].draw(curve.x, curve.y, look_of(number), f"{_plain(model)}  {curve.area:.3f}")
    for number, (model, curve) in enumerate(precision_recall.items()):
        x, y = np.repeat(curve.x, 2)[1:], np.repeat(curve.y, 2)[:-1]
        panels[1].draw(x, y, look_of(number), f"{_plain(model)}  {curve.area:.3f}")
    alt = f"ROC curves of {what}: " + ", ".join(f"{model} AUC {curve.area:.3f}" for model, curve in roc.items())
    return figure(name, alt, panels, 196)


def calibration(bins: Mapping[str, Sequence[Reliability]]) -> Markup:
    """One panel per model: share of positives over predicted probability, with intervals and counts."""
    panels: list[Axes] = []
    for number, (model, found) in enumerate(bins.items()):
        y_title = "" if panels else "share that is positive"
        axes = Axes((-0.03, 1.08), (-0.03, 1.15), title=_plain(model), x_title="predicted probability", y_title=y_title)
        look = look_of(number)._replace(dash="")
        axes.draw([0, 1], [0, 1], DOTTED)
        for one in found:
            axes.draw([one.predicted] * 2, [one.low, one.high], look._replace(width=1))
            axes.notes.append((one.predicted, one.high, str(one.bags)))
        marked = look._replace(mark=MARKERS[number % len(MARKERS)])
        axes.draw([one.predicted for one in found], [one.positive for one in found], marked)
        panels.append(axes)
    return figure("calibration", "Reliability of bag probabilities for " + ", ".join(bins), panels, 160)


def distributions(
    scores: Mapping[str, tuple[NDArray[np.float64], NDArray[np.int64]]], thresholds: Mapping[str, float]
) -> Markup:
    """One panel per model: the probabilities of negative and positive test bags, and the validation threshold."""
    panels: list[Axes] = []
    edges = np.linspace(0, 1, 26)
    for model, (values, labels) in scores.items():
        bags = {label: np.histogram(values[labels == label], edges)[0] for label in (0, 1)}
        low, high = -1.05 * float(max(bags[0].max(), 1)), 1.05 * float(max(bags[1].max(), 1))
        marks = {place: label.removeprefix("-") for place, label in ticks(low, high, integer=True).items()}
        y_title = "" if panels else "bags (negative below)"
        axes = Axes((0, 1), (low, high), title=_plain(model), x_title="bag probability", y_title=y_title, y_ticks=marks)
        for label, name, sign in ((1, "positive bags", 1), (0, "negative bags", -1)):
            steps = [0, *np.repeat(sign * bags[label], 2), 0]
            axes.draw(np.repeat(edges, 2), steps, Look(COLOURS[label], NO_LINE, filled=True), name)
        axes.draw([0, 1], [0, 0], Look())
        axes.draw([thresholds[model]] * 2, axes.y, Look(INK, "4 2", 1.2), "validation threshold")
        panels.append(axes)
    alt = "Bag probabilities by class for " + ", ".join(scores)
    return figure("distributions", alt, panels, 155, one_legend=True)


def lines(name: str, alt: str, panels: Sequence[Panel]) -> Markup:
    """Panels of lines, up to four side by side."""
    return figure(name, alt, [_lines(panel) for panel in panels], 132)


def _lines(panel: Panel) -> Axes:
    x = ends(value for line in panel.lines for value in line.x)
    shown = [value for line in panel.lines for value in line.y] + ([panel.limit[1]] if panel.limit else [])
    y = (-0.03, 1.03) if panel.unit else ends(shown)
    axes = Axes(x, y, title=panel.title, x_title=panel.x_title, x_ticks=ticks(*x, 5, integer=True))
    for number, line in enumerate(panel.lines):
        mark = MARKERS[number] if len(line.x) <= 40 else ""
        axes.draw(line.x, line.y, look_of(number)._replace(mark=mark), line.name)
    if any(panel.hollow or ()):
        first = panel.lines[0]
        kept = [(x, y) for x, y, hollow in zip(first.x, first.y, panel.hollow or (), strict=True) if hollow]
        x_kept, y_kept = np.transpose(kept)
        axes.draw(x_kept, y_kept, Look(COLOURS[0], NO_LINE, mark="o", hollow=True), "labels kept")
    if panel.limit is not None:
        axes.draw(x, [panel.limit[1]] * 2, DOTTED, panel.limit[0])
    if len(axes.legend) == 1:
        axes.legend.clear()  # the title says it
    return axes


def maps(points: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]], classes: NDArray[np.int64],
         words: Mapping[int, str]) -> Markup:  # fmt: skip
    """One panel per encoder: instances in the plane of its two largest principal components.

    Args:
        points: Title -> (n, 2) places, and the share of the variance on each axis.
        classes: (n,) 1, 0 or -1 of each instance.
        words: What each of these is called.
    """
    panels: list[Axes] = []
    for title, (places, shares) in points.items():
        x_title, y_title = f"component 1 ({shares[0]:.0%} of variance)", f"component 2 ({shares[1]:.0%})"
        axes = Axes(
            ends(places[:, 0]),
            ends(places[:, 1]),
            title=title,
            x_title=x_title,
            y_title=y_title,
            x_ticks={},
            y_ticks={},
        )
        for label, colour, mark in ((-1, "#888888", "s"), (0, COLOURS[0], "o"), (1, COLOURS[1], "^")):
            chosen = places[classes == label]
            if len(chosen):
                size, opacity = (2.2, 0.75) if label == 1 else (1.4, 0.4)
                look = Look(colour, NO_LINE, mark=mark, size=size, opacity=opacity)
                axes.draw(chosen[:, 0], chosen[:, 1], look, f"{words[label]} ({len(chosen):,})")
        panels.append(axes)
    return figure("maps", "Principal components of tile features: " + ", ".join(points), panels, 250, one_legend=True)


def _plain(name: str) -> str:
    """A name of the user's as text of a figure: on one line, and cut where it is long."""
    shown = name if len(name) <= 40 else f"{name[:37]}..."
    return "".join(letter if letter.isprintable() else " " for letter in shown)
