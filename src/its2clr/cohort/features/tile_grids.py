"""Where the tiles of a feature file are: its coordinates and attributes, whatever program wrote them, at level 0."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from its2clr.errors import InputError
from its2clr.files import is_there
from its2clr.hdf5 import open_hdf5
from its2clr.units import (
    Level0Pixels,
    MicronsPerPixel,
    TilePixels,
    level0_mpp,
    magnification_of,
    mpp_of_magnification,
    shared_pixels,
)

PATCHES = "patches"
"""Folder of coordinates alone, beside CLAM's and TRIDENT's features."""

_STAMP_TILE = TilePixels(224)
_HISTORIC_STAMP = 256 / 224
"""Micrometres per unit of the coordinates before STAMP 2."""
_UNKNOWN_MPP = MicronsPerPixel(math.nan)

_Places = NDArray[np.float64]


class FeatureProblem(InputError):  # noqa: N818 - like SlideProblem
    """A feature file that cannot be used, and why."""


class Grid(NamedTuple):
    """Where tiles are: coordinates and side in pixels of level 0, or in micrometres.

    The other fields are those of `layouts.PlacedFeatures`.
    """

    coords: _Places
    side: float
    tile_size: TilePixels
    in_microns: bool = False
    mpp_level0: MicronsPerPixel = _UNKNOWN_MPP
    notes: tuple[str, ...] = ()
    magnification: float | None = None
    overlap: TilePixels | None = None

    def at_level0(self, path: Path, mpp: MicronsPerPixel | None) -> "Grid":
        """The grid in whole pixels of level 0.

        Args:
            path: The file, for messages.
            mpp: Microns per pixel of level 0, if known from elsewhere; it is believed before what the file says.

        Raises:
            FeatureProblem: If tiles would have no area, or a coordinate is not finite.
        """
        mpp_level0, notes, scale = self.mpp_level0 if mpp is None else mpp, self.notes, 1.0
        if self.in_microns:
            if not mpp_level0 > 0:
                mpp_level0 = MicronsPerPixel(1.0)
                notes += ("places are in micrometres: give the slide's mpp in the table to have them in its pixels",)
            scale = 1 / mpp_level0
        side, coords = round(self.side * scale), np.rint(self.coords * scale)
        if side < 1 or not np.isfinite(coords).all():
            raise FeatureProblem(f"{path}: tiles have a side of {self.side:g}, or coordinates are not finite")
        return self._replace(coords=coords, side=side, mpp_level0=mpp_level0, notes=notes, in_microns=False)


def grid_of_file(path: Path, h5: h5py.File, folder: Path | None) -> Grid:
    """The grid of a feature file.

    Args:
        path: The file.
        h5: The same, open.
        folder: Folder of `patches` files; None: looked for beside the features.

    Raises:
        FeatureProblem: If it does not say where its tiles are.
    """
    places = _coords(path, h5)
    attributes = attributes_of(h5)
    try:
        if "feats" in h5:  # STAMP
            return _stamp_grid(path, places, attributes)
        if not {"patch_size", "its2clr_version", "patch_size_level0"} & attributes.keys():  # CLAM
            return grid_of_patches(path, folder, places)
        return _pixel_grid(path, places, attributes)
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise FeatureProblem(f"{path}: its attributes cannot be understood ({error})") from error


def _coords(path: Path, h5: h5py.File) -> _Places:
    if "coords" not in h5:
        raise FeatureProblem(f"{path}: has no `coords`: these are features of a whole slide, not of its tiles")
    places = np.asarray(h5["coords"][()], dtype=np.float64)
    places = places[0] if places.ndim == 3 and len(places) == 1 else places
    if places.ndim != 2 or places.shape[1] != 2:
        raise FeatureProblem(f"{path}: expected coords (N, 2), got {places.shape}")
    return places


def _stamp_grid(path: Path, places: _Places, attributes: Mapping[str, Any]) -> Grid:
    size, unit = attributes.get("tile_size_um"), attributes.get("unit")
    if size is None and unit == "um":
        size = attributes.get("tile_size")
    notes: tuple[str, ...] = ()
    if size is not None:
        pixels = TilePixels(int(attributes.get("tile_size_px", _STAMP_TILE)))
        if "tile_size_px" not in attributes:
            notes = (f"tiles are taken to have been {_STAMP_TILE} px wide for the encoder (STAMP's default)",)
        return _micron_grid(places, float(size), pixels, notes)
    if round(float(attributes.get("tile_size", _stride(places)))) == _STAMP_TILE:
        note = "coordinates are taken to be in units of 256 um / 224, as before STAMP 2"
        return _micron_grid(places * _HISTORIC_STAMP, 256.0, _STAMP_TILE, (note,))
    raise FeatureProblem(f"{path}: does not say the size of its tiles (tile_size_um); extract its features anew")


def _micron_grid(places: _Places, side: float, tile_size: TilePixels, notes: tuple[str, ...]) -> Grid:
    return Grid(
        places,
        side,
        tile_size,
        in_microns=True,
        notes=notes,
        magnification=magnification_of(side, tile_size) if side > 0 else None,
        overlap=_overlap(places, side, tile_size),
    )


def _pixel_grid(path: Path, places: _Places, attributes: Mapping[str, Any]) -> Grid:
    """Coordinates at level 0 with TRIDENT's attributes, CLAM's, or our own."""
    tile_size = TilePixels(int(attributes["patch_size"]))
    if "patch_size_level0" in attributes:
        side = float(attributes["patch_size_level0"])
    else:
        side = tile_size * _downsample(path, attributes)
    mpp_level0 = _UNKNOWN_MPP
    if "mpp" in attributes and round(side) > 0:
        mpp_level0 = level0_mpp(MicronsPerPixel(float(attributes["mpp"])), tile_size, Level0Pixels(round(side)))
    elif float(attributes.get("level0_magnification", 0) or 0) > 0:
        mpp_level0 = mpp_of_magnification(float(attributes["level0_magnification"]))
    magnification = float(attributes.get("target_magnification", 0) or 0)
    return Grid(
        places,
        side,
        tile_size,
        mpp_level0=mpp_level0,
        magnification=magnification if magnification > 0 else None,
        overlap=TilePixels(int(attributes["overlap"]))
        if "overlap" in attributes
        else _overlap(places, side, tile_size),
    )


def _downsample(path: Path, attributes: Mapping[str, Any]) -> float:
    """Level-0 pixels per pixel of CLAM's patch_level."""
    if "downsample" in attributes:
        return float(np.ravel(attributes["downsample"])[0])
    if int(attributes.get("patch_level", 0)) == 0:
        return 1.0
    raise FeatureProblem(
        f"{path}: tiles are of level {attributes['patch_level']}, but `downsample` does not say its scale"
    )


def grid_of_patches(path: Path, folder: Path | None, places: _Places | None) -> Grid:
    """The grid of a CLAM file without attributes: from its `patches` file, else from the distances of its tiles."""
    for candidate in _patch_files(path, folder):
        with open_h5(candidate) as h5:
            attributes = attributes_of(h5)
            if "patch_size" in attributes:
                found = _pixel_grid(candidate, _coords(candidate, h5), attributes)
                if places is not None and len(places) != len(found.coords):
                    raise FeatureProblem(
                        f"{path}: {len(places)} coordinates, but {candidate} has {len(found.coords)}; "
                        "name the folder of the right ones with --coords"
                    )
                return found if places is None else found._replace(coords=places)
            if places is None:
                places = _coords(candidate, h5)
    if places is None:
        raise FeatureProblem(
            f"{path}: holds features without coordinates; name the folder of CLAM's `patches` with --coords"
        )
    side = _stride(places)
    if not side > 0:
        raise FeatureProblem(
            f"{path}: does not say the size of its tiles; name the folder of CLAM's `patches` with --coords"
        )
    note = f"tiles are taken to be {side:g} px wide at level 0, the distance of neighbours (see --coords)"
    return Grid(places, side, TilePixels(round(side)), notes=(note,))


def _patch_files(path: Path, folder: Path | None) -> Iterator[Path]:
    """Files that may hold the coordinates of a slide, the likeliest first."""
    stem = path.stem
    bases = [folder] if folder is not None else [path.parent, path.parent.parent]
    for base in bases:
        for place in (base / PATCHES, base, base / "h5_files"):
            for name in (f"{stem}.h5", f"{stem}_patches.h5"):
                if (place / name).is_file() and place / name != path:
                    yield place / name


def _stride(places: _Places) -> float:
    """The commonest distance between neighbours of a row or a column; 0 if there are none."""
    distances: Counter[float] = Counter()
    for along, across in ((0, 1), (1, 0)):
        order = np.lexsort((places[:, along], places[:, across]))
        ordered = places[order]
        same = np.diff(ordered[:, across]) == 0
        steps = np.diff(ordered[:, along])[same]
        distances.update(np.round(steps[steps > 0], 3).tolist())
    return max(distances, key=lambda step: (distances[step], -step)) if distances else 0.0


def _overlap(places: _Places, side: float, tile_size: TilePixels) -> TilePixels | None:
    """Pixels of a tile that neighbours share, by their commonest distance; None if there are no neighbours."""
    step = _stride(places)
    return shared_pixels(tile_size, step, side) if step > 0 and side > 0 else None


def open_h5(path: Path) -> h5py.File:
    """Open a feature file.

    Raises:
        FeatureProblem: If it is missing or damaged, or takes something from outside itself.
    """
    try:
        return open_hdf5(path)
    except InputError as error:
        raise FeatureProblem(str(error)) from error
    except OSError as error:
        reason = "does not exist" if not is_there(path) else f"is damaged or no HDF5 file ({error})"
        raise FeatureProblem(f"{path}: {reason}") from error


def attributes_of(h5: h5py.File) -> dict[str, Any]:
    """Attributes of the file, its features and its coordinates; where they disagree, the latter count."""
    found: dict[str, Any] = {}
    for holder in (h5, *(h5[name] for name in ("features", "feats", "coords") if name in h5)):
        found |= {
            name: value.decode() if isinstance(value, bytes) else value for name, value in dict(holder.attrs).items()
        }
    return found
