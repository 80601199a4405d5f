"""Feature files in the TRIDENT layout: `features` (N, D) and `coords` (N, 2) with attributes, one per bag."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from its2clr.cohort.new_hdf5 import new_hdf5
from its2clr.errors import InputError
from its2clr.files import damage_said
from its2clr.hdf5 import open_hdf5
from its2clr.units import Level0Pixels, MicronsPerPixel, TilePixels
from its2clr.version import __version__


@dataclass(frozen=True)
class FeatureFile:
    """Features of one bag.

    Attributes:
        features: (N, D) float32.
        coords: (N, 2) int64, x and y at level 0.
        encoder: What made the features: a name and a fingerprint of the weights.
        tiles: Hash of the tiles they were made from (`Content.tiles`); empty if the file does not say, or if somebody
            changed the features since.
    """

    features: NDArray[np.float32]
    coords: NDArray[np.int64]
    encoder: str
    tiles: str = ""


def feature_path(folder: str | Path, bag_id: str) -> Path:
    """Where a bag's feature file is."""
    return Path(folder) / f"{quote(bag_id, safe='')}.h5"


def write_feature_file(
    path: str | Path,
    file: FeatureFile,
    *,
    bag_id: str,
    tile_size: TilePixels,
    tile_size_level0: Level0Pixels,
    mpp: MicronsPerPixel,
    overlap: TilePixels | None = None,
) -> None:
    """Write one bag's features; the file appears whole. The attributes carry TRIDENT's names."""
    attributes = {
        "name": bag_id,
        "patch_size": tile_size,
        "patch_size_level0": tile_size_level0,
        **({} if overlap is None else {"overlap": overlap}),
        "mpp": mpp,
        "encoder": file.encoder,
        "tiles": file.tiles,
        "values": _digest(file.features),
        "its2clr_version": __version__,
    }
    with new_hdf5(path, file.features.nbytes) as h5:
        h5["features"] = np.asarray(file.features, dtype=np.float32)
        h5["coords"] = np.asarray(file.coords, dtype=np.int64)
        for name in ("features", "coords"):
            h5[name].attrs.update(attributes)


def read_feature_file(path: str | Path) -> FeatureFile:
    """Read one bag's features.

    Raises:
        InputError: The file is missing, damaged or not in this layout.
    """
    if not Path(path).is_file():
        raise InputError(f"{path}: no such feature file")
    with damage_said(f"{path}: not a readable feature file"), open_hdf5(path) as h5:
        features = np.asarray(h5["features"], dtype=np.float32)
        coords = np.asarray(h5["coords"], dtype=np.int64)
        told = h5["features"].attrs
        made_by, tiles, values = (str(told.get(name, "")) for name in ("encoder", "tiles", "values"))
    if features.ndim != 2 or coords.shape != (len(features), 2):
        raise InputError(f"{path}: expected features (N, D) and coords (N, 2), got {features.shape} and {coords.shape}")
    if values not in {"", _digest(features)}:
        made_by = tiles = ""
    return FeatureFile(features, coords, made_by, tiles)


def _digest(features: NDArray[np.float32]) -> str:
    content = np.ascontiguousarray(features, dtype=np.float32)
    return hashlib.blake2b(content.data, digest_size=16).hexdigest()
