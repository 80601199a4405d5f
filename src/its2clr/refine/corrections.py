"""Corrections by a person: tiles marked in QuPath as truly positive or negative are trusted in refinement."""

from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from its2clr.cohort import Cohort
from its2clr.cohort.tiles import TileFile
from its2clr.errors import InputError
from its2clr.files import atomic_path

POSITIVE = "Confirmed positive"
NEGATIVE = "Confirmed negative"
"""Classes of the marked areas or tiles, in upper or lower case."""
LEAST_SHARE = 0.5
"""A tile counts as marked if at least this share of it is marked."""
UNKNOWN = -1
"""An instance that nobody marked."""
FILE = "corrections.csv"
_LISTED = 10

Trusted = NDArray[np.int8]


def trusted_instances(corrections: Path, train: Cohort, run: Path, say: Callable[[str], None]) -> Trusted:
    """What a person marked for each training instance; saved in the run, so that a stopped run continues with it.

    Args:
        corrections: A folder with a GeoJSON file per corrected bag, named like the bag.
        train: The training bags; corrections of other bags are ignored.
        run: Folder of the run.
        say: Called with a message about how much was marked.

    Returns:
        (N,) 1 (positive), 0 (negative) or -1 (not marked).

    Raises:
        InputError: The corrections cannot be read, or contradict each other or a bag's label.
    """
    kept = run / FILE
    if kept.is_file():
        return _from_table(pd.read_csv(kept, dtype={"bag_id": str}, keep_default_na=False), train)
    trusted = read_corrections(corrections, train, say)
    index = np.flatnonzero(trusted != UNKNOWN)
    bag = train.bag_index()[index]
    table = {"bag_id": train.bags["bag_id"].to_numpy()[bag], "instance": index - train.offsets()[bag]}
    with atomic_path(kept) as temporary:
        pd.DataFrame({**table, "label": trusted[index]}).to_csv(temporary, index=False)
    return trusted


def read_corrections(folder: Path, train: Cohort, say: Callable[[str], None]) -> Trusted:
    """Read a folder of corrections; see `trusted_instances`."""
    if not folder.is_dir():
        raise InputError(
            f"refine.corrections: {folder} is not a folder; give one with a GeoJSON file for each corrected bag"
        )
    files = {path.stem: path for path in sorted([*folder.glob("*.geojson"), *folder.glob("*.json")])}
    trusted = np.full(train.n_instances, UNKNOWN, np.int8)
    offsets, used, corrected = train.offsets(), set(), 0
    for number, (bag_id, label) in enumerate(zip(train.bags["bag_id"], train.bags["label"], strict=True)):
        path = files.get(quote(bag_id, safe="")) or files.get(bag_id)
        if path is None:
            continue
        used.add(path)
        found = _of_bag(path, train.tile_file(bag_id))
        if label == 0 and (found == 1).any():
            raise InputError(
                f"{path}: marks {int((found == 1).sum())} tiles of bag {bag_id!r} as positive, but the bag is labelled "
                "negative; correct the marks, or the label in the manifest"
            )
        trusted[offsets[number] : offsets[number + 1]] = found
        corrected += bool((found != UNKNOWN).any())
    others = sorted(path.name for path in files.values() if path not in used)
    listed = ", ".join(others[:_LISTED]) + (f" and {len(others) - _LISTED} more" if len(others) > _LISTED else "")
    if not used:
        raise InputError(
            f"refine.corrections: {folder} holds no GeoJSON file named like a training bag "
            f"({train.bags['bag_id'].iloc[0]}.geojson, for example); it holds {listed or 'none at all'}. Only training "
            "bags can be corrected: `its2clr geojson RUN --split train` exports them"
        )
    if not corrected:
        raise InputError(
            f"refine.corrections: nothing is marked in the {len(used)} files of {folder}; a mark covers at least half "
            f"of a tile and has the class {POSITIVE!r} or {NEGATIVE!r}"
        )
    say(
        f"corrections: {int((trusted == 1).sum())} tiles positive and {int((trusted == 0).sum())} negative in "
        f"{corrected} training bags" + (f"; not used, as not named like a training bag: {listed}" if others else "")
    )
    return trusted


def _of_bag(path: Path, tiles: TileFile) -> Trusted:
    from its2clr.cohort.slides.annotations import read_annotations
    from its2clr.cohort.slides.ground_truth import covered_share

    marked = {}
    for name in (POSITIVE, NEGATIVE):
        area = read_annotations(path, classes=[name]).tumour
        marked[name] = covered_share(area, tiles.coords, tiles.tile_size_level0) >= LEAST_SHARE
    both = int((marked[POSITIVE] & marked[NEGATIVE]).sum())
    if both:
        raise InputError(
            f"{path}: {both} tiles are marked as both {POSITIVE!r} and {NEGATIVE!r}; remove one of the marks"
        )
    return np.select([marked[POSITIVE], marked[NEGATIVE]], [1, 0], UNKNOWN).astype(np.int8)


def _from_table(table: pd.DataFrame, train: Cohort) -> Trusted:
    first = dict(zip(train.bags["bag_id"], train.offsets(), strict=False))
    trusted = np.full(train.n_instances, UNKNOWN, np.int8)
    rows = table["bag_id"].map(first).to_numpy(dtype=np.int64) + table["instance"].to_numpy(dtype=np.int64)
    trusted[rows] = table["label"].to_numpy(dtype=np.int8)
    return trusted
