"""Tiles and areas that a person marks in the viewer, saved as the corrections that `its2clr correct` takes.

`FOLDER/<bag_id>.geojson` has at most one feature of class `Confirmed positive` and one of `Confirmed negative`. What
else a file holds, such as annotations of QuPath, stays in it. Where two marks contradict each other, the newer counts.
"""

import json
import threading
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import shapely
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from its2clr.cohort import TileFile
from its2clr.cohort.slides.annotations import read_annotations
from its2clr.cohort.slides.ground_truth import covered_share
from its2clr.cohort.slides.shapes import polygonal
from its2clr.errors import InputError
from its2clr.files import atomic_path, read_json
from its2clr.maps.source import bag_file
from its2clr.refine.corrections import LEAST_SHARE, NEGATIVE, POSITIVE, UNKNOWN
from its2clr.viewer.outlines import rings

Sense = Literal["positive", "negative"]

MOST_POINTS = 20_000
"""Of one drawn outline."""
_CLASSES: dict[Sense, dict[str, Any]] = {
    "positive": {"name": POSITIVE, "color": [213, 94, 0]},
    "negative": {"name": NEGATIVE, "color": [0, 114, 178]},
}
_INNER = 0.75
"""Side of the mark of a tile that overlaps others, in sides of the tile: more than half of its area, less of theirs."""
_KEPT_STEPS = 50
_FOLDER = "corrections"

_Areas = dict[Sense, Any]
_Point = tuple[FiniteFloat, FiniteFloat]


class Mark(BaseModel):
    """One thing that a person marks: an instance, or an outline at level 0."""

    model_config = ConfigDict(extra="forbid")

    sense: Literal["positive", "negative", "none"]
    instance: int | None = None
    outline: Annotated[list[_Point], Field(min_length=3, max_length=MOST_POINTS)] | None = None

    @model_validator(mode="after")
    def _one_place(self) -> "Mark":
        if (self.instance is None) == (self.outline is None):
            raise ValueError("give either an instance or an outline")
        return self


def own_folder(shown: Path) -> Path:
    """The folder of marks in a run or among predictions.

    Raises:
        InputError: It is a link, which may lead anywhere: the run may come from someone else.
    """
    folder = shown / _FOLDER
    if folder.is_symlink():
        raise InputError(f"{folder}: is a link; say with --marks where marks are to be saved")
    return folder


class Marks:
    """The marks in a folder; read from its files at every question, since other programs may change them.

    Args:
        folder: The folder; it is made with the first mark.
    """

    def __init__(self, folder: Path) -> None:
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder}: is a file; give a folder for the marks")
        self.folder = folder
        self._steps: dict[str, list[_Areas]] = {}
        self._lock = threading.Lock()

    def of_bag(self, bag_id: str, tiles: TileFile) -> dict[str, Any]:
        """What is marked in a bag.

        Returns:
            `positive` and `negative`: polygons at level 0 (see `outlines.rings`). `instances`: 1, 0 or -1 (not marked),
            as `its2clr correct` counts them. `file`: where it is saved. `undo`: whether a mark can be taken back.

        Raises:
            InputError: The file is damaged.
        """
        with self._lock:
            areas = self._read(bag_id)
        shares = {
            sense: covered_share(area, tiles.coords, tiles.tile_size_level0) >= LEAST_SHARE
            for sense, area in areas.items()
        }
        marked = np.select([shares["positive"], shares["negative"]], [1, 0], UNKNOWN)
        return {
            **{sense: rings(area) for sense, area in areas.items()},
            "instances": marked.tolist(),
            "file": str(self._file(bag_id)),
            "undo": bool(self._steps.get(bag_id)),
        }

    def add(self, bag_id: str, tiles: TileFile, mark: Mark) -> None:
        """Mark a place; where it was marked otherwise, the new mark counts.

        Raises:
            InputError: The outline has no area, or the file cannot be used.
        """
        place = _square(tiles, mark.instance) if mark.instance is not None else _drawn(mark.outline or [])
        with self._lock:
            before = self._read(bag_id)
            after: _Areas = {sense: polygonal(shapely.difference(area, place)) for sense, area in before.items()}
            if mark.sense != "none":
                after[mark.sense] = polygonal(shapely.union(after[mark.sense], place))
            self._write(bag_id, after)
            self._steps[bag_id] = [*self._steps.get(bag_id, ()), before][-_KEPT_STEPS:]

    def undo(self, bag_id: str) -> None:
        """Take back the last mark that was made in this viewer; nothing happens if there is none."""
        with self._lock:
            if steps := self._steps.get(bag_id):
                self._write(bag_id, steps[-1])
                steps.pop()

    def _file(self, bag_id: str) -> Path:
        return bag_file(self.folder, bag_id, ".geojson")

    def _read(self, bag_id: str) -> _Areas:
        path = self._file(bag_id)
        if not path.is_file():
            return {sense: shapely.Polygon() for sense in _CLASSES}
        return {sense: read_annotations(path, classes=[known["name"]]).tumour for sense, known in _CLASSES.items()}

    def _write(self, bag_id: str, areas: _Areas) -> None:
        path = self._file(bag_id)
        features = _others(path) if path.is_file() else []
        for sense, area in areas.items():
            if not area.is_empty:
                geometry = json.loads(shapely.to_geojson(area))
                properties = {"objectType": "annotation", "classification": _CLASSES[sense]}
                features.append({"type": "Feature", "geometry": geometry, "properties": properties})
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps({"type": "FeatureCollection", "features": features}), encoding="utf-8")


def _others(path: Path) -> list[Any]:
    """The features of a file that are no marks."""
    found = read_json(path)
    features = found.get("features", [found]) if isinstance(found, dict) else found
    names = {known["name"].casefold() for known in _CLASSES.values()}
    return [feature for feature in features if _class_of(feature) not in names]


def _class_of(feature: dict[str, Any]) -> str:
    named = (feature.get("properties") or {}).get("classification")
    name = named.get("name") if isinstance(named, dict) else named
    return str(name or "").strip().casefold()


def _square(tiles: TileFile, instance: int) -> Any:
    """The part of a tile that marks it and none of those that overlap it."""
    x, y = tiles.coords[instance].tolist()
    side = tiles.tile_size_level0
    overlapping = (np.abs(tiles.coords - tiles.coords[instance]) < side).all(axis=1).sum() > 1
    edge = side * (1 - _INNER) / 2 if overlapping else 0
    return shapely.box(x + edge, y + edge, x + side - edge, y + side - edge)


def _drawn(outline: list[_Point]) -> Any:
    area = polygonal(shapely.make_valid(shapely.Polygon(outline)))
    if area.area == 0:
        raise InputError("the outline has no area: draw around what you mean")
    return area
