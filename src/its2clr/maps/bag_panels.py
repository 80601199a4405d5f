"""The panels of a bag: the slide, the ground truth, and what each model says, all of one size and scale."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import shapely
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from its2clr.cohort.canvas import Canvas, TileCanvas, open_canvas
from its2clr.cohort.slides.annotations import read_annotations
from its2clr.cohort.slides.slide_image import SlideProblem
from its2clr.cohort.tiles import TileFile
from its2clr.errors import InputError
from its2clr.maps.heat import Window, colour, heat
from its2clr.maps.regions import find_regions
from its2clr.maps.source import Place, ScoredModel, Source
from its2clr.run.scores import BagScores
from its2clr.units import ORIGIN, Level0Pixels, MicronsPerPixel

IMAGE, TRUTH = "Image", "Ground truth"
"""Titles of the first panels."""

OPACITY = 0.65
"""Of the colours over the slide: tissue is seen through them."""

_LARGEST_ENLARGED = 640
_BLOCK_PIXELS = 2**25
_VEIL = 0.45
_ABOVE_NOTHING = 1e-6
_LABELS = {None: "", 0: " (negative)", 1: " (positive)"}

BLACK, WHITE = (0, 0, 0), (255, 255, 255)


class Truth(NamedTuple):
    """The positive area of a bag.

    Attributes:
        area: shapely geometry in pixels of level 0; may be empty.
        origin: What it was taken from, in plain words.
    """

    area: Any
    origin: str


class Panel(NamedTuple):
    """A picture with the title and caption above it, and the probability below which its map is transparent."""

    title: str
    caption: str
    image: Image.Image
    seen_from: float | None = None


class BagPanels(NamedTuple):
    """All panels of a bag.

    Attributes:
        bag_id: The bag.
        panels: Slide, ground truth if there is any, one per model.
        scale: Pixels of a panel per pixel of level 0.
        mpp_level0: Microns per pixel of level 0; NaN if unknown.
    """

    bag_id: str
    panels: list[Panel]
    scale: float
    mpp_level0: MicronsPerPixel


def draw_bag(
    source: Source, bag_id: str, models: Sequence[ScoredModel], threshold: float | None, longest: int
) -> BagPanels:
    """Draw the panels of a bag.

    Args:
        source: Where the bag is.
        bag_id: The bag.
        models: Those to show.
        threshold: Probability below which a map is transparent; None: each model's own.
        longest: Pixels of the longer side of a panel.
    """
    place = source.places[bag_id]
    tiles = place.tiles()
    scores = [model.bag(bag_id) for model in models]
    with open_canvas(tiles) as canvas:
        out = panel_size(canvas.size, longest)
        slide = _picture(canvas, tiles, out)
        truth = bag_truth(place, scores[0], canvas)
        window = Window(*ORIGIN, *canvas.size)
    panels = [Panel(IMAGE, bag_id + _LABELS[place.label], slide)]
    scale = np.array(out) / np.array(window[2:])
    if truth is not None:
        known = truth.origin if not truth.area.is_empty else "nothing positive"
        panels.append(Panel(TRUTH, known, draw_truth(slide, truth, scale)))
    for model, found in zip(models, scores, strict=True):
        seen_from = model.positive_from(threshold)
        overlay = Image.fromarray(colour(heat(found, window, out), seen_from))
        caption = f"bag probability {found.probability:.2f}"
        panels.append(Panel(model.title, caption, lay_over(slide, overlay), seen_from))
    return BagPanels(bag_id, panels, float(scale[0]), tiles.mpp_level0)


def bag_truth(place: Place, scores: BagScores, canvas: Canvas) -> Truth | None:
    """The annotation of a bag if it can still be read, else its positive tiles; None if nothing is known.

    Args:
        place: Where the bag lies.
        scores: Any scores of the bag; they carry the ground truth of its tiles.
        canvas: Its picture; its size gives the scale of a mask.
    """
    annotation = str(place.tiles().attributes.get("annotation", ""))
    if annotation:
        classes = place.cohort.info.settings.get("classes") or None
        try:
            size = canvas.size if canvas.is_slide else None
            found = read_annotations(Path(annotation), classes=classes, level0_size=size)
        except InputError:
            pass  # the labels of the tiles were taken from it when the cohort was made
        else:
            return Truth(found.tumour, "annotation")
    if scores.truth is None or not (scores.truth >= 0).any():
        return None
    return Truth(_positive_tiles(scores), "positive tiles")


def panel_size(size: tuple[int, int], longest: int) -> tuple[int, int]:
    """Width and height of a panel; small bags are enlarged by a whole number, so that tiles stay sharp."""
    scale = min(longest, max(*size, _LARGEST_ENLARGED)) / max(size)
    scale = math.floor(scale) if scale > 1 else scale
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _picture(canvas: Canvas, tiles: TileFile, out: tuple[int, int]) -> Image.Image:
    """The slide, or its tiles at their places if the slide is damaged."""
    try:
        return thumbnail(canvas, out)
    except SlideProblem:
        return TileCanvas(tiles).read(*ORIGIN, *canvas.size, out)


def thumbnail(canvas: Canvas, out: tuple[int, int]) -> Image.Image:
    """The whole canvas; a large one is read in parts, since it may have no smaller level."""
    width, height = canvas.size
    if not canvas.is_slide or width * height <= _BLOCK_PIXELS:
        return canvas.read(*ORIGIN, width, height, out)
    picture = Image.new("RGB", out)
    parts = math.ceil(math.sqrt(width * height / _BLOCK_PIXELS))
    edges = [np.linspace(0, side, parts + 1).round().astype(int).tolist() for side in out]
    for left, right in zip(edges[0][:-1], edges[0][1:], strict=True):
        for top, bottom in zip(edges[1][:-1], edges[1][1:], strict=True):
            x, x_end = (Level0Pixels(round(edge * width / out[0])) for edge in (left, right))
            y, y_end = (Level0Pixels(round(edge * height / out[1])) for edge in (top, bottom))
            size = Level0Pixels(x_end - x), Level0Pixels(y_end - y)
            picture.paste(canvas.read(x, y, *size, (right - left, bottom - top)), (left, top))
    return picture


def lay_over(slide: Image.Image, overlay: Image.Image) -> Image.Image:
    """The slide in pale grey with the overlay on it, so that all colour is the map's."""
    grey = Image.blend(slide.convert("L").convert("RGB"), Image.new("RGB", slide.size, WHITE), _VEIL)
    alpha = overlay.getchannel("A").point(lambda value: round(value * OPACITY))
    return Image.composite(overlay.convert("RGB"), grey, alpha)


def draw_truth(slide: Image.Image, truth: Truth, scale: Any) -> Image.Image:
    """The slide with the positive area outlined, and the rest paler."""
    area = shapely.transform(truth.area, lambda xy: xy * scale)
    inside = Image.fromarray(fill(area, slide.size).astype(np.uint8) * 255)
    picture = Image.composite(slide, Image.blend(slide, Image.new("RGB", slide.size, WHITE), _VEIL), inside)
    draw = ImageDraw.Draw(picture)
    width = max(1, max(slide.size) // 400)
    rings = [list(ring.coords) for part in shapely.get_parts(area) for ring in (part.exterior, *part.interiors)]
    for shade, thickness in ((WHITE, 3 * width), (BLACK, width)):  # seen on dark and on light tissue
        for ring in rings:
            draw.line(ring, fill=shade, width=thickness, joint="curve")
    return picture


def fill(area: Any, size: tuple[int, int]) -> NDArray[np.bool_]:
    """Which pixels have their centre in an area.

    Going along a row, one enters or leaves the area wherever one crosses an outline.

    Args:
        area: Valid Polygon or MultiPolygon, in pixels.
        size: Width and height.

    Returns:
        (height, width) whether it is inside.
    """
    width, height = size
    crossings = np.zeros((height, width + 1), np.int64)
    for part in shapely.get_parts(area):
        for ring in (part.exterior, *part.interiors):
            x, y = np.asarray(ring.coords)[:, :2].T
            start, end = np.minimum(y[:-1], y[1:]), np.maximum(y[:-1], y[1:])
            first, last = (np.clip(np.ceil(edge - 0.5), 0, height).astype(np.int64) for edge in (start, end))
            line = np.repeat(np.arange(len(first)), last - first)
            row = np.arange(len(line)) - np.repeat(np.cumsum(last - first) - last, last - first)
            share = (row + 0.5 - y[line]) / (y[line + 1] - y[line])
            column = np.ceil(x[line] + share * (x[line + 1] - x[line]) - 0.5)
            np.add.at(crossings, (row, np.clip(column, 0, width).astype(np.int64)), 1)
    inside: NDArray[np.bool_] = crossings.cumsum(axis=1)[:, :-1] % 2 == 1
    return inside


def _positive_tiles(scores: BagScores) -> Any:
    """The union of the positive tiles, also where other tiles overlap them."""
    assert scores.truth is not None
    positive = replace(scores, instances=(scores.truth == 1).astype(np.float64))
    return shapely.MultiPolygon([region.polygon for region in find_regions(positive, _ABOVE_NOTHING)])
