"""Ground truth of the tiles of a slide from its annotation, and whether the two can belong together."""

from typing import Any

import numpy as np
import numpy.typing as npt
import shapely

from its2clr.cohort.slides.annotations import Annotations, covered_share, instance_labels, read_annotations
from its2clr.cohort.slides.manifest import Slide
from its2clr.cohort.slides.slide_image import Level, SlideProblem
from its2clr.errors import InputError

_MOST_OUTSIDE = 0.01


def read_ground_truth(slide: Slide, base: Level, classes: tuple[str, ...]) -> Annotations | None:
    """The annotated regions of a slide at level 0; None without annotation.

    Args:
        slide: The slide.
        base: Its level 0.
        classes: Classes that count as tumour; none named: those that are known to.

    Raises:
        SlideProblem: If the annotation cannot be read, or lies beside the slide.
    """
    if slide.annotation is None:
        return None
    try:
        found = read_annotations(slide.annotation, classes=classes or None, level0_size=(base.width, base.height))
    except InputError as error:
        raise SlideProblem(f"its annotation cannot be used: {error}") from error
    outside = _share_outside(found.tumour, base)
    if outside == 1:
        left, top, right, bottom = found.tumour.bounds
        place = f"x {left:.0f} to {right:.0f}, y {top:.0f} to {bottom:.0f}"
        advice = f"outside the slide of {base.width} x {base.height} pixels; is it of another slide, or in other units?"
        raise SlideProblem(f"its annotation cannot be used: {slide.annotation}: all of it lies at {place}, {advice}")
    if outside > _MOST_OUTSIDE:
        note = f"{outside:.0%} of the annotated area lies outside the slide; is the annotation of this slide?"
        return Annotations(found.tumour, (*found.notes, note))
    return found


def _share_outside(tumour: Any, base: Level) -> float:
    """The share of an area that is not on the slide; 0 of no area."""
    if not tumour.area:
        return 0.0
    inside = shapely.intersection(tumour, shapely.box(0, 0, base.width, base.height)).area
    return 1.0 if inside == 0 else float(1 - inside / tumour.area)


def label_tiles(
    slide: Slide, annotations: Annotations | None, coords: npt.NDArray[np.int64], side: int, min_covered: float
) -> tuple[npt.NDArray[np.int8] | None, tuple[str, ...]]:
    """Ground truth of tiles: 1 where enough is annotated, 0 where nothing is, -1 (unknown) between.

    Args:
        slide: The slide.
        annotations: What `read_ground_truth` gave.
        coords: (N, 2) x, y of the tiles at level 0.
        side: Side of a tile at level 0.
        min_covered: Least share of a positive tile.

    Returns:
        The labels, None if no slide of the cohort is annotated; and what does not fit the label of the slide.
    """
    if slide.unannotated is None:
        return None, ()
    if annotations is None:
        return np.full(len(coords), slide.unannotated, np.int8), ()
    labels = instance_labels(covered_share(annotations.tumour, coords, float(side)), min_covered)
    positives = int((labels == 1).sum())
    if slide.unannotated == 0 and positives:
        return labels, (f"is labelled 0, but {positives} of its tiles hold annotated tumour; which of them is right?",)
    if slide.unannotated != 0 and not positives and annotations.tumour.area:
        return labels, ("none of its kept tiles counts as tumour, though tumour is annotated; see its overview",)
    return labels, ()
