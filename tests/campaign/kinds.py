"""The kinds of files that its2clr reads: how a whole one is made, how it is read, and how damage may be said."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from its2clr.aggregators import create_aggregator
from its2clr.cohort import Cohort, decode, read_tiles
from its2clr.cohort.features.layouts import read_foreign_features, read_header
from its2clr.cohort.features.tile_grids import FeatureProblem
from its2clr.cohort.image_files import ImageProblem, prepare_image
from its2clr.cohort.manifest import read_manifest
from its2clr.cohort.slides.annotations import read_annotations
from its2clr.cohort.slides.slide_image import SlideProblem, open_slide
from its2clr.encoders.encoder import create_encoder, create_projector
from its2clr.encoders.weight_files import read_weights
from its2clr.engine.checkpoint import load_checkpoint, save_checkpoint
from its2clr.errors import InputError
from its2clr.files import read_json
from its2clr.predict.model_file import load_model
from its2clr.run.saved import read_run_config
from its2clr.run.scores import RunScores
from its2clr.settings import read_recipe, resolve_config
from its2clr.tune.space import read_space
from tests.campaign.inputs import geojson
from tests.cohort.feature_files import clam, grid, stamp, trident
from tests.cohort.slide_files import draw, write_ome, write_pyramid
from tests.cohort.test_dicom_images import write_dicom

FEATURES = np.arange(48, dtype=np.float32).reshape(12, 4)
ASAP = """<?xml version="1.0"?>
<ASAP_Annotations><Annotations><Annotation Name="a" Type="Polygon" PartOfGroup="Tumor"><Coordinates>
<Coordinate Order="0" X="1" Y="2"/><Coordinate Order="1" X="30" Y="2"/><Coordinate Order="2" X="30" Y="40"/>
</Coordinates></Annotation></Annotations></ASAP_Annotations>"""
SPLITS = ("train", "train", "val", "val", "test", "test")
RECIPE = """seed: 3
encoder: {name: resnet18, options: {channels: [8, 8, 16, 16]}}
pretrain:
  epochs: 2
  views: {jitter_probability: 0.5}
refine: {epochs: 20, threshold: 0.3, temperature: 0.2}
"""


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        file: Its name.
        make: Writes a whole one.
        read: Reads it, all of it.
        error: How damage may be said.
    """

    file: str
    make: Callable[[Path], object]
    read: Callable[[Path], object]
    error: type[Exception] | tuple[type[Exception], ...] = InputError


def _read_features(path: Path) -> None:
    read_header(path)
    read_foreign_features(path)


def _read_with_patches(path: Path) -> None:
    read_header(path)
    read_foreign_features(path, coords=path.parent.parent / "patches")


def _read_slide(path: Path) -> None:
    with open_slide(path) as slide:
        for level in range(len(slide.levels)):
            slide.read_region(level, 0, 0, 64, 64)


def _prepare(path: Path) -> None:
    prepare_image(path, tile_size=32, encoding="png")


def _image(**options: Any) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        pixels = np.random.default_rng(0).integers(0, 255, (40, 36, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path, **options)

    return make


def _scores(path: Path) -> object:
    scores = RunScores.__new__(RunScores)
    scores.run = path.parent
    return scores.bags


def _round(path: Path) -> object:
    folder = path.parent / "rounds" / "0003"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, folder / "pseudo_labels.parquet")
    scores = RunScores.__new__(RunScores)
    scores.run = path.parent
    return scores.round(3)


def _manifest(path: Path) -> None:
    folder = path.parent / "bag"
    folder.mkdir(exist_ok=True)
    _image()(folder / "a.png")
    path.write_text(
        "bag_id,label,path,split\n"
        + "".join(f"{number},{number % 2},bag,{split}\n" for number, split in enumerate(SPLITS))
    )


def _cohort_file(cohort: Path) -> Callable[[Path], object]:
    """Reads a cohort in which one file is the damaged one."""

    def read(path: Path) -> object:
        copy = path.parent / "cohort"
        if not copy.exists():
            shutil.copytree(cohort, copy)
        (copy / path.name).write_bytes(path.read_bytes())
        opened = Cohort.open(copy)
        parts = [opened.split(name) for name in ("train", "val", "test")]
        return [part.instance_labels() for part in parts if len(part)]

    return read


def _tiles(path: Path) -> None:
    tiles = read_tiles(path)
    for number in range(len(tiles)):
        decode(tiles.encoded(number))


def _use_settings(path: Path) -> None:
    config = resolve_config(path)
    encoder = create_encoder(config.encoder)
    create_projector(encoder.feature_dim, config.projector)
    create_aggregator(config.aggregator.name, encoder.feature_dim, **config.aggregator.options)


def _mask(path: Path) -> None:
    Image.fromarray(np.kron(np.eye(6, dtype=np.uint8), np.ones((8, 8), dtype=np.uint8)) * 255).save(path)


def kinds(run: Path | None = None, cohort: Path | None = None) -> dict[str, Kind]:
    """All kinds; those that are made from a finished run or a cohort only where there is one."""
    found = {
        "features of TRIDENT": Kind(
            "a.h5", lambda path: trident(path, FEATURES, grid(4, 3)), _read_features, FeatureProblem
        ),
        "features of STAMP": Kind(
            "b.h5", lambda path: stamp(path, FEATURES, grid(4, 3)), _read_features, FeatureProblem
        ),
        "features of CLAM": Kind("c.h5", _clam, _read_with_patches, FeatureProblem),
        "features as tensors": Kind("a.pt", _tensors, _read_with_patches, FeatureProblem),
        "slide": Kind("a.tif", lambda path: write_pyramid(path, draw(200, 160), levels=2), _read_slide, SlideProblem),
        "slide, OME": Kind(
            "a.ome.tif", lambda path: write_ome(path, draw(200, 160), levels=2), _read_slide, SlideProblem
        ),
        "image, PNG": Kind("a.png", _image(), _prepare, ImageProblem),
        "image, JPEG": Kind("a.jpg", _image(quality=90), _prepare, ImageProblem),
        "image, TIFF": Kind("a.tiff", _image(compression="tiff_lzw"), _prepare, ImageProblem),
        "image, DICOM": Kind(
            "a.dcm", lambda path: write_dicom(path, np.full((24, 20, 3), 90, np.uint8), "RGB"), _prepare, ImageProblem
        ),
        "annotations, GeoJSON": Kind(
            "a.geojson", lambda path: path.write_text(geojson([[0, 0], [0, 50], [50, 50]])), read_annotations
        ),
        "annotations, XML": Kind("a.xml", lambda path: path.write_text(ASAP), read_annotations),
        "annotations, mask": Kind("m.png", _mask, lambda path: read_annotations(path, 2.0)),
        "manifest": Kind("bags.csv", _manifest, read_manifest),
        "recipe": Kind("a.yaml", lambda path: path.write_text(RECIPE), read_recipe),
        "settings": Kind("a.yaml", lambda path: path.write_text(RECIPE), _use_settings),
        "search space": Kind(
            "space.yaml", lambda path: path.write_text("refine.temperature: {low: 0.07, high: 0.5}\n"), read_space
        ),
        "checkpoint": Kind("a.safetensors", _checkpoint, load_checkpoint),
        "weights, safetensors": Kind("w.safetensors", _checkpoint, read_weights),
        "weights, torch": Kind("w.pth", lambda path: torch.save({"w": torch.arange(8.0)}, path), read_weights),
        "JSON": Kind("state.json", lambda path: path.write_text('{"stages": {"pretrain": {"epoch": 3}}}'), read_json),
    }
    if run is not None:
        found |= {
            name: Kind(Path(file).name, _copy(run / file), read)
            for name, file, read in (
                ("run: model file", "model.its2clr", load_model),
                ("run: config", "config.yaml", lambda path: read_run_config(path.parent)),
                ("run: bag predictions", "bag_predictions.csv", _scores),
                ("run: pseudo labels", _first(run, "rounds/*/pseudo_labels.parquet"), _round),
                ("run: encoder", "checkpoints/encoder-refined.safetensors", load_checkpoint),
            )
        }
    if cohort is not None:
        found |= {
            "cohort: tiles": Kind("t.h5", _copy(cohort / _first(cohort, "tiles/*.h5")), _tiles),
            "cohort: table": Kind("bags.csv", _copy(cohort / "bags.csv"), _cohort_file(cohort)),
            "cohort: description": Kind("cohort.json", _copy(cohort / "cohort.json"), _cohort_file(cohort)),
        }
    return found


def _first(folder: Path, pattern: str) -> str:
    return str(min(folder.glob(pattern)).relative_to(folder))


def _copy(source: Path) -> Callable[[Path], object]:
    return lambda path: shutil.copy(source, path)


def _clam(path: Path) -> None:
    clam(path, FEATURES, grid(4, 3), patches=path.parent.parent / "patches")


def _tensors(path: Path) -> None:
    clam(path, FEATURES, grid(4, 3), patches=path.parent.parent / "patches", pt=True)


def _checkpoint(path: Path) -> None:
    save_checkpoint(path, {"w": torch.arange(8.0)}, {"epoch": 3})
