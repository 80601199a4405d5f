"""A cohort on disk as one object: its bags, and everything known about their instances, in one order.

A restricted cohort is a smaller object, not a filtered view: `without_test()` holds no test bag, and
`without_labels()` holds no label and refuses to read any. A cohort that was packed without labels refuses, too.
"""

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from its2clr.cohort.identity import Identity, identify
from its2clr.cohort.layout import CohortInfo, Kind, read_bags, read_info, tile_path
from its2clr.cohort.parallel import Progress, map_in_threads
from its2clr.cohort.splits import SPLITS
from its2clr.cohort.tables import Problem, raise_problems
from its2clr.cohort.tiles import (
    TileFile,
    decode,
    read_coords,
    read_encoded,
    read_features,
    read_labels,
    read_names,
    read_tiles,
)
from its2clr.errors import InputError
from its2clr.units import TilePixels

_UNLABELLED_COLUMNS = ["bag_id", "split", "group", "n_instances"]
_LARGEST_PART = 512

_Sized = TypeVar("_Sized", bound=Sized)


class _Part(NamedTuple):
    """Images of one tile file, and where they go when decoded."""

    path: Path
    held: int  # images of the whole file
    first: int
    out: npt.NDArray[Any]


@dataclass(frozen=True, eq=False, repr=False)
class Cohort:
    """Bags with their tile files; make one with `Cohort.open`.

    Instance arrays follow the order of `bags`: those of the first bag, then of the second, and so on.

    Attributes:
        path: The cohort folder.
        bags: `bag_id`, `label` (if visible), `split`, `group`, `n_instances` and additional columns, one row
            per bag. Identifiers, groups and additional columns are text.
        info: What `cohort.json` says.
        labels_visible: Whether labels may be read from this object.
    """

    path: Path
    bags: pd.DataFrame
    info: CohortInfo
    labels_visible: bool = True

    @classmethod
    def open(cls, path: str | Path) -> "Cohort":
        """Open a cohort folder.

        Raises:
            InputError: If it is no cohort, incomplete, or its table of bags is wrong.
        """
        folder = Path(path)
        info = read_info(folder)
        problems: list[Problem] = []
        bags = read_bags(folder, problems, labelled=info.labelled)
        for bag_id in [] if bags is None else bags["bag_id"].tolist():
            if not tile_path(folder, bag_id).is_file():
                message = f"the tile file of bag {bag_id!r} is missing; make the cohort again"
                problems.append(Problem(str(tile_path(folder, bag_id)), message))
        raise_problems(problems)
        assert bags is not None
        return cls(folder, bags, info, labels_visible=info.labelled)

    def __len__(self) -> int:
        """The number of bags."""
        return len(self.bags)

    def __getitem__(self, number: int) -> TileFile:
        """One bag; so a cohort is a sequence of bags, as scikit-learn takes it."""
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.path} has {len(self)} bags, no number {number}")
        return self.tile_file(self.bags["bag_id"].tolist()[number])

    def __repr__(self) -> str:
        return f"Cohort({self.name!r}, {len(self)} bags, {self.n_instances} instances)"

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.resolve().name

    @property
    def tile_size(self) -> TilePixels:
        """Pixels of the square tiles."""
        return self.info.tile_size

    @property
    def kind(self) -> Kind:
        """Whether it holds tiles, or only their features."""
        return self.info.kind

    @property
    def instance_shape(self) -> tuple[int, ...]:
        """Shape of an instance: (3, S, S) of a tile, (D,) of features."""
        if self.info.feature_dim is not None:
            return (self.info.feature_dim,)
        return (3, self.tile_size, self.tile_size)

    @property
    def instance_dtype(self) -> npt.DTypeLike:
        """Type of an instance's values: uint8 of a tile, float32 of features."""
        return np.uint8 if self.kind == "tiles" else np.float32

    @property
    def n_instances(self) -> int:
        """The number of instances of all bags."""
        return int(self.bags["n_instances"].sum())

    @property
    def is_labelled(self) -> bool:
        """Whether the bags were packed with labels; `labels_visible` says whether they may be read here."""
        return self.info.labelled

    @property
    def has_instance_labels(self) -> bool:
        """Whether `instance_labels` can be asked for."""
        return self.labels_visible and self.info.has_instance_labels

    def split(self, name: str) -> "Cohort":
        """The cohort of the bags of one split alone.

        Raises:
            InputError: If there is no such split, or this cohort has no bag of it.
        """
        if name not in SPLITS:
            raise InputError(f"unknown split {name!r}; splits are {', '.join(SPLITS)}")
        return self._restrict([name])

    def without_test(self) -> "Cohort":
        """The cohort of the train and val bags alone: what code that trains may see."""
        return self._restrict(["train", "val"])

    def without_labels(self) -> "Cohort":
        """The same bags without any label.

        Additional columns are dropped too, since they may give the label away (a diagnosis, a stage).
        """
        return Cohort(self.path, self.bags[_UNLABELLED_COLUMNS].copy(), self.info, labels_visible=False)

    def _restrict(self, splits: list[str]) -> "Cohort":
        chosen = self.bags[self.bags["split"].isin(splits)].reset_index(drop=True)
        if chosen.empty:
            there = ", ".join(sorted(set(self.bags["split"].tolist())))
            raise InputError(f"{self.path}: no bags of split {' or '.join(splits)} here (only {there})")
        return Cohort(self.path, chosen, self.info, self.labels_visible)

    def identity(self, progress: Progress | None = None) -> Identity:
        """What these bags are, as hashes of all that a result can depend on; see `its2clr.cohort.identity`.

        Labels count only where they are visible; additional columns of `bags.csv` do not count.

        Args:
            progress: Called with the tile files that are read and all that have to be: those that are new or changed.
        """
        rows = list(self.bags[["bag_id", "split", "group"]].itertuples(index=False, name=None))
        labels = self.bags["label"].tolist() if self.labels_visible else None
        info = self.info.model_dump(mode="json", exclude={"its2clr_version"})
        return identify(self.path, info, rows, labels, progress)

    def groups(self, instances: int) -> "Iterator[Cohort]":
        """The cohort in parts of neighbouring bags that have so many instances together, or are one larger bag."""
        start = held = 0
        for row, count in enumerate(self.bags["n_instances"].tolist()):
            if held and held + count > instances:
                yield self._rows(start, row)
                start, held = row, 0
            held += count
        yield self._rows(start, len(self))

    def _rows(self, start: int, end: int) -> "Cohort":
        return Cohort(self.path, self.bags.iloc[start:end].reset_index(drop=True), self.info, self.labels_visible)

    def tile_file(self, bag_id: str) -> TileFile:
        """The tile file of a bag of this cohort.

        Raises:
            InputError: If the bag is not in this cohort, or its file does not agree with `bags.csv`.
        """
        if bag_id not in self._counts:
            raise InputError(f"{self.path}: bag {bag_id!r} is not in this cohort")
        path = tile_path(self.path, bag_id)
        return _expect(path, read_tiles(path, labels_visible=self.labels_visible), self._counts[bag_id])

    @cached_property
    def _counts(self) -> dict[str, int]:
        return dict(zip(self.bags["bag_id"].tolist(), self.bags["n_instances"].tolist(), strict=True))

    def _counted_paths(self) -> Iterator[tuple[Path, int]]:
        bag_ids, counts = self.bags["bag_id"].tolist(), self.bags["n_instances"].tolist()
        return ((tile_path(self.path, bag_id), count) for bag_id, count in zip(bag_ids, counts, strict=True))

    def offsets(self) -> npt.NDArray[np.int64]:
        """(B+1,) where the instances of each bag begin in the instance arrays."""
        return np.concatenate([[0], np.cumsum(self.bags["n_instances"].to_numpy(dtype=np.int64))])

    def bag_index(self) -> npt.NDArray[np.int64]:
        """(N,) the row in `bags` of each instance."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.offsets()))

    def coords(self) -> npt.NDArray[np.int64]:
        """(N, 2) x, y of each instance at level 0."""
        return np.concatenate([_expect(path, read_coords(path), n) for path, n in self._counted_paths()])

    def names(self) -> list[str]:
        """The source file name of each instance."""
        return [name for path, n in self._counted_paths() for name in _expect(path, read_names(path), n)]

    def instance_labels(self) -> npt.NDArray[np.int8]:
        """(N,) ground truth of each instance: 1, 0, or -1 for unknown.

        Raises:
            InputError: If this cohort was made without labels, or has no instance ground truth.
        """
        if not self.labels_visible:
            raise InputError(f"{self.path}: instance labels are out of reach here (cohort without labels)")
        if not self.info.has_instance_labels:
            raise InputError(f"{self.path}: this cohort has no instance labels (not every cohort has them)")
        parts = []
        for path, count in self._counted_paths():
            labels = read_labels(path)
            parts.append(np.full(count, -1, np.int8) if labels is None else _expect(path, labels, count))
        return np.concatenate(parts)


def _expect(path: Path, values: _Sized, count: int) -> _Sized:
    if len(values) != count:
        raise InputError(f"{path}: holds {len(values)} images, bags.csv says {count}; make the cohort again")
    return values


def load_tiles(
    cohort: Cohort,
    workers: int | None = None,
    progress: Progress | None = None,
    out: npt.NDArray[Any] | None = None,
) -> npt.NDArray[Any]:
    """Decode all tiles of a cohort, or read their features, in the order of its bags.

    Args:
        cohort: The cohort, restricted to the bags wanted.
        workers: Threads; the processors at hand if None.
        progress: Called with the number of instances done and of all instances.
        out: Where to put the tiles, such as a memory map; a new array if None.

    Returns:
        (N, 3, S, S) uint8 RGB, or features (N, D) float32; `out` if it was given.

    Raises:
        InputError: If an image does not decode or has another size, or `out` does not fit.
    """
    total = cohort.n_instances
    shape, dtype = (total, *cohort.instance_shape), np.dtype(cohort.instance_dtype)
    if out is None:
        out = np.empty(shape, dtype=dtype)
    elif out.shape != shape or out.dtype != dtype:
        raise InputError(f"out must be {dtype} of shape {shape}, got {out.dtype} of shape {out.shape}")
    done = 0
    read = _decode_part if cohort.kind == "tiles" else _read_part
    for count in map_in_threads(read, _parts(cohort, out), workers):
        done += count
        if progress is not None:
            progress(done, total)
    return out


def _parts(cohort: Cohort, out: npt.NDArray[Any]) -> Iterator[_Part]:
    """Where the tiles of each bag go; a bag of very many tiles is shared between threads."""
    starts = cohort.offsets().tolist()
    largest = _LARGEST_PART if cohort.kind == "tiles" else max(cohort.n_instances, 1)
    for bag_id, start, end in zip(cohort.bags["bag_id"].tolist(), starts[:-1], starts[1:], strict=True):
        path = tile_path(cohort.path, bag_id)
        for first in range(start, end, largest):
            last = min(first + largest, end)
            yield _Part(path, end - start, first - start, out[first:last])


def _decode_part(part: _Part) -> int:
    offsets, images = read_encoded(part.path, part.first, part.first + len(part.out), part.held)
    expected = part.out.shape[2:]
    for number, tile in enumerate(part.out):
        where = f"{part.path}, image {part.first + number}"
        try:
            image = decode(images[offsets[number] : offsets[number + 1]].tobytes())
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        if image.shape[:2] != expected:
            height, width = image.shape[:2]
            message = f"is {width} x {height} pixels, the cohort's tiles are {expected[0]} x {expected[0]}"
            raise InputError(f"{where}: {message}")
        tile[...] = image.transpose(2, 0, 1)
    return len(part.out)


def _read_part(part: _Part) -> int:
    features = read_features(part.path)
    if features.shape != part.out.shape:
        message = f"holds features of shape {features.shape}, the cohort says {part.out.shape}; make the cohort again"
        raise InputError(f"{part.path}: {message}")
    part.out[...] = features
    return len(part.out)
