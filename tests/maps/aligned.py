"""Slides with known shapes, cut into tiles in many ways; predictions are the ground truth of the tiles."""

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import shapely
import tifffile

from its2clr.cohort import Cohort
from its2clr.cohort.layout import CohortInfo
from its2clr.cohort.slides import SlideSettings
from its2clr.cohort.slides.one_slide import pack_slide
from its2clr.cohort.slides.slide_manifest import Slide
from its2clr.maps.source import Place, ScoredModel, Source
from its2clr.run.scores import BagScores

WIDTH, HEIGHT = 1187, 929
SHAPES = shapely.union_all(
    [
        shapely.Point(415.3, 460.8).buffer(375).difference(shapely.Point(470, 430).buffer(140)),  # with a hole
        shapely.Polygon([(830, 60), (1135, 100), (1110, 860), (860, 825)]),
    ]
)


class Cutting(NamedTuple):
    """How a slide is cut."""

    slide_mpp: float
    mpp: float
    tile_size: int
    overlap: int


CUTTINGS = [
    Cutting(0.2528, 0.5, 10, 0),  # 20 pixels, rounded from an odd scale
    Cutting(0.25, 0.5, 12, 6),  # every place in four tiles
    Cutting(0.5, 0.5, 20, 0),  # the scale of the slide
    Cutting(0.46, 1.0, 10, 3),  # 22 pixels each 15: rounded twice
    Cutting(0.2273, 0.88, 8, 5),  # 31 pixels each 12: up to nine tiles on a place
]


def write_slide(path: Path, area, mpp: float) -> Path:
    """A pyramid, purple in the area and pink around it."""
    from its2clr.maps.bag_panels import fill

    inside = fill(area, (WIDTH, HEIGHT))
    pixels = np.where(inside[..., None], np.uint8([90, 40, 140]), np.uint8([225, 150, 200]))
    with tifffile.TiffWriter(path) as file:
        for level in range(3):
            file.write(
                pixels[:: 2**level, :: 2**level], photometric="rgb", tile=(256, 256), subfiletype=int(level > 0),
                compression="deflate", metadata=None, resolution=(1e4 / mpp / 2**level,) * 2,
                resolutionunit="CENTIMETER",
            )  # fmt: skip
    return path


def write_annotation(path: Path, area) -> Path:
    """The area as an annotation of class Tumor."""
    properties = {"classification": {"name": "Tumor"}}
    path.write_text(
        json.dumps({"type": "Feature", "properties": properties, "geometry": shapely.geometry.mapping(area)})
    )
    return path


def cut(folder: Path, cutting: Cutting, area, min_covered: float = 0.5, bag_id: str = "bag") -> Source:
    """Pack a slide that shows the area; the model of the source says of each tile what is true of it."""
    folder.mkdir(parents=True, exist_ok=True)
    slide = Slide(
        bag_id, 2, write_slide(folder / "slide.tif", area, cutting.slide_mpp), "slide.tif",
        annotation=write_annotation(folder / "area.geojson", area), unannotated=0,
    )  # fmt: skip
    settings = SlideSettings(
        mpp=cutting.mpp, tile_size=cutting.tile_size, overlap=cutting.overlap, min_covered=min_covered, quality=50
    )
    result = pack_slide(slide, folder / "cohort", settings)
    assert result.left_out == ()
    row = {"bag_id": bag_id, "label": 1, "split": "test", "group": "p", "n_instances": result.counts.kept}
    info = CohortInfo(tile_size=cutting.tile_size, encoding="jpeg", has_instance_labels=True)
    cohort = Cohort(folder / "cohort", pd.DataFrame([row]), info)
    tiles = cohort.tile_file(bag_id)
    scores = BagScores(
        bag_id, 0.93, (tiles.labels == 1).astype(float), tiles.coords, tiles.tile_size_level0, tiles.labels
    )
    model = ScoredModel("refined", "ItS2CLR", lambda _: replace(scores), 0.3)
    return Source(folder, (model,), (model,), model, {bag_id: Place(cohort, bag_id, "test", 1)})


def iou(one: np.ndarray, other: np.ndarray) -> float:
    """Of two masks."""
    return float((one & other).sum() / (one | other).sum())


def scaled(area, across: float, down: float | None = None):
    """An area in the pixels of a raster."""
    return shapely.transform(area, lambda xy: xy * np.array([across, across if down is None else down]))
