"""Write maps as pictures: the panels of bags with titles, captions, scale bars and the legend of the colours.

```
maps.png             several bags at a glance
bags/<bag_id>.png    one bag: image, ground truth, one panel per model
```
In names of files, characters that file systems refuse are percent-encoded, as in the cohort.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from its2clr.errors import InputError
from its2clr.files import atomic_path
from its2clr.maps.bag_panels import BLACK, IMAGE, TRUTH, WHITE, BagPanels, draw_bag, lay_over
from its2clr.maps.heat import check_threshold, colour
from its2clr.maps.source import ScoredModel, Source, bag_file, said_thresholds

SHEET_FILE = "maps.png"
SHEET_BAGS = 6
_SHEET_LONGEST = 400
_SMALLEST, _LARGEST = 32, 20_000
_GREY = (90, 90, 90)
_TISSUE = (170, 170, 170)
"""A common brightness of tissue: the legend shows the colours as they look on it."""

_BAR_SHARE = 0.3
_LEGEND_WIDTH = 320


def write_maps(
    source: Source,
    bag_ids: Sequence[str],
    models: Sequence[ScoredModel],
    out: Path,
    *,
    threshold: float | None = None,
    longest: int = 1600,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the picture of every bag, and the sheet of the first six.

    Args:
        source: Where the bags are.
        bag_ids: The bags.
        models: Those to show.
        out: Folder to write into.
        threshold: Probability below which maps are transparent; None: each model's own.
        longest: Pixels of the longer side of a panel.
        progress: Called with the number of bags done and of all bags.

    Returns:
        The sheet.

    Raises:
        InputError: If there is no bag, or a setting is out of range.
    """
    check_threshold(threshold)
    if not _SMALLEST <= longest <= _LARGEST:
        raise InputError(f"longest is the longer side of a panel, from {_SMALLEST} to {_LARGEST} pixels; got {longest}")
    if not bag_ids:
        raise InputError(f"{source.path}: no bags were chosen to draw")
    for done, bag_id in enumerate(bag_ids, start=1):
        row = draw_bag(source, bag_id, models, threshold, longest)
        _save(lay_out([row]), bag_file(out / "bags", bag_id, ".png"))
        if progress is not None:
            progress(done, len(bag_ids))
    rows = [draw_bag(source, bag_id, models, threshold, _SHEET_LONGEST) for bag_id in bag_ids[:SHEET_BAGS]]
    _save(lay_out(rows), out / SHEET_FILE)
    return out / SHEET_FILE


def lay_out(rows: Sequence[BagPanels]) -> Image.Image:
    """One row of panels per bag, titles above the first row, the legend below the last.

    Args:
        rows: The bags; panels of the same title are one column.
    """
    titles = list(dict.fromkeys(panel.title for row in rows for panel in row.panels))
    titles.sort(key=lambda title: {IMAGE: 0, TRUTH: 1}.get(title, 2))
    widest = {
        title: max(panel.image.width for row in rows for panel in row.panels if panel.title == title)
        for title in titles
    }
    text = min(36, max(13, min(widest.values()) // 26))  # pixels of the text's height
    gap, line = text, round(text * 1.4)
    heights = [max(panel.image.height for panel in row.panels) for row in rows]
    seen_from = {panel.title: panel.seen_from for row in rows for panel in row.panels if panel.seen_from is not None}
    legend = _legend(seen_from, text)
    width = max(sum(widest.values()) + gap * (len(titles) + 1), legend.width + 2 * gap)
    height = gap + line + sum(heights) + len(rows) * (line + gap) + legend.height + gap
    sheet = Image.new("RGB", (width, height), WHITE)
    draw = ImageDraw.Draw(sheet)
    lefts = dict(zip(titles, np.cumsum([gap, *(widest[title] + gap for title in titles)]).tolist(), strict=False))
    for title, left in lefts.items():
        draw.text((left, gap), _fitted(title, widest[title], text, bold=True), BLACK, _font(text, bold=True))
    top = gap + line
    for row, row_height in zip(rows, heights, strict=True):
        for number, panel in enumerate(row.panels):
            left = lefts[panel.title]
            draw.text((left, top), _fitted(panel.caption, widest[panel.title], text), _GREY, _font(text))
            image = panel.image if number else _with_scale_bar(panel.image, row, text)
            sheet.paste(image, (left, top + line))
        top += line + row_height + gap
    sheet.paste(legend, (gap, top))
    return sheet


def _save(picture: Image.Image, path: Path) -> None:
    with atomic_path(path) as temporary:
        picture.save(temporary, "PNG", compress_level=4)


def _with_scale_bar(image: Image.Image, row: BagPanels, text: int) -> Image.Image:
    """A bar of a round length in microns in the lower left corner, if the scale is known."""
    microns = row.mpp_level0 / row.scale  # per pixel of the panel
    if not math.isfinite(microns):
        return image
    length = _round_length(image.width * _BAR_SHARE * microns)
    name = f"{length / 1000:g} mm" if length >= 1000 else f"{length:g} µm"
    size, thick = max(11, round(text * 0.8)), max(2, text // 5)
    pixels, pad = round(length / microns), max(3, text // 3)
    wide = max(pixels, math.ceil(_font(size).getlength(name))) + 2 * pad
    high = round(size * 1.3) + thick + 2 * pad
    marked = image.copy()
    draw = ImageDraw.Draw(marked)
    top = image.height - high
    draw.rectangle((0, top, wide - 1, image.height - 1), fill=WHITE)
    draw.text((pad, top + pad // 2), name, BLACK, _font(size))
    draw.rectangle((pad, image.height - pad - thick, pad + pixels - 1, image.height - pad - 1), fill=BLACK)
    return marked


def _round_length(longest: float) -> float:
    """The largest of 1, 2, 5, 10, 20, ... that is not longer."""
    power = 10.0 ** math.floor(math.log10(longest))
    return max(step * power for step in (1, 2, 5) if step * power <= longest * (1 + 1e-9))


def _legend(seen_from: Mapping[str, float], text: int) -> Image.Image:
    """The colours from 0 to 1 as they look on a map, with the threshold; where models differ, with each one's."""
    small = max(11, round(text * 0.9))
    width, bar = _LEGEND_WIDTH * text // 16, text
    name = "Probability of a tile to be positive"
    least = min(seen_from.values())
    note = f"transparent below {said_thresholds(seen_from)}"
    font = _font(small)
    pad = math.ceil(font.getlength("0.0"))
    total = width + math.ceil(max(font.getlength(name), font.getlength(note))) + 3 * pad
    picture = Image.new("RGB", (total, bar + round(small * 1.6)), WHITE)
    draw = ImageDraw.Draw(picture)
    scale = np.tile((np.arange(width) + 0.5) / width, (bar, 1))
    tissue = Image.new("RGB", (width, bar), _TISSUE)
    picture.paste(lay_over(tissue, Image.fromarray(colour(scale, least))), (pad // 2, 0))
    draw.rectangle((pad // 2, 0, pad // 2 + width - 1, bar - 1), outline=_GREY)
    for value in sorted({0.0, *seen_from.values(), 0.5, 1.0}):
        x = pad // 2 + value * width
        draw.line((x, bar, x, bar + small // 5), fill=_GREY)
        draw.text((x, bar + small // 5), f"{value:.2g}", BLACK, font, anchor="mt")
    draw.text((width + pad * 3 // 2, 0), name, BLACK, font)
    draw.text((width + pad * 3 // 2, round(small * 1.3)), note, _GREY, font)
    return picture


def _fitted(words: str, width: int, size: int, *, bold: bool = False) -> str:
    """Text on one line that is not wider than a panel."""
    words = "".join(letter if letter.isprintable() else " " for letter in words)
    font = _font(size, bold=bold)
    if font.getlength(words) <= width:
        return words
    while words and font.getlength(words + "…") > width:
        words = words[:-1]
    return words + "…"


@cache
def _font(size: int, *, bold: bool = False) -> ImageFont.FreeTypeFont:
    import matplotlib as mpl

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(Path(mpl.get_data_path()) / "fonts" / "ttf" / name, size)
