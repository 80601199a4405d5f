"""Bags given in Python as a cohort folder: folders of images, arrays of tiles or features, bags of a cohort."""

import hashlib
import io
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from PIL import Image

from its2clr.cohort.cohort import Cohort
from its2clr.cohort.features.feature_cohort import feature_cohort_info
from its2clr.cohort.images import pack_images, virtual_grid
from its2clr.cohort.layout import BAGS_FILE, CohortInfo, read_info, tile_path, write_bags, write_info
from its2clr.cohort.manifest import Manifest, list_images
from its2clr.cohort.packing import file_stamp, fingerprint, frequent_reasons
from its2clr.cohort.splits import assign_splits
from its2clr.cohort.tables import UNKNOWN_LABEL
from its2clr.cohort.tiles import TileFile, write_feature_tiles, write_tile_file
from its2clr.errors import InputError
from its2clr.units import Level0Pixels, MicronsPerPixel, TilePixels

Bag = str | Path | npt.NDArray[Any] | TileFile
"""A folder of images; tiles (N, S, S, 3) uint8 or features (N, D); or `cohort[number]`."""
_FRACTIONS = {"train": 0.8, "val": 0.2}


def identify_bags(bags: Sequence[Bag], *more: object) -> str:
    """A short hash that changes with the bags, and with whatever else is named."""
    return fingerprint([_stamp(bag) for bag in bags], *more)[:12]


def _stamp(bag: Bag) -> list[Any]:
    if isinstance(bag, TileFile):
        return [str(bag.path.resolve()), file_stamp(bag.path)]
    if isinstance(bag, str | Path):
        return [str(Path(bag).resolve()), [(file.name, file_stamp(file)) for file in _images_in(Path(bag))]]
    array = np.ascontiguousarray(bag)
    return [array.shape, str(array.dtype), hashlib.sha256(array.tobytes()).hexdigest()]


def make_cohort(out: Path, bags: Sequence[Bag], labels: npt.ArrayLike, groups: Sequence[Any] | None = None) -> None:
    """Make a cohort of labelled bags to train with; one that is there stays.

    Args:
        out: The cohort folder.
        bags: The bags, all of one kind.
        labels: (B,) 0 or 1.
        groups: (B,) what must not be divided, such as patients; None: as in the cohort that the bags are of, else
            every bag is one of its own.

    Raises:
        InputError: Labels, groups or bags cannot be used.
    """
    given = np.asarray(labels)
    if given.shape != (len(bags),) or not np.isin(given, (0, 1)).all():
        raise InputError(f"expected a label, 0 or 1, for each of {len(bags)} bags, got {shown_labels(given)}")
    if (out / BAGS_FILE).is_file():
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as temporary:
        packed = _pack(bags, Path(temporary) / "bags", {})
        table = packed.bags.assign(label=given.astype(int))
        if groups is not None:
            if len(groups) != len(bags):
                raise InputError(f"got {len(groups)} groups for {len(bags)} bags")
            table["group"] = [str(group) for group in groups]
        table["split"] = assign_splits(
            given.astype(int), table["group"].tolist(), list(_FRACTIONS.values()), splits=list(_FRACTIONS)
        )
        write_info(packed.path, packed.info.model_copy(update={"labelled": True}))
        write_bags(packed.path, table)
        packed.path.rename(out)


def shown_labels(labels: npt.NDArray[Any]) -> str:
    """Labels that cannot be used, in a few words."""
    return f"{labels.size} of shape {labels.shape} such as {', '.join(map(repr, np.unique(labels)[:3].tolist()))}"


@contextmanager
def passing_cohort(bags: Sequence[Bag], image_settings: Mapping[str, Any] | None) -> Iterator[Cohort]:
    """The bags as a cohort without labels, in a folder that is removed afterwards.

    Args:
        bags: The bags, all of one kind, in this order.
        image_settings: How a model's images are packed; None if its bags are not folders of images.
    """
    with tempfile.TemporaryDirectory() as temporary:
        yield _pack(bags, Path(temporary) / "bags", image_settings)


def _pack(bags: Sequence[Bag], out: Path, image_settings: Mapping[str, Any] | None) -> Cohort:
    """A cohort without labels, its bags in the order given."""
    if not len(bags):
        raise InputError("there are no bags in the list")
    kinds = {TileFile if isinstance(bag, TileFile) else Path if isinstance(bag, str | Path) else None for bag in bags}
    if len(kinds) > 1:
        raise InputError("the bags of a list must be of one kind: folders of images, arrays, or bags of a cohort")
    kind = kinds.pop()
    if kind is TileFile:
        return _link([bag for bag in bags if isinstance(bag, TileFile)], out)
    if kind is Path:
        if image_settings is None:
            raise InputError("the model was not trained on folders of images; give bags as it was trained on")
        return _pack_folders([Path(bag) for bag in bags if isinstance(bag, str | Path)], out, image_settings)
    return _write_arrays([np.asarray(bag) for bag in bags], out)


def _table(names: Sequence[str], **more: Any) -> pd.DataFrame:
    """Bags in test, each a group of its own; a name that occurs twice is numbered."""
    counts = Counter(names)
    bag_ids = [name if counts[name] == 1 else f"{name} ({number})" for number, name in enumerate(names)]
    return pd.DataFrame({"bag_id": bag_ids, "split": "test", "group": bag_ids, **more})


def _pack_folders(folders: Sequence[Path], out: Path, settings: Mapping[str, Any]) -> Cohort:
    table = _table([folder.resolve().name for folder in folders])
    members = [
        (bag_id, str(file), file.name, UNKNOWN_LABEL)
        for bag_id, folder in zip(table["bag_id"].tolist(), folders, strict=True)
        for file in _images_in(folder)
    ]
    instances = pd.DataFrame(members, columns=["bag_id", "file", "name", "label"])
    summary = pack_images(
        Manifest(Path(), table, has_splits=True, labelled=False, instances=instances), out, **settings
    )
    if summary.n_bags < len(folders):
        raise InputError("\n".join(["some bags have no usable image", *frequent_reasons(summary.left_out)]))
    return Cohort.open(out)


def _images_in(folder: Path) -> list[Path]:
    images = list_images(folder) if folder.is_dir() else []
    if not images:
        raise InputError(f"{folder}: is no folder with images directly in it")
    return images


def _write_arrays(arrays: Sequence[npt.NDArray[Any]], out: Path) -> Cohort:
    shape, is_tiles = arrays[0].shape[1:], arrays[0].ndim == 4
    for number, array in enumerate(arrays):
        fits = array.ndim == 2 if not is_tiles else array.dtype == np.uint8 and shape == (shape[0], shape[0], 3)
        if array.shape[1:] != shape or not fits or 0 in array.shape:
            raise InputError(
                f"bag {number}: expected tiles (N, S, S, 3) uint8 or features (N, D), of one size in all bags, got "
                f"{array.dtype} of shape {array.shape}"
            )
    size = TilePixels(shape[0] if is_tiles else 1)
    table = _table([f"bag-{number}" for number in range(len(arrays))], n_instances=[len(array) for array in arrays])
    info = CohortInfo(tile_size=size, encoding="png", labelled=False)
    write_info(out, info if is_tiles else feature_cohort_info(size, shape[0], [], labelled=False))
    for bag_id, array in zip(table["bag_id"].tolist(), arrays, strict=True):
        places, names = virtual_grid(len(array), size), [str(number) for number in range(len(array))]
        facts: dict[str, Any] = {"bag_id": bag_id, "tile_size": size, "tile_size_level0": Level0Pixels(size)}
        facts |= {"mpp": MicronsPerPixel(math.nan), "source": "an array"}
        if is_tiles:
            images = [_png(tile) for tile in array]
            write_tile_file(tile_path(out, bag_id), images, places, names, encoding="png", **facts)
        else:
            write_feature_tiles(tile_path(out, bag_id), array, places, names, **facts)
    write_bags(out, table)
    return Cohort.open(out)


def _png(tile: npt.NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(tile).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _link(bags: Sequence[TileFile], out: Path) -> Cohort:
    """A cohort of some bags of another, whose tile files are not copied."""
    folders = {bag.path.resolve().parents[1] for bag in bags}
    if len(folders) > 1:
        raise InputError(f"the bags of a list must be of one cohort, got bags of {len(folders)}")
    known = Cohort.open(folders.pop())
    group_of = dict(zip(known.bags["bag_id"].tolist(), known.bags["group"].tolist(), strict=True))
    table = _table([bag.bag_id for bag in bags], n_instances=[len(bag) for bag in bags])
    table["group"] = [group_of[bag.bag_id] for bag in bags]
    write_info(out, read_info(known.path).model_copy(update={"labelled": False}))
    tile_path(out, "any").parent.mkdir()
    for bag_id, bag in zip(table["bag_id"].tolist(), bags, strict=True):
        tile_path(out, bag_id).symlink_to(bag.path.resolve())
    write_bags(out, table)
    return Cohort.open(out)
