"""Feature files of other programs: TRIDENT, CLAM, STAMP and our own, with their coordinates brought to level 0.

```
TRIDENT    features (N, D) or (1, N, D); coords (N, 2) at level 0 with attributes patch_size, patch_size_level0,
           level0_magnification, target_magnification, overlap
CLAM       features, coords (N, 2) at level 0 without attributes, or a .pt tensor (N, D) alone; patches/SLIDE.h5 holds
           coords with the attributes patch_size (at patch_level), patch_level, downsample, level_dim
STAMP      feats (N, D), coords (N, 2) in micrometres; attributes unit=um, tile_size_um (2.0: tile_size), tile_size_px,
           extractor; before 2.0 coords in units of 256 um / 224
its2clr    as TRIDENT, with mpp (of the tiles) and encoder
```
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

import h5py
import numpy as np
from numpy.typing import NDArray

from its2clr.cohort.tiles import MAGNIFICATION_MPP
from its2clr.errors import InputError

Layout = Literal["TRIDENT", "CLAM", "STAMP", "its2clr"]
H5_SUFFIXES = (".h5", ".hdf5")
SUFFIXES = (*H5_SUFFIXES, ".pt")

_STAMP_TILE = 224
_HISTORIC_STAMP = 256 / 224
"""Micrometres per unit of the coordinates before STAMP 2."""
_PATCHES = "patches"


class FeatureProblem(InputError):  # noqa: N818 - like SlideProblem
    """A feature file that cannot be used, and why."""


class FeatureHeader(NamedTuple):
    """What a feature file says before its features are read: layout, instances, features, and what made them."""

    layout: Layout
    instances: int
    feature_dim: int
    extractor: str = ""


@dataclass(frozen=True, eq=False)
class PlacedFeatures:
    """Features of one slide with their places at level 0.

    Attributes:
        layout: Which program's file it is.
        features: (N, D) float32.
        coords: (N, 2) int64, x and y of the tiles' upper left corners at level 0.
        tile_size: Pixels of a tile as the encoder saw it.
        tile_size_level0: Pixels of a tile at level 0.
        mpp_level0: Microns per pixel of level 0; NaN if unknown.
        extractor: What made the features; "" if the file does not say.
        notes: What was assumed.
        magnification: Of a tile as the encoder saw it, where the file says it; None if it does not.
        overlap: Pixels of such a tile that neighbours share; None if unknown.
    """

    layout: Layout
    features: NDArray[np.float32]
    coords: NDArray[np.int64]
    tile_size: int
    tile_size_level0: int
    mpp_level0: float
    extractor: str
    notes: tuple[str, ...] = ()
    magnification: float | None = None
    overlap: int | None = None


class _Grid(NamedTuple):
    """Where tiles are: coordinates and side in pixels of level 0, or in micrometres."""

    coords: NDArray[np.float64]
    side: float
    tile_size: int
    in_microns: bool = False
    mpp_level0: float = math.nan
    notes: tuple[str, ...] = ()
    magnification: float | None = None
    overlap: int | None = None


def find_feature_files(folder: Path) -> dict[str, list[Path]]:
    """Feature files in a folder and those below it, by the name of their slide; HDF5 goes before `.pt`.

    Files of coordinates alone, in folders named `patches`, are none.
    """
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix.lower() in SUFFIXES and path.parent.name != _PATCHES and not hidden and path.is_file():
            found.setdefault(unquote(path.stem), []).append(path)
    for name, paths in found.items():
        found[name] = [path for path in paths if path.suffix.lower() in H5_SUFFIXES] or paths
    return found


def read_header(path: Path) -> FeatureHeader:
    """Layout and size of a feature file.

    Raises:
        FeatureProblem: It holds no features of tiles, or cannot be read.
    """
    if path.suffix.lower() == ".pt":
        return FeatureHeader("CLAM", *_checked_shape(path, tuple(_torch_features(path).shape)))
    with _opened(path) as h5:
        layout = _layout(path, h5)
        shape = tuple(h5["feats" if layout == "STAMP" else "features"].shape)
        extractor = _extractor(_attributes(h5))
    return FeatureHeader(layout, *_checked_shape(path, shape), extractor)


def read_foreign_features(path: Path, *, mpp: float | None = None, coords: Path | None = None) -> PlacedFeatures:
    """Read a feature file and bring its coordinates to level 0.

    Args:
        path: An HDF5 file of TRIDENT, CLAM, STAMP or its2clr, or a `.pt` file of CLAM or TRIDENT.
        mpp: Microns per pixel of level 0, where known from elsewhere; goes before what the file says.
        coords: Folder of CLAM's or TRIDENT's `patches` files; None: looked for beside the features.

    Raises:
        FeatureProblem: It cannot be used.
    """
    attributes: Mapping[str, Any] = {}
    if path.suffix.lower() == ".pt":
        layout: Layout = "CLAM"
        features = _as_matrix(path, _torch_features(path))
        grid = _grid_of_patches(path, coords, None)
    else:
        with _opened(path) as h5:
            layout = _layout(path, h5)
            features = _as_matrix(path, h5["feats" if layout == "STAMP" else "features"][()])
            attributes = _attributes(h5)
            grid = _grid(path, layout, h5, coords)
    if len(features) == 0:
        raise FeatureProblem(f"{path}: holds no instances")
    if len(grid.coords) != len(features):
        raise FeatureProblem(f"{path}: {len(features)} rows of features, but {len(grid.coords)} coordinates")
    if not np.isfinite(features).all():
        rows = int((~np.isfinite(features).all(axis=1)).sum())
        raise FeatureProblem(f"{path}: {rows} of {len(features)} rows have features that are not finite")
    return _placed(path, layout, features, grid, mpp, _extractor(attributes))


def _placed(
    path: Path, layout: Layout, features: NDArray[np.float32], grid: _Grid, mpp: float | None, extractor: str
) -> PlacedFeatures:
    level0 = grid.mpp_level0 if mpp is None else mpp
    notes = grid.notes
    scale = 1.0
    if grid.in_microns:
        if not level0 > 0:
            level0 = 1.0
            notes = (*notes, "places are in micrometres: give the slide's mpp in the table to have them in its pixels")
        scale = 1 / level0
    side = round(grid.side * scale)
    places = np.rint(grid.coords * scale)
    if side < 1 or not np.isfinite(places).all():
        raise FeatureProblem(f"{path}: tiles have a side of {grid.side:g}, or coordinates are not finite")
    return PlacedFeatures(
        layout=layout,
        features=features,
        coords=places.astype(np.int64),
        tile_size=grid.tile_size,
        tile_size_level0=side,
        mpp_level0=float(level0),
        extractor=extractor,
        notes=notes,
        magnification=grid.magnification,
        overlap=grid.overlap,
    )


def _layout(path: Path, h5: h5py.File) -> Layout:
    if "feats" in h5:
        return "STAMP"
    if "features" not in h5:
        names = ", ".join(sorted(h5)) or "nothing"
        raise FeatureProblem(f"{path}: holds neither `features` nor `feats`, but {names}")
    attributes = _attributes(h5)
    if "its2clr_version" in attributes:
        return "its2clr"
    return "TRIDENT" if "patch_size_level0" in attributes else "CLAM"


def _attributes(h5: h5py.File) -> dict[str, Any]:
    """Attributes of the file, its features and its coordinates, the latter first; text as text."""
    found: dict[str, Any] = {}
    for holder in (h5, *(h5[name] for name in ("features", "feats", "coords") if name in h5)):
        found |= {
            name: value.decode() if isinstance(value, bytes) else value for name, value in dict(holder.attrs).items()
        }
    return found


def _extractor(attributes: Mapping[str, Any]) -> str:
    return str(attributes.get("extractor") or attributes.get("encoder") or "")


def _grid(path: Path, layout: Layout, h5: h5py.File, folder: Path | None) -> _Grid:
    places = _coords(path, h5)
    attributes = _attributes(h5)
    try:
        if layout == "STAMP":
            return _stamp_grid(path, places, attributes)
        if layout == "CLAM" and "patch_size" not in attributes:
            return _grid_of_patches(path, folder, places)
        return _pixel_grid(path, places, attributes)
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise FeatureProblem(f"{path}: its attributes cannot be understood ({error})") from error


def _coords(path: Path, h5: h5py.File) -> NDArray[np.float64]:
    if "coords" not in h5:
        raise FeatureProblem(f"{path}: has no `coords`: these are features of a whole slide, not of its tiles")
    places = np.asarray(h5["coords"][()], dtype=np.float64)
    places = places[0] if places.ndim == 3 and len(places) == 1 else places
    if places.ndim != 2 or places.shape[1] != 2:
        raise FeatureProblem(f"{path}: expected coords (N, 2), got {places.shape}")
    return places


def _stamp_grid(path: Path, places: NDArray[np.float64], attributes: Mapping[str, Any]) -> _Grid:
    size, unit = attributes.get("tile_size_um"), attributes.get("unit")
    if size is None and unit == "um":
        size = attributes.get("tile_size")
    notes: tuple[str, ...] = ()
    if size is not None:
        pixels = int(attributes.get("tile_size_px", _STAMP_TILE))
        if "tile_size_px" not in attributes:
            notes = (f"tiles are taken to have been {_STAMP_TILE} px wide for the encoder (STAMP's default)",)
        return _micron_grid(places, float(size), pixels, notes)
    if round(float(attributes.get("tile_size", _stride(places)))) == _STAMP_TILE:
        note = "coordinates are taken to be in units of 256 um / 224, as before STAMP 2"
        return _micron_grid(places * _HISTORIC_STAMP, 256.0, _STAMP_TILE, (note,))
    raise FeatureProblem(f"{path}: does not say the size of its tiles (tile_size_um); extract its features anew")


def _micron_grid(places: NDArray[np.float64], side: float, tile_size: int, notes: tuple[str, ...]) -> _Grid:
    return _Grid(
        places,
        side,
        tile_size,
        in_microns=True,
        notes=notes,
        magnification=MAGNIFICATION_MPP * tile_size / side if side > 0 else None,
        overlap=_overlap(places, side, tile_size),
    )


def _pixel_grid(path: Path, places: NDArray[np.float64], attributes: Mapping[str, Any]) -> _Grid:
    """Coordinates at level 0 with TRIDENT's attributes, CLAM's, or our own."""
    tile_size = int(attributes["patch_size"])
    if "patch_size_level0" in attributes:
        side = float(attributes["patch_size_level0"])
    else:
        side = tile_size * _downsample(path, attributes)
    mpp = math.nan
    if "mpp" in attributes and side > 0:
        mpp = float(attributes["mpp"]) * tile_size / side
    elif float(attributes.get("level0_magnification", 0) or 0) > 0:
        mpp = MAGNIFICATION_MPP / float(attributes["level0_magnification"])
    magnification = float(attributes.get("target_magnification", 0) or 0)
    return _Grid(
        places,
        side,
        tile_size,
        mpp_level0=mpp,
        magnification=magnification if magnification > 0 else None,
        overlap=int(attributes["overlap"]) if "overlap" in attributes else _overlap(places, side, tile_size),
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


def _grid_of_patches(path: Path, folder: Path | None, places: NDArray[np.float64] | None) -> _Grid:
    """The grid of a CLAM file without attributes: from its `patches` file, else from the distances of its tiles."""
    for candidate in _patch_files(path, folder):
        with _opened(candidate) as h5:
            attributes = _attributes(h5)
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
    return _Grid(places, side, round(side), notes=(note,))


def _patch_files(path: Path, folder: Path | None) -> Iterator[Path]:
    """Files that may hold the coordinates of a slide, the likeliest first."""
    stem = path.stem
    bases = [folder] if folder is not None else [path.parent, path.parent.parent]
    for base in bases:
        for place in (base / _PATCHES, base, base / "h5_files"):
            for name in (f"{stem}.h5", f"{stem}_patches.h5"):
                if (place / name).is_file() and place / name != path:
                    yield place / name


def _stride(places: NDArray[np.float64]) -> float:
    """The commonest distance between neighbours of a row or a column; 0 if there are none."""
    distances: Counter[float] = Counter()
    for along, across in ((0, 1), (1, 0)):
        order = np.lexsort((places[:, along], places[:, across]))
        ordered = places[order]
        same = np.diff(ordered[:, across]) == 0
        steps = np.diff(ordered[:, along])[same]
        distances.update(np.round(steps[steps > 0], 3).tolist())
    return max(distances, key=lambda step: (distances[step], -step)) if distances else 0.0


def _overlap(places: NDArray[np.float64], side: float, tile_size: int) -> int | None:
    """Pixels of a tile that neighbours share, by their commonest distance; None if there are no neighbours."""
    step = _stride(places)
    return max(0, round(tile_size * (1 - step / side))) if step > 0 and side > 0 else None


def _opened(path: Path) -> h5py.File:
    try:
        return h5py.File(path, "r")
    except OSError as error:
        reason = "does not exist" if not path.exists() else f"is damaged or no HDF5 file ({error})"
        raise FeatureProblem(f"{path}: {reason}") from error


def _torch_features(path: Path) -> Any:
    """The tensor of a `.pt` file; nothing but tensors is read from it."""
    import torch

    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise FeatureProblem(f"{path}: cannot be read as a file of tensors ({first})") from error
    if isinstance(held, dict):
        held = held.get("features", held.get("feats"))
    if not isinstance(held, torch.Tensor):
        raise FeatureProblem(f"{path}: holds no tensor of features")
    return held.float().numpy()


def _checked_shape(path: Path, shape: tuple[int, ...]) -> tuple[int, int]:
    shape = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
    if len(shape) != 2 or shape[1] < 1:
        raise FeatureProblem(f"{path}: expected features (N, D), got {shape}")
    return shape[0], shape[1]


def _as_matrix(path: Path, values: Any) -> NDArray[np.float32]:
    found = np.asarray(values, dtype=np.float32)
    return found.reshape(_checked_shape(path, found.shape))
