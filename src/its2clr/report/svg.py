"""Figures as SVG that lives inside an HTML page: no addresses in it, and the page's colours for ink and grid."""

import io
import re
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from markupsafe import Markup, escape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#1b1c1d"
"""Stands for the page's colour of text, whatever it is: dark on paper, light at night."""
GRID = "#d0d1d2"
"""Stands for the page's colour of faint lines."""
_PAGE_COLOURS = {INK: "currentColor", GRID: "var(--grid)"}
_KEPT: dict[Any, Any] = {"svg.fonttype": "none", "path.simplify": True}
STYLE: dict[Any, Any] = {
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


def inline_svg(figure: "Figure", name: str, alt: str) -> Markup:
    """A figure as one `<svg>` element.

    Args:
        figure: The figure; names of the user's in it must have gone through `plain`.
        name: Begins every id, so that figures of one page do not share any.
        alt: What it shows, for those who do not see it.
    """
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


def plain(name: str) -> str:
    """A name of the user's as text of a figure: on one line, and cut where it is long."""
    shown = name if len(name) <= 40 else f"{name[:37]}..."
    return "".join(letter if letter.isprintable() else " " for letter in shown)


def _opening(view_box: str, alt: str) -> str:
    width = view_box.split('"')[1].split()[2]
    return f'<svg {view_box} role="img" aria-label="{escape(alt)}" style="--drawn: {float(width):.0f}">'


def _own_ids(text: str, name: str) -> str:
    """Drops ids that nothing refers to, and makes the others the figure's own."""
    used = set(re.findall(r'(?:url\(#|href="#)([\w.-]+)', text))

    def renamed(found: re.Match[str]) -> str:
        return f' id="{name}-{found.group(1)}"' if found.group(1) in used else ""

    text = re.sub(r'\sid="([^"]*)"', renamed, text)
    return re.sub(r'(url\(#|href="#)([\w.-]+)', rf"\g<1>{name}-\g<2>", text)
