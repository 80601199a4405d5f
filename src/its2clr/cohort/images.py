"""Pack the images of a manifest into a cohort folder: each one checked and brought to one size."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from its2clr.cohort.finish import plan_splits, settle_splits
from its2clr.cohort.image_files import ImageProblem, Resize, check_tile_settings, prepare_image
from its2clr.cohort.layout import (
    BAGS_FILE,
    CohortInfo,
    Encoding,
    LeftOut,
    claim_folder,
    tile_path,
    write_bags,
    write_problems,
)
from its2clr.cohort.manifest import Manifest
from its2clr.cohort.parallel import Progress, map_in_threads
from its2clr.cohort.splits import DEFAULT_FRACTIONS
from its2clr.cohort.tiles import read_tiles, virtual_grid, write_tile_file
from its2clr.errors import InputError

_FINGERPRINT = "fingerprint"


@dataclass(frozen=True)
class PackSummary:
    """What packing did.

    Attributes:
        path: The cohort folder.
        n_bags: Bags in the cohort.
        n_instances: Images in the cohort.
        n_packed: Bags written by this run.
        n_skipped: Bags that were already there, whole.
        n_images_left_out: Images that could not be used; see `problems.csv`.
        bags_left_out: Bags that have no usable image.
    """

    path: Path
    n_bags: int
    n_instances: int
    n_packed: int
    n_skipped: int
    n_images_left_out: int
    bags_left_out: tuple[str, ...]


@dataclass(frozen=True)
class _Bag:
    """One bag to be packed: its row of the manifest, and its images."""

    bag_id: str
    row: int
    files: tuple[Path, ...]
    names: tuple[str, ...]
    rows: tuple[int, ...]
    labels: tuple[int, ...] | None


@dataclass(frozen=True)
class _Packed:
    n_instances: int
    left_out: tuple[LeftOut, ...] = ()
    skipped: bool = False


@dataclass(frozen=True)
class _TileSettings:
    tile_size: int
    encoding: Encoding
    quality: int
    resize: Resize


def pack_images(
    bags: Manifest,
    out: Path,
    *,
    tile_size: int,
    encoding: Encoding = "jpeg",
    quality: int = 95,
    resize: Resize = "bilinear",
    workers: int | None = None,
    seed: int = 0,
    fractions: Sequence[float] = DEFAULT_FRACTIONS,
    progress: Progress | None = None,
) -> PackSummary:
    """Pack the images of a manifest into a cohort folder.

    Every image is decoded. One that cannot be used is left out and listed in `problems.csv`, and the rest
    goes on; so is a bag without any usable image. The same call again skips the bags that are whole, so
    packing goes on where it stopped, and tries again those that had problems. A manifest without labels
    becomes a cohort without labels, whose bags are all in test.

    Args:
        bags: The manifest.
        out: The cohort folder; new, empty, or begun with the same settings.
        tile_size: Pixels of the square tiles; other sizes are resized, once.
        encoding: How images that change are stored.
        quality: JPEG quality.
        resize: How pixels are interpolated.
        workers: Threads; the processors at hand if None.
        seed: Chooses the splits, if the manifest has none.
        fractions: Shares of train, val and test, if the manifest has no splits.
        progress: Called with the number of bags done and of all bags.

    Returns:
        What was packed, skipped and left out.

    Raises:
        InputError: If a setting is wrong, the folder holds something else, no bag is left, or a split lacks a
            class because bags were left out.
    """
    check_tile_settings(tile_size, encoding, quality, resize)
    out = Path(out)
    tiles = _TileSettings(tile_size, encoding, quality, resize)
    settings: dict[str, Any] = {"tile_size": tile_size, "encoding": encoding, "resize": resize}
    if encoding == "jpeg":
        settings["quality"] = quality
    settings |= plan_splits(bags, fractions, seed)
    claim_folder(
        out,
        CohortInfo(
            tile_size=tile_size,
            encoding=encoding,
            has_instance_labels=bags.has_instance_labels,
            labelled=bags.labelled,
            settings=settings,
        ),
    )

    waiting = _gather(bags)
    packed: list[_Packed] = []
    for result in map_in_threads(partial(_pack_bag, out=out, settings=tiles), waiting, workers):
        packed.append(result)
        if progress is not None:
            progress(len(packed), len(waiting))
    left_out = [one for result in packed for one in result.left_out]
    write_problems(out, left_out)
    table = bags.bags.assign(n_instances=[result.n_instances for result in packed])
    kept = table[table["n_instances"] > 0]
    lost = tuple(table.loc[table["n_instances"] == 0, "bag_id"].tolist())
    kept = settle_splits(kept, bags, out, fractions, seed)
    write_bags(out, kept)
    skipped = sum(result.skipped for result in packed)
    return PackSummary(
        path=out,
        n_bags=len(kept),
        n_instances=int(kept["n_instances"].sum()),
        n_packed=len(kept) - skipped,
        n_skipped=skipped,
        n_images_left_out=sum(bool(one.file) for one in left_out),
        bags_left_out=lost,
    )


def _gather(manifest: Manifest) -> list[_Bag]:
    members = dict(iter(manifest.instances.groupby("bag_id", sort=False)))
    with_labels = manifest.has_instance_labels
    gathered = []
    for row, bag_id in zip(manifest.bags.index.tolist(), manifest.bags["bag_id"].tolist(), strict=True):
        rows = members[bag_id]
        gathered.append(
            _Bag(
                bag_id=bag_id,
                row=row,
                files=tuple(Path(file) for file in rows["file"].tolist()),
                names=tuple(rows["name"].tolist()),
                rows=tuple(rows.index.tolist()),
                labels=tuple(rows["label"].tolist()) if with_labels else None,
            )
        )
    return gathered


def _pack_bag(bag: _Bag, *, out: Path, settings: _TileSettings) -> _Packed:
    path = tile_path(out, bag.bag_id)
    fingerprint = _fingerprint(bag, settings)
    if _is_whole(path, bag, fingerprint):
        return _Packed(len(bag.files), skipped=True)
    # while bags are being written the folder is not complete, so it must not look so
    (out / BAGS_FILE).unlink(missing_ok=True)
    images: list[bytes] = []
    kept: list[int] = []
    left_out: list[LeftOut] = []
    for number, file in enumerate(bag.files):
        try:
            image = prepare_image(
                file,
                tile_size=settings.tile_size,
                encoding=settings.encoding,
                quality=settings.quality,
                resize=settings.resize,
            )
        except ImageProblem as problem:
            left_out.append(LeftOut(bag.bag_id, bag.names[number], bag.rows[number], str(problem)))
            continue
        images.append(image)
        kept.append(number)
    if not images:
        path.unlink(missing_ok=True)
        left_out.append(LeftOut(bag.bag_id, "", bag.row, "no usable image: the whole bag was left out"))
        return _Packed(0, tuple(left_out))
    write_tile_file(
        path,
        images,
        virtual_grid(len(bag.files), settings.tile_size)[kept],
        [bag.names[number] for number in kept],
        None if bag.labels is None else [bag.labels[number] for number in kept],
        bag_id=bag.bag_id,
        tile_size=settings.tile_size,
        tile_size_level0=settings.tile_size,
        mpp=math.nan,
        source=str(bag.files[0].parent),
        encoding=settings.encoding,
        attributes={_FINGERPRINT: fingerprint},
    )
    return _Packed(len(images), tuple(left_out))


def _is_whole(path: Path, bag: _Bag, fingerprint: str) -> bool:
    """Whether the tile file holds every image of the bag, made from these files with these settings."""
    if not path.exists():
        return False
    try:
        tiles = read_tiles(path)
    except InputError:
        return False
    return tiles.attributes.get(_FINGERPRINT) == fingerprint and len(tiles) == len(bag.files)


def _fingerprint(bag: _Bag, settings: _TileSettings) -> str:
    """Changes when the settings, the list of images, a label, or an image file changes."""
    stamps = []
    for file in bag.files:
        try:
            status = file.stat()
            stamps.append((status.st_size, status.st_mtime_ns))
        except OSError:
            stamps.append((-1, -1))
    content = [vars(settings), bag.bag_id, bag.names, bag.labels, stamps]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
