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

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

import h5py
import numpy as np
from numpy.typing import NDArray

from its2clr import far
from its2clr.cohort.features.tile_grids import (
    PATCHES,
    FeatureProblem,
    attributes_of,
    grid_of_file,
    grid_of_patches,
    open_h5,
)
from its2clr.cohort.manifest import IMAGE_SUFFIXES
from its2clr.cohort.slides.slide_files import SLIDE_SUFFIXES
from its2clr.cohort.tiles import half_or_single
from its2clr.files import damage_said
from its2clr.units import Level0Pixels, MicronsPerPixel, TilePixels

Layout = Literal["TRIDENT", "CLAM", "STAMP", "its2clr"]
H5_SUFFIXES = (".h5", ".hdf5")
SUFFIXES = (*H5_SUFFIXES, ".pt")
_DAMAGED = "is damaged, or no feature file that is known"


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
        features: (N, D) float16 or float32, as the file has them.
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
    features: NDArray[np.float16 | np.float32]
    coords: NDArray[np.int64]
    tile_size: TilePixels
    tile_size_level0: Level0Pixels
    mpp_level0: MicronsPerPixel
    extractor: str
    notes: tuple[str, ...] = ()
    magnification: float | None = None
    overlap: TilePixels | None = None


def find_feature_files(folder: Path) -> dict[str, list[Path]]:
    """Feature files in a folder and those below it, by the name of their slide; HDF5 goes before `.pt`.

    Files of coordinates alone, in folders named `patches`, are none.
    """
    found: dict[str, list[Path]] = {}
    for path in far.files_below(folder):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix.lower() in SUFFIXES and path.parent.name != PATCHES and not hidden:
            found.setdefault(unquote(path.stem), []).append(path)
    for name, paths in found.items():
        found[name] = [path for path in paths if path.suffix.lower() in H5_SUFFIXES] or paths
    return found


def read_header(path: Path) -> FeatureHeader:
    """Layout and size of a feature file.

    Raises:
        FeatureProblem: It holds no features of tiles, or cannot be read.
    """
    _check_kind(path)
    with _at_hand(path) as file, damage_said(f"{file}: {_DAMAGED}", raised=FeatureProblem):
        if file.suffix.lower() == ".pt":
            return FeatureHeader("CLAM", *_checked_shape(file, tuple(_torch_features(file).shape)))
        with open_h5(file) as h5:
            layout = _layout(file, h5)
            shape = tuple(h5["feats" if layout == "STAMP" else "features"].shape)
            extractor = _extractor(attributes_of(h5))
        return FeatureHeader(layout, *_checked_shape(file, shape), extractor)


def read_foreign_features(
    path: Path, *, mpp: MicronsPerPixel | None = None, coords: Path | None = None
) -> PlacedFeatures:
    """Read a feature file and bring its coordinates to level 0.

    Args:
        path: An HDF5 file of TRIDENT, CLAM, STAMP or its2clr, or a `.pt` file of CLAM or TRIDENT.
        mpp: Microns per pixel of level 0, if known from elsewhere; it is believed before what the file says.
        coords: Folder of CLAM's or TRIDENT's `patches` files; None: looked for beside the features.

    Raises:
        FeatureProblem: It cannot be used.
    """
    _check_kind(path)
    with _at_hand(path) as file, damage_said(f"{file}: {_DAMAGED}", raised=FeatureProblem):
        return _read(file, mpp, coords)


@contextmanager
def _at_hand(path: Path) -> Iterator[Path]:
    """The file, fetched if its path is an address; what is wrong with it is said of the address."""
    if not far.is_far(path):
        yield path
        return
    address, opened = far.address_of(path), ExitStack()
    try:
        file = opened.enter_context(far.local(path))
    except FileNotFoundError as error:
        raise FeatureProblem(f"{address}: there is no such object") from error
    with opened:
        try:
            yield file
        except FeatureProblem as problem:
            raise FeatureProblem(str(problem).replace(str(file), address)) from problem


def _read(path: Path, mpp: MicronsPerPixel | None, coords: Path | None) -> PlacedFeatures:
    attributes: Mapping[str, Any] = {}
    if path.suffix.lower() == ".pt":
        layout: Layout = "CLAM"
        features = _as_matrix(path, _torch_features(path))
        grid = grid_of_patches(path, coords, None)
    else:
        with open_h5(path) as h5:
            layout = _layout(path, h5)
            features = _as_matrix(path, h5["feats" if layout == "STAMP" else "features"][()])
            attributes = attributes_of(h5)
            grid = grid_of_file(path, h5, coords)
    if len(features) == 0:
        raise FeatureProblem(f"{path}: holds no instances")
    if len(grid.coords) != len(features):
        raise FeatureProblem(f"{path}: {len(features)} rows of features, but {len(grid.coords)} coordinates")
    if not np.isfinite(features).all():
        rows = int((~np.isfinite(features).all(axis=1)).sum())
        raise FeatureProblem(f"{path}: {rows} of {len(features)} rows have features that are not finite")
    placed = grid.at_level0(path, mpp)
    return PlacedFeatures(
        layout=layout,
        features=features,
        coords=placed.coords.astype(np.int64),
        tile_size=placed.tile_size,
        tile_size_level0=Level0Pixels(int(placed.side)),
        mpp_level0=placed.mpp_level0,
        extractor=_extractor(attributes),
        notes=placed.notes,
        magnification=placed.magnification,
        overlap=placed.overlap,
    )


def _layout(path: Path, h5: h5py.File) -> Layout:
    if "feats" in h5:
        return "STAMP"
    if "features" not in h5:
        names = ", ".join(sorted(h5)) or "nothing"
        raise FeatureProblem(f"{path}: holds neither `features` nor `feats`, but {names}")
    attributes = attributes_of(h5)
    if "its2clr_version" in attributes:
        return "its2clr"
    return "TRIDENT" if "patch_size_level0" in attributes else "CLAM"


def _extractor(attributes: Mapping[str, Any]) -> str:
    return str(attributes.get("extractor") or attributes.get("encoder") or "")


def _torch_features(path: Path) -> Any:
    """The tensor of a `.pt` file; nothing but tensors is read from it."""
    import torch

    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FeatureProblem(f"{path}: {_why_no_tensors(path, str(error))}") from error
    if isinstance(held, dict):
        held = held.get("features", held.get("feats"))
    if not isinstance(held, torch.Tensor):
        raise FeatureProblem(f"{path}: holds no tensor of features")
    return held.float().numpy()


def _why_no_tensors(path: Path, said: str) -> str:
    """What is wrong with a `.pt` file, in place of what torch says of it."""
    held = re.search(r"GLOBAL (\S+)", said)
    if held is None:
        return "cannot be read as a file of tensors; it is damaged, or not written by torch.save"
    kind = "NumPy arrays" if held[1].startswith("numpy") else f"Python objects ({held[1]})"
    return (
        f"holds {kind}, which could run code when they are loaded and are never read; save the features as HDF5, or as "
        f"a tensor: `torch.save(torch.as_tensor(features), {path.name!r})`"
    )


def _check_kind(path: Path) -> None:
    """Refuse slides and images by their names, before they are taken for damaged files of features."""
    suffix = path.suffix.lower()
    if suffix in SLIDE_SUFFIXES or suffix in IMAGE_SUFFIXES:
        what = "a slide or an image" if suffix in SLIDE_SUFFIXES else "an image"
        known = ", ".join(SUFFIXES)
        raise FeatureProblem(
            f"{path}: is {what}, and features are expected ({known}): first extract them, with the program that made "
            "the others"
        )


def _checked_shape(path: Path, shape: tuple[int, ...]) -> tuple[int, int]:
    shape = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
    if len(shape) != 2 or shape[1] < 1:
        raise FeatureProblem(f"{path}: expected features (N, D), got {shape}")
    return shape[0], shape[1]


def _as_matrix(path: Path, values: Any) -> NDArray[np.float16 | np.float32]:
    found = half_or_single(values)
    return found.reshape(_checked_shape(path, found.shape))
