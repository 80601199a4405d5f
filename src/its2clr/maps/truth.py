"""What is known to be positive in a bag: its annotation, or the ground truth of its tiles."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import shapely

from its2clr.cohort.canvas import Canvas
from its2clr.cohort.slides.annotations import read_annotations
from its2clr.errors import InputError
from its2clr.maps.regions import find_regions
from its2clr.maps.source import Place
from its2clr.run.scores import BagScores

_ANY = 1e-6


class Truth(NamedTuple):
    """The positive area of a bag.

    Attributes:
        area: shapely geometry in pixels of level 0; may be empty.
        origin: Where it is from, in plain words.
    """

    area: Any
    origin: str


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
            pass  # it was readable when the cohort was made, and the labels of tiles were taken from it
        else:
            return Truth(found.tumour, "annotation")
    if scores.truth is None or not (scores.truth >= 0).any():
        return None
    return Truth(_union(scores), "positive tiles")


def _union(scores: BagScores) -> Any:
    """The union of the positive tiles, also where they overlap others."""
    assert scores.truth is not None
    positive = replace(scores, instances=(scores.truth == 1).astype(np.float64))
    return shapely.MultiPolygon([region.polygon for region in find_regions(positive, _ANY)])
