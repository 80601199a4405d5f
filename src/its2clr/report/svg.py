"""Figures as SVG: axes, lines, marks, areas, notes and legends.

A drawing library takes longer to import and to draw with than everything else of a report together. Ink, grid and fonts
are those of the page (`report.css`), light or dark.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup
from rich.cells import cell_len

INK = "currentColor"
NO_LINE = "none"
_WIDTH = 648.0
_TITLE, _BELOW, _ROW, _GAP, _SWATCH = 18.0, 34.0, 12.0, 8.0, 24.0
_LETTER = 4.7
"""Mean width of a letter of the labels."""
_MARKS = {
    "o": "M-1 0a1 1 0 1 0 2 0a1 1 0 1 0-2 0z",
    "s": "M-.9-.9h1.8v1.8h-1.8z",
    "^": "M0-1.2L1.1.8h-2.2z",
    "D": "M0-1.3L1.3 0 0 1.3-1.3 0z",
    "v": "M0 1.2L1.1-.8h-2.2z",
    "P": "M-.4-1.2h.8v.8h.8v.8h-.8v.8h-.8v-.8h-.8v-.8h.8z",
}


class Look(NamedTuple):
    """How points are drawn: the line through them, the area that it bounds, the marks on them.

    Attributes:
        colour: Of all of these.
        dash: Dashes of the line; "" for a solid one, `NO_LINE` for none.
        width: Of the line.
        filled: Whether the area is.
        mark: Shape of the marks, as a letter; "" for none.
        size: Half the height of a mark.
        opacity: Of each mark.
        hollow: Whether a mark is an outline.
    """

    colour: str = INK
    dash: str = ""
    width: float = 1.0
    filled: bool = False
    mark: str = ""
    size: float = 2.7
    opacity: float = 1.0
    hollow: bool = False


class Axes:
    """One panel of a figure, and what is drawn in it.

    Args:
        x: Ends of the horizontal axis.
        y: What is at the lower and at the upper end of the vertical one.
        title: Above the panel.
        x_title: Below it.
        y_title: Beside it.
        x_ticks: Place -> label; chosen if None.
        y_ticks: The same for the vertical axis.

    Attributes:
        drawn: What is drawn: places and looks, in order.
        notes: Places and words above them.
        legend: Words -> look.
    """

    def __init__(
        self, x: tuple[float, float], y: tuple[float, float], *, title: str = "", x_title: str = "", y_title: str = "",
        x_ticks: Mapping[float, str] | None = None, y_ticks: Mapping[float, str] | None = None,
    ) -> None:  # fmt: skip
        self.x, self.y, self.title, self.x_title, self.y_title = x, y, title, x_title, y_title
        self.x_ticks = ticks(*x) if x_ticks is None else x_ticks
        self.y_ticks = ticks(*y) if y_ticks is None else y_ticks
        self.drawn: list[tuple[list[tuple[float, float]], Look]] = []
        self.notes: list[tuple[float, float, str]] = []
        self.legend: dict[str, Look] = {}

    def draw(self, x: Iterable[float], y: Iterable[float], look: Look, label: str = "") -> None:
        """Draw points; the legend has them if they have a label."""
        self.drawn.append((list(zip(x, y, strict=True)), look))
        if label:
            self.legend[label] = look

    @property
    def margin(self) -> float:
        """What labels need on the left."""
        longest = max((cell_len(label) for label in self.y_ticks.values()), default=0)
        return longest * _LETTER + _GAP + (_TITLE if self.y_title else 0)


def ticks(low: float, high: float, most: int = 8, *, integer: bool = False) -> dict[float, str]:
    """Round numbers from one end of an axis to the other, with as many decimals as they need."""
    least = max((high - low) / most, 1.0 if integer else 0.0) * (1 - 1e-9)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= least)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    numbers = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return {number * step: f"{number * step:.{decimals}f}" for number in numbers}


def ends(values: Iterable[float]) -> tuple[float, float]:
    """Ends of an axis that shows some values, with room on either side."""
    found = list(values)
    low, high = min(found), max(found)
    room = 0.05 * (high - low)
    if room <= 1e-6 * abs(high):  # all alike
        room = 0.05 * (abs(high) or 1.0)
    return low - room, high + room


def figure(name: str, alt: str, panels: Sequence[Axes], height: float, *, one_legend: bool = False) -> Markup:
    """Panels side by side as one `<svg>` element.

    Args:
        name: Begins every id, so that figures of one page do not share any.
        alt: What it shows, for those who do not see it.
        panels: The panels.
        height: Of what a panel has between its titles.
        one_legend: Whether the legend of the first panel, in one row, is that of all.
    """
    marks: dict[Look, str] = {}

    def show(points: Iterable[tuple[float, float]], look: Look) -> Markup:
        places = [f"{x:.1f},{y:.1f}" for x, y in points]
        if look.mark:
            places = [places[0], *places, places[-1]]  # marks are those of middle points
            marks.setdefault(look, f"{name}-{len(marks)}")
        return _element(
            "polyline", points=" ".join(places), stroke_dasharray=look.dash if look.dash != NO_LINE else "",
            fill=look.colour if look.filled else "none", stroke=look.colour if look.dash != NO_LINE else "none",
            stroke_width=look.width, marker_mid=f"url(#{marks[look]})" if look.mark else "",
        )  # fmt: skip

    share = _WIDTH / len(panels)
    inner = max((axes.margin for axes in panels[1:]), default=0.0)
    bottom, rows = _TITLE + height + _BELOW, 0
    parts: list[Markup] = []
    for number, axes in enumerate(panels):
        left, right = number * share + (inner if number else axes.margin), (number + 1) * share - _GAP
        parts += _panel(axes, left, right, _TITLE + height, show)
        if not one_legend:
            parts += _legend(axes.legend, (left + right) / 2, bottom, 1, show)
            rows = max(rows, len(axes.legend))
    if one_legend:
        parts += _legend(panels[0].legend, _WIDTH / 2, bottom, len(panels[0].legend), show)
        rows = 1
    size = f"0 0 {_WIDTH:.0f} {bottom + rows * _ROW:.0f}"
    defined = Markup().join(_marker(mark, look) for look, mark in marks.items())
    return _element("svg", defined + Markup().join(parts), viewBox=size, role="img", aria_label=alt)


_Show = Callable[[Iterable[tuple[float, float]], Look], Markup]


def _panel(axes: Axes, left: float, right: float, bottom: float, show: _Show) -> Iterator[Markup]:
    """Grid, ticks and titles, and what is drawn in the panel."""
    (first, last), (low, high) = axes.x, axes.y

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (x - first) / (last - first), (y - low) / (high - low)
        return left + across * (right - left), bottom - up * (bottom - _TITLE)

    columns = {place(x, low)[0]: label for x, label in axes.x_ticks.items()}
    rows = {place(first, y)[1]: label for y, label in axes.y_ticks.items()}
    grid = [f"M{x:.1f} {_TITLE}V{bottom}" for x in (left, *columns)]
    grid += [f"M{left:.1f} {y:.1f}H{right:.1f}" for y in (bottom, *rows)]
    yield _element("path", d="".join(grid), class_="grid")
    for x, label in columns.items():
        yield _text(x, bottom + 11, label, "tick middle")
    for y, label in rows.items():
        yield _text(left - 4, y + 3, label, "tick end")
    middle = (left + right) / 2
    yield _text(middle - axes.margin / 2, _TITLE - 6, axes.title, "middle")
    yield _text(middle, bottom + 24, axes.x_title, "middle")
    yield _text(left - axes.margin + 8, (bottom + _TITLE) / 2, axes.y_title, "middle upright")
    for points, look in axes.drawn:
        yield show(itertools.starmap(place, points), look)
    for x, y, words in axes.notes:
        across, down = place(x, y)
        yield _text(across, down - 6, words, "tick middle")


def _legend(legend: Mapping[str, Look], middle: float, top: float, abreast: int, show: _Show) -> Iterator[Markup]:
    """Samples with words, some abreast."""
    width = max((cell_len(words) for words in legend), default=0) * _LETTER + _SWATCH + 2 * _GAP
    for number, (words, look) in enumerate(legend.items()):
        row, column = divmod(number, abreast)
        x, y = middle + (column - abreast / 2) * width, top + (row + 0.5) * _ROW
        if look.filled:
            yield show([(x, y - 3), (x, y + 3), (x + _SWATCH, y + 3), (x + _SWATCH, y - 3)], look)
        else:
            yield show([(x, y), (x + _SWATCH, y)], look._replace(mark=""))
            yield show([(x + _SWATCH / 2, y)], look)
        yield _text(x + _SWATCH + _GAP, y + 3, words, "tick")


def _marker(name: str, look: Look) -> Markup:
    paint = {"class_": "hollow", "stroke": look.colour, "stroke_width": 0.5} if look.hollow else {"fill": look.colour}
    shape = _element("path", d=_MARKS[look.mark], opacity=look.opacity, **paint)
    side = 2 * look.size
    return _element(
        "marker", shape, id=name, viewBox="-1 -1 2 2", markerWidth=side, markerHeight=side,
        markerUnits="userSpaceOnUse", overflow="visible",
    )  # fmt: skip


def _text(x: float, y: float, words: str, kinds: str) -> Markup:
    return _element("text", words, x=f"{x:.1f}", y=f"{y:.1f}", class_=kinds) if words else Markup()


def _element(tag: str, content: str = "", **attributes: object) -> Markup:
    """One element; attributes that are empty are left out."""
    given = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items() if value != ""}
    inside = Markup().join(Markup(' {}="{}"').format(*one) for one in given.items())
    return Markup("<{0}{1}>{2}</{0}>").format(tag, inside, content)
