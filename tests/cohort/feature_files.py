"""Feature files in the layouts of TRIDENT, CLAM and STAMP, written as those programs write them."""

from pathlib import Path

import h5py
import numpy as np
import torch
from numpy.typing import NDArray

TILE = 64
"""Level-0 pixels of a tile in these files."""
MPP = 0.5


def grid(columns: int, rows: int, start: tuple[int, int] = (128, 256)) -> NDArray[np.int64]:
    """Places of a full grid of tiles at level 0."""
    y, x = np.mgrid[:rows, :columns]
    return np.stack([x.ravel() * TILE + start[0], y.ravel() * TILE + start[1]], axis=1)


def trident(
    path: Path,
    features: NDArray[np.float32],
    coords: NDArray[np.int64],
    *,
    batched: bool = False,
    magnification: float = 10,
    overlap: int = 0,
) -> None:
    """As TRIDENT's `extract_patch_features` saves: attributes on both datasets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as h5:
        h5["features"] = features[None] if batched else features
        h5["features"].attrs.update({"name": path.stem, "savetodir": str(path.parent)})
        h5["coords"] = coords
        h5["coords"].attrs.update(
            {
                "patch_size": 32,
                "patch_size_level0": TILE,
                "level0_magnification": 2 * magnification,
                "target_magnification": magnification,
                "overlap": overlap,
                "name": path.stem,
                "savetodir": str(path.parent),
            }
        )


def clam_patches(path: Path, coords: NDArray[np.int64], patch_size: int = 16, downsample: float = 4.0) -> None:
    """As CLAM's `create_patches_fp` saves coordinates: at level 0, with the patch size of a coarser level."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as h5:
        h5["coords"] = coords
        h5["coords"].attrs.update(
            {
                "patch_size": patch_size,
                "patch_level": 1,
                "downsample": np.array([downsample, downsample]),
                "downsampled_level_dim": np.array([256, 256]),
                "level_dim": np.array([256, 256]),
                "name": path.stem,
                "save_path": str(path.parent),
            }
        )


def clam(
    path: Path, features: NDArray[np.float32], coords: NDArray[np.int64], *, patches: Path | None, pt: bool = False
) -> None:
    """As CLAM's `extract_features_fp` saves: no attributes, or a tensor alone; coordinates are in `patches`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if pt:
        torch.save(torch.from_numpy(features), path)
    else:
        with h5py.File(path, "w") as h5:
            h5["features"], h5["coords"] = features, coords.astype(np.int32)
    if patches is not None:
        clam_patches(patches / f"{path.stem}.h5", coords)


def stamp(path: Path, features: NDArray[np.float32], coords: NDArray[np.int64], version: str = "2.1") -> None:
    """As STAMP saves: half precision, micrometres; before version 2 in units of 256 um / 224."""
    path.parent.mkdir(parents=True, exist_ok=True)
    microns = coords * MPP
    with h5py.File(path, "w") as h5:
        h5["feats"] = features.astype(np.float16)
        h5["coords"] = microns if version != "1" else coords / TILE * 224
        if version == "2.1":
            h5.attrs.update({"unit": "um", "tile_size_um": TILE * MPP, "tile_size_px": 224})
            h5.attrs.update({"extractor": "ctranspath", "stamp_version": "2.1.0", "code_hash": "0"})
        elif version == "2.0":
            h5.attrs.update({"unit": "um", "tile_size": TILE * MPP, "extractor": "ctranspath"})
