"""Small inputs that ask for very much: each must be refused, or read, with bounded memory and time."""

import json
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
from PIL import Image

from its2clr.cohort.features.layouts import read_foreign_features, read_header
from its2clr.cohort.image_files import ImageProblem, prepare_image
from its2clr.cohort.slides.annotations import read_annotations
from its2clr.cohort.slides.slide_image import SlideProblem, open_slide
from its2clr.encoders.encoder import create_encoder
from its2clr.errors import Its2clrError
from its2clr.predict.model_file import load_model
from its2clr.settings import read_recipe
from tests.campaign.inputs import YAML_BOMB, geojson, scribble
from tests.campaign.machine import fork
from tests.campaign.places import Places
from tests.campaign.tally import Part
from tests.cohort.feature_files import grid

MOST_OF_A_BOMB = 1_500_000_000
"""Bytes; the libraries alone take about half of that."""
MOST_SECONDS = 30.0


def flat_png(path: Path, side: int) -> None:
    """A black square of so many pixels a side: a few hundred kB that become gigabytes."""
    packed = zlib.compressobj(9)
    body = b"".join(packed.compress(b"\0" * (3 * side + 1)) for _ in range(side)) + packed.flush()

    def chunk(kind: bytes, value: bytes) -> bytes:
        return struct.pack(">I", len(value)) + kind + value + struct.pack(">I", zlib.crc32(kind + value))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b""))


def noise_mask(path: Path, side: int = 4800) -> None:
    """Half the pixels are in, at random."""
    Image.fromarray((np.random.default_rng(0).random((side, side)) < 0.5).astype(np.uint8) * 255).save(path)


def large_tensors(path: Path) -> None:
    """A feature file that says it holds 400 GB."""
    with h5py.File(path, "w") as h5:
        h5.create_dataset("features", (10**8, 1024), "f4", chunks=(1024, 1024))
        h5["coords"] = grid(4, 3)


def compressed_zeros(path: Path) -> None:
    """A feature file of a few hundred kB whose values are 2 GB of zeros."""
    with h5py.File(path, "w") as h5:
        h5.create_dataset("features", (500_000, 1024), "f4", chunks=(10_000, 1024), compression="gzip", fillvalue=1.0)
        for start in range(0, 500_000, 10_000):
            h5["features"][start : start + 10_000] = 0
        h5["coords"] = np.zeros((500_000, 2), np.int64)


def zeros_in_a_zip(path: Path) -> None:
    """A model file of a few MB that unpacks to 3 GB."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("model.json", "encoder.safetensors", "aggregators.safetensors"):
            with archive.open(name, "w", force_zip64=True) as file:
                for _ in range(1000):
                    file.write(b"\0" * 2**20)


def large_tiff(path: Path) -> None:
    """A slide that says it is 200,000 pixels wide in one strip, and holds nothing."""
    tags = [(256, 4, 200_000), (257, 4, 200_000), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 200), (277, 3, 1),
            (278, 4, 200_000), (279, 4, 100)]  # fmt: skip
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    path.write_bytes(struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + struct.pack("<I", 0) + bytes(400))


def _slide(path: Path) -> None:
    with open_slide(path) as slide:
        slide.read_region(0, 0, 0, 64, 64)


def _features(path: Path) -> None:
    read_header(path)
    read_foreign_features(path)


def _encoder(path: Path) -> None:
    create_encoder("resnet18", **json.loads(path.read_text()))


BOMBS: dict[str, tuple[str, Callable[[Path], object], Callable[[Path], object]]] = {
    "PNG of 42,000 x 42,000 pixels": (
        "a.png", lambda path: flat_png(path, 42_000), lambda path: prepare_image(path, tile_size=32, encoding="png"),
    ),
    "PNG of 8,000 x 8,000 pixels": (
        "a.png", lambda path: flat_png(path, 8_000), lambda path: prepare_image(path, tile_size=32, encoding="png"),
    ),
    "outline of 3,000 random corners": (
        "a.geojson", lambda path: path.write_text(geojson(scribble(3000, 0))), read_annotations,
    ),
    "outline of 200,000 corners": (
        "a.geojson", lambda path: path.write_text(geojson(scribble(200_000, 0))), read_annotations,
    ),
    "mask of 4,800 x 4,800 pixels of noise": ("m.png", noise_mask, lambda path: read_annotations(path, 1.0)),
    "GeoJSON of a million brackets": ("a.geojson", lambda path: path.write_text("[" * 1_000_000), read_annotations),
    "HDF5 that declares 400 GB": ("a.h5", large_tensors, _features),
    "HDF5 of 2 GB of packed zeros": ("a.h5", compressed_zeros, _features),
    "model file that unpacks to 3 GB": ("a.its2clr", zeros_in_a_zip, load_model),
    "TIFF that declares 40 GB": ("a.tif", large_tiff, _slide),
    "YAML whose aliases multiply": ("a.yaml", lambda path: path.write_text(YAML_BOMB), read_recipe),
}  # fmt: skip
"""What each is called, its file, how it is made and how it is read."""
SLOW = ("PNG of 42,000 x 42,000 pixels", "outline of 200,000 corners", "HDF5 of 2 GB of packed zeros",
        "model file that unpacks to 3 GB")  # fmt: skip
"""Those that take long to make or to read, which the short campaign leaves out."""


def bombs(places: Places, part: Part, *, short: bool = False) -> dict[str, dict[str, float]]:
    """Read each bomb in a process of its own; returns size, peak memory and seconds of each."""
    return {name: one_bomb(name, places, part) for name in BOMBS if not (short and name in SLOW)}


def one_bomb(name: str, places: Places, part: Part) -> dict[str, float]:
    """Make one bomb, and read it in a process of its own."""
    file, make, read = BOMBS[name]
    folder = places.new("bomb")
    path = folder / file
    fork(lambda: int(make(path) is None) * 0, folder, limit=300)  # made elsewhere, so that its memory is not counted

    def work() -> int:
        try:
            read(path)
        except (Its2clrError, ImageProblem, SlideProblem) as error:
            print(error)
            return 2
        return 0

    ended = fork(work, folder)
    part.tried("bomb")
    part.ended(name, ended)
    if ended.peak > MOST_OF_A_BOMB:
        part.failed(name, f"took {ended.peak / 1e9:.2f} GB")
    if ended.seconds > MOST_SECONDS:
        part.failed(name, f"hung: took {ended.seconds:.0f} s")
    return {
        "file_bytes": path.stat().st_size, "peak_bytes": ended.peak, "seconds": round(ended.seconds, 2),
        "refused": ended.code == 2,
    }  # fmt: skip
