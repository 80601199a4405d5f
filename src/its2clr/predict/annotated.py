"""Ground truth of predicted tiles from the annotations of their slides: ASAP or ImageScope XML, GeoJSON, masks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from its2clr.cohort.slides.annotations import read_annotations
from its2clr.cohort.slides.ground_truth import covered_share, instance_labels
from its2clr.cohort.slides.slide_image import SlideProblem, open_slide, slide_size
from its2clr.errors import InputError
from its2clr.evaluation.arrays import UNKNOWN
from its2clr.predict.prediction_folder import PREDICTIONS
from its2clr.units import Level0Pixels, Level0Size

SUFFIXES = (".geojson", ".json", ".xml", ".png", ".tif", ".tiff")


def annotations_of(folder: Path, bag_ids: Sequence[str]) -> dict[str, Path | None]:
    """The annotation of each bag, which has its name; None of a bag that has none.

    Raises:
        InputError: There is no such folder, or no annotation of these bags.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: is no folder; give the folder of the annotations")
    files = {bag_id: _file_of(folder, bag_id) for bag_id in bag_ids}
    if not any(files.values()):
        raise InputError(
            f"{folder}: there is no annotation of these {len(bag_ids)} bags; a file has the name of its bag, such as "
            f"{bag_ids[0]}.geojson (or {', '.join(SUFFIXES[1:])})"
        )
    return files


def annotated_labels(
    predicted: pd.DataFrame,
    *,
    labels: "pd.Series[int]",
    sources: "pd.Series[str]",
    files: Mapping[str, Path | None],
    classes: Sequence[str],
) -> list[int]:
    """The label of every predicted tile: 1 if any of it is annotated, 0 if nothing is.

    A negative bag without annotation has negative tiles. Of a positive bag that has none, or none that counts as
    tumour, the tiles are unknown.

    Args:
        predicted: `bag_id`, `x`, `y` and `tile_size_level0` of the tiles, bag after bag.
        labels: The label of each bag.
        sources: The slide of each bag, whose size gives the scale of a mask.
        files: The annotation of each bag.
        classes: Annotated classes that count as tumour; none: those that are known to.

    Raises:
        InputError: An annotation cannot be read.
    """
    found: list[int] = []
    for bag_id, tiles in predicted.groupby("bag_id", sort=False):
        name = str(bag_id)
        of_bag = _labels_of(tiles, files[name], Path(sources[name]), classes, positive=bool(labels[name] == 1))
        found += of_bag.tolist()
    return found


def _file_of(folder: Path, bag_id: str) -> Path | None:
    """As the bag is called, or with the characters that file systems refuse percent-encoded."""
    names = [*([bag_id] if Path(bag_id).name == bag_id else []), quote(bag_id, safe="")]
    there = (folder / f"{name}{suffix}" for name in names for suffix in SUFFIXES)
    return next((path for path in there if path.is_file()), None)


def _labels_of(
    tiles: pd.DataFrame, file: Path | None, slide: Path, classes: Sequence[str], *, positive: bool
) -> NDArray[np.int8]:
    unannotated = np.full(len(tiles), UNKNOWN if positive else 0, np.int8)
    if file is None:
        return unannotated
    found = read_annotations(file, classes=list(classes) or None, level0_size=_size(file, slide))
    if not found.tumour.area:
        return unannotated
    side = Level0Pixels(int(tiles["tile_size_level0"].iloc[0]))
    return instance_labels(covered_share(found.tumour, tiles[["x", "y"]].to_numpy(), side))


def _size(file: Path, slide: Path) -> Level0Size | None:
    """Size of a slide, for masks alone; None if it cannot be read."""
    if file.suffix.lower() not in (".png", ".tif", ".tiff"):
        return None
    try:
        with open_slide(slide) as image:
            return slide_size(image)
    except SlideProblem as problem:
        raise InputError(
            f"{file}: is a mask, whose scale follows from its slide, and {slide} (column source of {PREDICTIONS}) "
            f"cannot be read: {problem}; give outlines (XML, GeoJSON)"
        ) from problem
