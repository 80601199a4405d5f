"""Tiles and regions of a bag as GeoJSON that QuPath imports without changes.

One FeatureCollection (RFC 7946) per bag: first the regions at or above the threshold (`regions.find_regions`), as
annotations of class Positive; then every tile, as tile objects of class Positive or Negative with one measurement per
model. Coordinates are pixels of level 0, as in QuPath. The same scores give the same bytes.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from its2clr.files import atomic_path
from its2clr.maps.heat import check_threshold
from its2clr.maps.regions import find_regions
from its2clr.maps.source import ScoredModel, Source, bag_file
from its2clr.run.scores import BagScores
from its2clr.units import MicronsPerPixel

Part = Literal["regions", "tiles"]

POSITIVE: dict[str, Any] = {"name": "Positive", "color": [250, 62, 62]}
NEGATIVE: dict[str, Any] = {"name": "Negative", "color": [112, 112, 225]}
"""QuPath's own classes in their colours."""

_DIGITS = 6
_UNKNOWN_MPP = MicronsPerPixel(math.nan)


def write_geojsons(
    source: Source,
    bag_ids: Sequence[str],
    models: Sequence[ScoredModel],
    out: Path,
    *,
    threshold: float | None = None,
    only: Part | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the file of every bag, `OUT/<bag_id>.geojson`; see `write_geojson`.

    Args:
        source: Where the bags are.
        bag_ids: The bags.
        models: Whose probabilities to write; the first one decides classes and regions.
        out: Folder to write into.
        threshold: Probability from which on a tile is positive; None: the first model's own.
        only: Which part to write; None: both.
        progress: Called with the number of bags done and of all bags.
    """
    positive_from = models[0].positive_from(threshold)
    for done, bag_id in enumerate(bag_ids, start=1):
        scores = {model.name: model.bag(bag_id) for model in models}
        mpp_level0 = source.places[bag_id].tiles().mpp_level0
        write_geojson(bag_file(out, bag_id, ".geojson"), scores, positive_from, mpp_level0, only)
        if progress is not None:
            progress(done, len(bag_ids))


def write_geojson(
    path: Path,
    models: Mapping[str, BagScores],
    threshold: float,
    mpp_level0: MicronsPerPixel = _UNKNOWN_MPP,
    only: Part | None = None,
) -> None:
    """Write the file of a bag.

    Args:
        path: File to write.
        models: Scores of the bag by the name of the model; the first one decides classes and regions.
        threshold: Probability from which on a tile is positive.
        mpp_level0: Microns per pixel of level 0; NaN if unknown, and areas are then left to QuPath.
        only: Which part to write; None: both.

    Raises:
        InputError: If the threshold is no probability.
    """
    check_threshold(threshold)
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.write('{"type": "FeatureCollection", "features": [')
        separator = "\n"
        for feature in _features(models, threshold, mpp_level0, only):
            file.write(separator + json.dumps(feature, ensure_ascii=False, allow_nan=False))
            separator = ",\n"
        file.write("\n]}\n")


def _features(
    models: Mapping[str, BagScores], threshold: float, mpp_level0: MicronsPerPixel, only: Part | None
) -> Iterator[dict[str, Any]]:
    name, scores = next(iter(models.items()))
    if only != "tiles":
        yield from _regions(name, scores, threshold, mpp_level0)
    if only != "regions":
        yield from _tiles(models, scores, threshold)


def _regions(name: str, scores: BagScores, threshold: float, mpp_level0: MicronsPerPixel) -> Iterator[dict[str, Any]]:
    for number, region in enumerate(find_regions(scores, threshold), start=1):
        measurements: dict[str, float] = {
            f"{name} mean probability": round(region.mean, _DIGITS),
            f"{name} max probability": round(region.highest, _DIGITS),
            "tiles": region.tiles,
        }
        if math.isfinite(mpp_level0):
            measurements["area um^2"] = round(region.polygon.area * mpp_level0**2, 3)
        rings = [
            [[int(x), int(y)] for x, y in ring.coords] for ring in (region.polygon.exterior, *region.polygon.interiors)
        ]
        yield _feature("annotation", rings, POSITIVE, measurements, name=f"Region {number}")


def _tiles(models: Mapping[str, BagScores], scores: BagScores, threshold: float) -> Iterator[dict[str, Any]]:
    names = [f"{name} probability" for name in models]
    columns = [one.instances.round(_DIGITS).tolist() for one in models.values()]
    positive = (scores.instances >= threshold).tolist()
    for (left, top), is_positive, *values in zip(scores.coords.tolist(), positive, *columns, strict=True):
        right, bottom = left + scores.side, top + scores.side
        ring = [[left, top], [right, top], [right, bottom], [left, bottom], [left, top]]
        measurements = dict(zip(names, values, strict=True))
        yield _feature("tile", [ring], POSITIVE if is_positive else NEGATIVE, measurements)


def _feature(
    kind: str, rings: list[Any], classification: dict[str, Any], measurements: dict[str, float], **more: str
) -> dict[str, Any]:
    properties = {"objectType": kind, **more, "classification": classification, "measurements": measurements}
    return {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": rings}, "properties": properties}
