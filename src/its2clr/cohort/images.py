"""Pack the images of a manifest into a cohort folder: each one checked and brought to one size."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from its2clr import far
from its2clr.cohort.image_files import Crop, ImageProblem, Resize, check_tile_settings, prepare_image
from its2clr.cohort.layout import CohortInfo, Encoding, LeftOut
from its2clr.cohort.manifest import Manifest
from its2clr.cohort.packing import (
    FINGERPRINT,
    BagResult,
    PackSummary,
    SplitPlan,
    file_stamp,
    fingerprint,
    pack_cohort,
    path_to_write,
    whole_tile_file,
)
from its2clr.cohort.parallel import Progress
from its2clr.cohort.splits import DEFAULT_FRACTIONS
from its2clr.cohort.tiles import write_tile_file
from its2clr.units import Level0Pixels, MicronsPerPixel, TilePixels


@dataclass(frozen=True)
class ImageSummary(PackSummary):
    """What packing images did."""

    @property
    def n_images_left_out(self) -> int:
        """Images that could not be used."""
        return sum(bool(one.file) for one in self.left_out)

    @property
    def bags_left_out(self) -> tuple[str, ...]:
        """Bags that have no usable image."""
        return tuple(one.bag_id for one in self.left_out if not one.file)


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
class _TileSettings:
    tile_size: TilePixels
    encoding: Encoding
    quality: int
    resize: Resize
    crop: Crop | None

    def fingerprint(self, bag: _Bag) -> str:
        """Changes when the settings, the list of images, a label, or an image file changes."""
        stamps = [file_stamp(file) for file in bag.files]
        used = {name: value for name, value in vars(self).items() if value is not None}
        return fingerprint(used, bag.bag_id, bag.names, bag.labels, stamps)


SMALLEST_TILE, LARGEST_TILE = 64, 224
"""Bounds of a tile size that nobody chose: below the first a ResNet sees almost nothing, above it takes long."""
IMAGES_LOOKED_AT = 200


def pack_images(
    bags: Manifest,
    out: Path,
    *,
    tile_size: TilePixels | None = None,
    encoding: Encoding = "jpeg",
    quality: int = 95,
    resize: Resize = "bilinear",
    crop: Crop | None = None,
    workers: int | None = None,
    seed: int = 0,
    fractions: Sequence[float] = DEFAULT_FRACTIONS,
    progress: Progress | None = None,
) -> ImageSummary:
    """Pack the images of a manifest into a cohort folder.

    Every image is decoded. One that cannot be used is left out and listed in `problems.csv`, and the rest
    goes on; so is a bag without any usable image. The same call again skips the bags that are whole, so
    packing goes on where it stopped, and tries again those that had problems. A manifest without labels
    becomes a cohort without labels, whose bags are all in test.

    Args:
        bags: The manifest.
        out: The cohort folder; new, empty, or begun with the same settings.
        tile_size: Side of the square tiles; images of other sizes are resized, once. None: that of the images, see
            `usual_tile_size`.
        encoding: How images that change are stored.
        quality: JPEG quality.
        resize: How pixels are interpolated.
        crop: What images are cropped to, before they are resized: `ultrasound`, see `crop_to_scan`.
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
    tile_size = usual_tile_size(bags) if tile_size is None else tile_size
    check_tile_settings(tile_size, encoding, quality, resize, crop)
    out = Path(out)
    tiles = _TileSettings(tile_size, encoding, quality, resize, crop)
    splits = SplitPlan(bags, fractions, seed)
    settings: dict[str, Any] = {"tile_size": tile_size, "encoding": encoding, "resize": resize}
    if encoding == "jpeg":
        settings["quality"] = quality
    if crop is not None:
        settings["crop"] = crop
    packed = pack_cohort(
        out,
        CohortInfo(
            tile_size=tile_size,
            encoding=encoding,
            has_instance_labels=bags.has_instance_labels,
            labelled=bags.labelled,
            settings=settings | splits.settings(),
        ),
        bags.bags,
        _gather(bags),
        finished=partial(_finished, out=out, settings=tiles),
        pack=partial(_pack_bag, out=out, settings=tiles),
        workers=workers,
        splits=splits,
        progress=progress,
    )
    return ImageSummary(**vars(packed.summary))


def usual_tile_size(bags: Manifest) -> TilePixels:
    """The median of the images' longer sides, at least 64 and at most 224 pixels; some images are looked at."""
    files = bags.instances["file"].tolist()
    sides = []
    for file in files[:: -(-len(files) // IMAGES_LOOKED_AT)]:
        try:
            with far.local(Path(file)) as found, Image.open(found) as image:
                sides.append(max(image.size))
        except (OSError, ValueError, Image.DecompressionBombError):
            continue  # packing names what is wrong with it
    return TilePixels(int(np.clip(np.median(sides), SMALLEST_TILE, LARGEST_TILE)) if sides else LARGEST_TILE)


def _gather(manifest: Manifest) -> dict[str, _Bag]:
    members = dict(iter(manifest.instances.groupby("bag_id", sort=False)))
    with_labels = manifest.has_instance_labels
    gathered = {}
    for row, bag_id in zip(manifest.bags.index.tolist(), manifest.bags["bag_id"].tolist(), strict=True):
        rows = members[bag_id]
        gathered[bag_id] = _Bag(
            bag_id=bag_id,
            row=row,
            files=tuple(Path(file) for file in rows["file"].tolist()),
            names=tuple(rows["name"].tolist()),
            rows=tuple(rows.index.tolist()),
            labels=tuple(rows["label"].tolist()) if with_labels else None,
        )
    return gathered


def _finished(bag: _Bag, *, out: Path, settings: _TileSettings) -> BagResult | None:
    """What is there of a bag, if the tile file holds every image of it."""
    tiles = whole_tile_file(out, bag.bag_id, settings.fingerprint(bag))
    return BagResult(len(tiles)) if tiles is not None and len(tiles) == len(bag.files) else None


def _pack_bag(bag: _Bag, *, out: Path, settings: _TileSettings) -> BagResult:
    made_from = settings.fingerprint(bag)  # before images are read: one that changes meanwhile is packed again
    images: list[bytes] = []
    kept: list[int] = []
    left_out: list[LeftOut] = []
    for number, file in enumerate(bag.files):
        try:
            images.append(prepare_image(file, **vars(settings)))
            kept.append(number)
        except ImageProblem as problem:
            left_out.append(LeftOut(bag.bag_id, bag.names[number], bag.rows[number], str(problem)))
    if not images:
        left_out.append(LeftOut(bag.bag_id, "", bag.row, "no usable image: the whole bag was left out"))
        return BagResult(left_out=tuple(left_out))
    write_tile_file(
        path_to_write(out, bag.bag_id),
        images,
        virtual_grid(len(bag.files), settings.tile_size)[kept],
        [bag.names[number] for number in kept],
        None if bag.labels is None else [bag.labels[number] for number in kept],
        bag_id=bag.bag_id,
        tile_size=settings.tile_size,
        tile_size_level0=Level0Pixels(settings.tile_size),
        mpp=MicronsPerPixel(math.nan),
        source=str(bag.files[0].parent),
        encoding=settings.encoding,
        attributes={FINGERPRINT: made_from},
    )
    return BagResult(len(images), tuple(left_out))


def virtual_grid(count: int, tile_size: TilePixels) -> npt.NDArray[np.int64]:
    """Coordinates for images that have no place: a square grid, row by row.

    Returns:
        (N, 2) x, y in pixels.
    """
    columns = max(1, math.isqrt(max(count, 1) - 1) + 1)  # the square root, rounded up
    number = np.arange(count, dtype=np.int64)
    return np.stack([number % columns, number // columns], axis=1) * tile_size
