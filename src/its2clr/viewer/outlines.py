"""The outlines that a person drew on a slide, as the viewer draws them: the polygons themselves, not tiles."""

from pathlib import Path
from typing import Any

import shapely

from its2clr.cohort import CohortInfo, TileFile
from its2clr.cohort.slides.annotations import read_annotations
from its2clr.errors import InputError
from its2clr.units import Level0Size

_TOLERANCE = 0.5
"""Level-0 pixels by which a drawn outline may differ from the one in the file; nobody sees half a pixel."""


def read_outlines(tiles: TileFile, info: CohortInfo, size: Level0Size) -> dict[str, Any]:
    """The annotation that a bag's ground truth was made from.

    Args:
        tiles: The bag.
        info: What its cohort was made with.
        size: Width and height of the slide.

    Returns:
        `polygons`: each a list of rings of (x, y) at level 0, the outer one first; None where there is no annotation or
        it cannot be read any more. `problem`: why it cannot.
    """
    path = str(tiles.attributes.get("annotation", ""))
    if not path or not tiles.has_labels:
        return {"polygons": None, "problem": ""}
    try:
        found = read_annotations(
            Path(path), classes=tuple(info.settings.get("classes") or ()) or None, level0_size=size
        )
    except InputError as error:
        return {"polygons": None, "problem": f"{error}; the tiles that counted as positive are outlined instead"}
    return {"polygons": rings(shapely.simplify(found.tumour, _TOLERANCE)), "problem": ""}


def rings(area: Any) -> list[list[list[list[float]]]]:
    """The polygons of an area, each as its rings: the outer one, then its holes."""
    return [
        [shapely.get_coordinates(ring).round(1).tolist() for ring in (polygon.exterior, *polygon.interiors)]
        for polygon in shapely.get_parts(area)
        if not polygon.is_empty
    ]
