"""Features of a cohort in the folders that TRIDENT writes, for TRIDENT, CLAM and torchmil.

```
20x_256px_0px_overlap/
  patches/SLIDE_patches.h5     coords (N, 2) at level 0
  features_ENCODER/SLIDE.h5    features (N, D), and the same coords
```
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import h5py
import numpy as np
from numpy.typing import NDArray

from its2clr.cohort import Cohort, TileFile
from its2clr.stages import Stages


def write_trident(folder: Path, stages: Stages, encoder: str, progress: Callable[[int], None] | None = None) -> Path:
    """Write the features of every bag of the run's cohort; no label is read.

    Args:
        folder: Where the folder of the tiling goes.
        stages: The run; features that it does not hold yet are extracted.
        encoder: Whose features.
        progress: Called with the number of bags written.

    Returns:
        The folder of the tiling: what torchmil's `TridentWSIDataset` takes as `base_path`.
    """
    cohort = Cohort.open(stages.run.cohort).without_labels()
    overlap = int(cohort.info.settings.get("overlap") or 0)
    base, written = folder, 0
    for split in sorted(set(cohort.bags["split"])):
        part = cohort.split(split)
        found = stages.features(encoder, part)
        features, offsets = found.features.cpu().numpy().astype(np.float32, copy=False), part.offsets()
        for number, bag_id in enumerate(part.bags["bag_id"]):
            tiles = part.tile_file(bag_id)
            base = folder / _tiling_name(cohort, overlap)
            _write_bag(base, encoder, tiles, features[offsets[number] : offsets[number + 1]], overlap)
            written += 1
            if progress is not None:
                progress(written)
    return base


def _write_bag(base: Path, encoder: str, tiles: TileFile, features: NDArray[np.float32], overlap: int) -> None:
    name = quote(tiles.bag_id, safe="")
    attributes: dict[str, Any] = {
        "patch_size": tiles.tile_size,
        "patch_size_level0": tiles.tile_size_level0,
        "overlap": overlap,
        "name": tiles.bag_id,
        "savetodir": base.name,
    }
    if math.isfinite(tiles.mpp):
        magnification = 10 / tiles.mpp
        attributes["target_magnification"] = _number(magnification)
        attributes["level0_magnification"] = _number(magnification * tiles.tile_size_level0 / tiles.tile_size)
    made_by = {"name": tiles.bag_id, "savetodir": f"features_{encoder}", "encoder": encoder}
    for path, datasets in (
        (base / "patches" / f"{name}_patches.h5", {"coords": (tiles.coords, attributes)}),
        (
            base / f"features_{encoder}" / f"{name}.h5",
            {"features": (features, made_by), "coords": (tiles.coords, attributes)},
        ),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        with h5py.File(path, "w") as file:
            for key, (values, told) in datasets.items():
                file[key] = values
                file[key].attrs.update(told)


def _tiling_name(cohort: Cohort, overlap: int) -> str:
    """TRIDENT's name of a folder; tiles without a scale have no magnification in it."""
    mpp = cohort.info.settings.get("mpp")
    scale = f"{_number(10 / float(mpp)):g}x_" if mpp else ""
    return f"{scale}{cohort.tile_size}px_{overlap}px_overlap"


def _number(value: float) -> int | float:
    return round(value) if math.isclose(value, round(value), rel_tol=1e-6) else round(value, 6)
