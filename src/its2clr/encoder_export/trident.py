"""Features of a cohort in the folders that TRIDENT writes, for TRIDENT, CLAM and torchmil.

```
20x_256px_0px_overlap/         magnification, size and overlap of the tiles, as far as they are known
  patches/SLIDE_patches.h5     coords (N, 2) at level 0
  features_ENCODER/SLIDE.h5    features (N, D), and the same coords
```
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from its2clr.cohort import Cohort, TileFile
from its2clr.cohort.new_hdf5 import new_hdf5
from its2clr.units import level0_magnification, magnification_of

_OBJECTIVES = (0.625, 1.25, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_SAME_SCALE = 0.05
"""How far the scales of bags may differ and count as one: tiles are whole pixels, and scanners differ a little."""
_UNKNOWN_TILING = "unknown_tiling"


class TridentFolder(NamedTuple):
    """What was written.

    Attributes:
        path: The folder of the tiling: what torchmil's `TridentWSIDataset` takes as `base_path`.
        notes: What is left out of its name, and why.
    """

    path: Path
    notes: tuple[str, ...]


def write_trident(
    folder: Path, cohort: Cohort, encoder: str, features_of: Callable[[Cohort], NDArray[np.float32]]
) -> TridentFolder:
    """Write the features of every bag of a cohort.

    Args:
        folder: Where the folder of the tiling goes.
        cohort: The bags; their labels are not looked at.
        encoder: What the folder calls the encoder.
        features_of: Gives the (N, D) features of the instances of some of the bags.
    """
    name, notes = tiling_name(cohort)
    base = folder / name
    for split in sorted(set(cohort.bags["split"])):
        part = cohort.split(split)
        features = np.split(features_of(part).astype(np.float32, copy=False), part.offsets()[1:-1])
        for bag_id, of_bag in zip(part.bags["bag_id"], features, strict=True):
            _write_bag(base, encoder, part.tile_file(bag_id), of_bag)
    return TridentFolder(base, notes)


def tiling_name(cohort: Cohort) -> tuple[str, tuple[str, ...]]:
    """TRIDENT's name for the tiling of a cohort, such as `20x_256px_0px_overlap`; and what is left out of it, and why.

    What the cohort does not know, and what differs between its bags, is left out.
    """
    bags = [cohort.tile_file(bag_id) for bag_id in cohort.bags["bag_id"]]
    parts, notes = [], []
    magnifications = _magnifications(cohort, bags)
    magnification = _common(magnifications)
    if magnification is not None:
        parts.append(f"{magnification:g}x")
    elif magnifications:
        notes.append(f"no magnification: bags differ, from {min(magnifications):.3g}x to {max(magnifications):.3g}x")
    else:
        notes.append("no magnification: the cohort does not know the scale (mpp) of all its tiles")
    sizes = {tiles.tile_size for tiles in bags}
    if len(sizes) == 1:
        parts.append(f"{sizes.pop()}px")
    else:
        notes.append(f"no size: tiles of {', '.join(map(str, sorted(sizes)))} px")
    overlaps = {tiles.overlap for tiles in bags if tiles.overlap is not None}
    if len(overlaps) == 1:
        parts.append(f"{overlaps.pop()}px_overlap")
    elif overlaps:
        notes.append(f"no overlap: neighbouring tiles share {', '.join(map(str, sorted(overlaps)))} px")
    else:
        notes.append("no overlap: the cohort does not know how far its tiles overlap")
    return "_".join(parts) or _UNKNOWN_TILING, tuple(notes)


def _write_bag(base: Path, encoder: str, tiles: TileFile, features: NDArray[np.float32]) -> None:
    name = quote(tiles.bag_id, safe="")
    attributes: dict[str, Any] = {
        "patch_size": tiles.tile_size,
        "patch_size_level0": tiles.tile_size_level0,
        "name": tiles.bag_id,
        "savetodir": base.name,
    }
    if tiles.overlap is not None:
        attributes["overlap"] = tiles.overlap
    if tiles.magnification is not None:
        attributes["target_magnification"] = _number(tiles.magnification)
        attributes["level0_magnification"] = _number(
            level0_magnification(tiles.magnification, tiles.tile_size, tiles.tile_size_level0)
        )
    made_by = {"name": tiles.bag_id, "savetodir": f"features_{encoder}", "encoder": encoder}
    for path, datasets in (
        (base / "patches" / f"{name}_patches.h5", {"coords": (tiles.coords, attributes)}),
        (
            base / f"features_{encoder}" / f"{name}.h5",
            {"features": (features, made_by), "coords": (tiles.coords, attributes)},
        ),
    ):
        with new_hdf5(path) as file:
            for key, (values, told) in datasets.items():
                file[key] = values
                file[key].attrs.update(told)


def _magnifications(cohort: Cohort, bags: Sequence[TileFile]) -> list[float]:
    """The magnification that slides were cut at, or those of the bags; none if a bag does not know its own."""
    mpp = cohort.info.settings.get("mpp")
    if mpp:
        return [magnification_of(float(mpp))]
    known = [tiles.magnification for tiles in bags if tiles.magnification is not None]
    return known if len(known) == len(bags) else []


def _common(magnifications: Sequence[float]) -> float | None:
    """The magnification of all bags; if they are nearly equal, that of the nearest objective; None if they differ."""
    if not magnifications:
        return None
    if len(set(magnifications)) == 1:
        return _number(magnifications[0])
    middle = median(magnifications)
    if any(abs(one / middle - 1) > _SAME_SCALE for one in magnifications):
        return None
    nearest = min(_OBJECTIVES, key=lambda one: abs(one / middle - 1))
    return nearest if abs(nearest / middle - 1) <= _SAME_SCALE else float(f"{middle:.3g}")


def _number(value: float) -> int | float:
    return round(value) if math.isclose(value, round(value), rel_tol=1e-6) else round(value, 6)
