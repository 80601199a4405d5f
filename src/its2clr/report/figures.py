"""The figures of a report, as SVG inside the page: shapes and colours that the colour-blind can tell apart.

The SVG holds no addresses, and takes ink and grid from the colours of the page, light or dark.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#1b1c1d"
"""Replaced by the page's colour of text: dark on paper, light in dark mode."""
GRID = "#d0d1d2"
"""Replaced by the page's colour of faint lines."""
_PAGE_COLOURS = {INK: "currentColor", GRID: "var(--grid)"}
_KEPT: dict[Any, Any] = {"svg.fonttype": "none", "path.simplify": True}
_STYLE: dict[Any, Any] = {
    "text.parse_math": False,
    "text.usetex": False,
    "font.size": 9.0,
    "font.family": "sans-serif",
    "axes.titlesize": 9.0,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.fontsize": 8.0,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Of Okabe and Ito's palette, those that are readable on white and on black."""
MARKERS = ("o", "s", "^", "D", "v", "P")
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)))
WIDTH = 9.0
"""Inches of a figure; the page scales it."""


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


def _draw(name: str, alt: str, panels: int, height: float, paint: Callable[[Sequence[Any]], None]) -> Markup:
    """A figure of some panels side by side; `paint` draws into them."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, height))
        paint(list(figure.subplots(1, panels, squeeze=False)[0]))
        ConstrainedLayoutEngine().execute(figure)  # once: as a setting of the figure, each save does it twice
        return _inline_svg(figure, name, alt)


def _style_of(number: int) -> dict[str, Any]:
    """Colour and line of the model of this number; the same in every figure."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": LINES[number % len(LINES)]}


def intervals(models: Sequence[str], metrics: Mapping[str, Sequence[tuple[float, float, float] | None]]) -> Markup:
    """One panel per metric: each model's value with its interval (value, low, high)."""

    def paint(axes: Sequence[Any]) -> None:
        for axis, (title, values) in zip(axes, metrics.items(), strict=True):
            for number, found in enumerate(values):
                if found is None:
                    continue
                value, low, high = found
                colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
                axis.plot([low, high], [number, number], color=colour, linewidth=2.5, solid_capstyle="butt")
                axis.plot(value, number, marker, color=colour, markersize=8)
                axis.annotate(
                    f"{value:.3f}", (value, number), (0, 8), textcoords="offset points", ha="center", fontsize=8
                )
            axis.set_yticks(range(len(models)), [_plain(model) for model in models] if axis is axes[0] else [])
            axis.set_ylim(len(models) - 0.4, -0.7)
            axis.set_xlabel(title)
            axis.grid(visible=False, axis="y")
            axis.tick_params(axis="y", length=0)
            lowest = min((found[1] for found in values if found is not None), default=0.5)
            axis.set_xlim(min(0.5, lowest) - 0.02, 1.02)
            if lowest < 0.55:
                axis.axvline(0.5, color=INK, linestyle=":", linewidth=1)

    alt = "; ".join(
        f"{title}: " + ", ".join(f"{model} {v[0]:.3f}" for model, v in zip(models, values, strict=True) if v)
        for title, values in metrics.items()
    )
    return _draw("intervals", alt, len(metrics), 0.8 + 0.42 * len(models), paint)


def rates(
    name: str, what: str, roc: Mapping[str, Curve], precision_recall: Mapping[str, Curve], prevalence: float
) -> Markup:
    """ROC beside precision and recall, one line per model."""

    def paint(axes: Sequence[Any]) -> None:
        axes[0].plot([0, 1], [0, 1], color=INK, linestyle=":", linewidth=1, label="guessing 0.500")
        axes[1].axhline(prevalence, color=INK, linestyle=":", linewidth=1, label=f"guessing {prevalence:.3f}")
        for number, (model, curve) in enumerate(roc.items()):
            axes[0].plot(curve.x, curve.y, **_style_of(number), label=f"{_plain(model)}  {curve.area:.3f}")
        for number, (model, curve) in enumerate(precision_recall.items()):
            label = f"{_plain(model)}  {curve.area:.3f}"
            axes[1].plot(curve.x, curve.y, **_style_of(number), drawstyle="steps-post", label=label)
        axes[0].set(xlabel="1 - specificity (false alarms)", ylabel="sensitivity", title=f"ROC of {what}, with AUC")
        axes[1].set(
            xlabel="recall", ylabel="precision", title=f"Precision and recall of {what}, with average precision"
        )
        for axis in axes:
            axis.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16))

    alt = f"ROC curves of {what}: " + ", ".join(f"{model} AUC {curve.area:.3f}" for model, curve in roc.items())
    return _draw(name, alt, 2, 3.7 + 0.16 * len(roc), paint)


def calibration(bins: Mapping[str, Sequence[Reliability]]) -> Markup:
    """One panel per model: share of positives over predicted probability, with intervals and counts."""

    def paint(axes: Sequence[Any]) -> None:
        for number, (axis, (model, found)) in enumerate(zip(axes, bins.items(), strict=True)):
            colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
            axis.plot([0, 1], [0, 1], color=INK, linestyle=":", linewidth=1)
            for one in found:
                axis.plot([one.predicted] * 2, [one.low, one.high], color=colour, linewidth=1)
                axis.annotate(
                    str(one.bags),
                    (one.predicted, one.high),
                    (0, 5),
                    textcoords="offset points",
                    fontsize=7,
                    ha="center",
                )
            axis.plot([one.predicted for one in found], [one.positive for one in found], marker + "-", color=colour)
            axis.set(xlim=(-0.03, 1.08), ylim=(-0.03, 1.15), xlabel="predicted probability", title=_plain(model))
        axes[0].set_ylabel("share that is positive")

    return _draw("calibration", "Reliability of bag probabilities for " + ", ".join(bins), len(bins), 2.9, paint)


def distributions(
    scores: Mapping[str, tuple[NDArray[np.float64], NDArray[np.int64]]], thresholds: Mapping[str, float]
) -> Markup:
    """One panel per model: the probabilities of negative and positive test bags, and the validation threshold."""
    from matplotlib.ticker import MaxNLocator

    def paint(axes: Sequence[Any]) -> None:
        edges = np.linspace(0, 1, 26)
        for axis, (model, (values, labels)) in zip(axes, scores.items(), strict=True):
            for label, colour, hatch, sign in ((1, COLOURS[1], "//", 1), (0, COLOURS[0], "", -1)):
                counts, _ = np.histogram(values[labels == label], edges)
                name = f"{'positive' if label else 'negative'} bags"
                axis.bar(
                    edges[:-1], sign * counts, 0.04, align="edge", color=colour, label=name, hatch=hatch, edgecolor=GRID
                )
            axis.axhline(0, color=INK, linewidth=0.8)
            axis.axvline(thresholds[model], color=INK, linestyle="--", linewidth=1.2, label="validation threshold")
            axis.yaxis.set_major_formatter(lambda value, _: f"{abs(value):.0f}")
            axis.yaxis.set_major_locator(MaxNLocator(5, integer=True))
            axis.set(xlim=(0, 1), xlabel="bag probability", title=_plain(model))
        axes[0].set_ylabel("bags (negative below)")
        axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)

    return _draw("distributions", "Bag probabilities by class for " + ", ".join(scores), len(scores), 3.1, paint)


def lines(name: str, alt: str, panels: Sequence[Panel]) -> Markup:
    """Panels of lines, up to four side by side."""
    from matplotlib.ticker import MaxNLocator

    def paint(axes: Sequence[Any]) -> None:
        for axis, panel in zip(axes, panels, strict=True):
            for number, line in enumerate(panel.lines):
                marker = MARKERS[number] if len(line.x) <= 40 else ""
                axis.plot(line.x, line.y, marker=marker, **_style_of(number), label=line.name)
                if number == 0 and panel.hollow is not None:
                    kept = [(x, y) for x, y, hollow in zip(line.x, line.y, panel.hollow, strict=True) if hollow]
                    if kept:
                        x, y = zip(*kept, strict=True)
                        axis.plot(x, y, "o", color="white", markeredgecolor=COLOURS[0], label="labels kept", zorder=3)
            if panel.limit is not None:
                axis.axhline(panel.limit[1], color=INK, linestyle=":", linewidth=1, label=panel.limit[0])
            axis.set(title=panel.title, xlabel=panel.x_title)
            axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            if panel.unit:
                axis.set_ylim(-0.03, 1.03)
            if len(panel.lines) > 1 or panel.limit is not None or (panel.hollow and any(panel.hollow)):
                axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22))

    return _draw(name, alt, len(panels), 3.0, paint)


def maps(points: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]], classes: NDArray[np.int64],
         words: Mapping[int, str]) -> Markup:  # fmt: skip
    """One panel per encoder: instances in the plane of its two largest principal components.

    Args:
        points: Title -> (n, 2) places, and the share of the variance on each axis.
        classes: (n,) 1, 0 or -1 of each instance.
        words: What each of these is called.
    """

    def paint(axes: Sequence[Any]) -> None:
        for axis, (title, (places, shares)) in zip(axes, points.items(), strict=True):
            for label, colour, marker in ((-1, "#888888", "s"), (0, COLOURS[0], "o"), (1, COLOURS[1], "^")):
                chosen = places[classes == label]
                if len(chosen):
                    name = f"{words[label]} ({len(chosen):,})"
                    axis.scatter(
                        chosen[:, 0], chosen[:, 1], s=16 if label == 1 else 8, marker=marker, color=colour,
                        alpha=0.75 if label == 1 else 0.4, linewidths=0, label=name, rasterized=True,
                    )  # fmt: skip
            axis.set(
                title=title, xticks=[], yticks=[], xlabel=f"component 1 ({shares[0]:.0%} of variance)",
                ylabel=f"component 2 ({shares[1]:.0%})",
            )  # fmt: skip
        axes[0].figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, markerscale=1.6
        )

    alt = "Principal components of tile features: " + ", ".join(points)
    import matplotlib as mpl

    with mpl.rc_context({"savefig.dpi": 150}):
        return _draw("maps", alt, len(points), 4.2, paint)


def _inline_svg(figure: "Figure", name: str, alt: str) -> Markup:
    """A figure as one `<svg>` element.

    Args:
        figure: The figure; names of the user's in it must have gone through `_plain`.
        name: Begins every id, so that figures of one page do not share any.
        alt: What it shows, for those who do not see it.
    """
    import matplotlib as mpl

    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with mpl.rc_context({**_KEPT, "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'^<svg[^>]*?(viewBox="[^"]*")[^>]*>', lambda found: _opening(found.group(1), alt), text, count=1)
    for stands_for, colour in _PAGE_COLOURS.items():
        text = text.replace(stands_for, colour)
    return Markup(_own_ids(text, name))  # noqa: S704 - matplotlib escapes every text it writes


def _plain(name: str) -> str:
    """A name of the user's as text of a figure: on one line, and cut where it is long."""
    shown = name if len(name) <= 40 else f"{name[:37]}..."
    return "".join(letter if letter.isprintable() else " " for letter in shown)


def _opening(view_box: str, alt: str) -> str:
    width = view_box.split('"')[1].split()[2]
    return f'<svg {view_box} role="img" aria-label="{escape(alt)}" style="--drawn: {float(width):.0f}">'


def _own_ids(text: str, name: str) -> str:
    """Remove ids that nothing refers to, and begin the others with the figure's name."""
    used = set(re.findall(r'(?:url\(#|href="#)([\w.-]+)', text))

    def renamed(found: re.Match[str]) -> str:
        return f' id="{name}-{found.group(1)}"' if found.group(1) in used else ""

    text = re.sub(r'\sid="([^"]*)"', renamed, text)
    return re.sub(r'(url\(#|href="#)([\w.-]+)', rf"\g<1>{name}-\g<2>", text)
