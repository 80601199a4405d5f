"""The tile file: all images of one bag, still encoded, with their places and names, in one HDF5 file.

Datasets: `images` (all encoded images end to end, uint8), `offsets` (N+1, int64: image i is
`images[offsets[i]:offsets[i+1]]`), `coords` (N, 2, int64: x, y of the top-left corner at level 0), `names`
(N, text) and, if known, `labels` (N, int8: 1, 0, or -1 for unknown). The attributes are on the file and on
`coords`; `content_tiles` and `content_labels` are hashes of what was written. In a cohort of features, `features`
(N, D, float32, or float16 where they came so) is there instead of `images` and `offsets`.
"""

import hashlib
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt
from PIL import Image

from its2clr.cohort.new_hdf5 import new_hdf5
from its2clr.errors import InputError
from its2clr.files import damage_said
from its2clr.hdf5 import open_hdf5
from its2clr.units import Level0Pixels, MicronsPerPixel, TilePixels, level0_mpp, magnification_of, shared_pixels
from its2clr.version import __version__

_FORMATS = ("JPEG", "PNG")
_ENCODINGS = ("jpeg", "png")
FEATURES = "features"
"""Name of the features in a tile file, and the encoding of one that holds them instead of images."""
_ADVICE = "remove it and make the cohort again"
_TILE_DATA = {"images": "<u1", "offsets": "<i8", FEATURES: "<f4", "coords": "<i8", "names": None}
_TILE_FACTS = (
    "encoding", "tile_size", "tile_size_level0", "mpp", "mpp_level0", "step_level0", "overlap", "magnification",
)  # fmt: skip
_LABEL_DATA = {"labels": "<i1"}
_BYTES_AT_ONCE = 16 * 2**20


class Content(NamedTuple):
    """Hashes of what a tile file holds.

    Attributes:
        tiles: Changes with pixels or features, places, names and scale of the tiles.
        labels: Changes with the instance ground truth.
    """

    tiles: str
    labels: str


@dataclass(frozen=True, eq=False)
class TileFile:
    """The content of one tile file; images, coordinates, names and labels are read when first asked for.

    Attributes:
        path: Where the file is.
        offsets: (N+1,) where each encoded image begins.
        bag_id: The bag.
        mpp: Microns per pixel of the stored tiles, NaN if unknown.
        tile_size: Pixels of the stored square tiles.
        tile_size_level0: Pixels that a tile covers at level 0.
        source: What the tiles were made from.
        encoding: "png", "jpeg", or "features" where there are features instead of images.
        its2clr_version: The package version that wrote the file.
        attributes: All attributes of the file.
        labels_visible: Whether instance labels may be read.
    """

    path: Path
    offsets: npt.NDArray[np.int64]
    bag_id: str
    mpp: MicronsPerPixel
    tile_size: TilePixels
    tile_size_level0: Level0Pixels
    source: str
    encoding: str
    its2clr_version: str
    attributes: Mapping[str, Any]
    labels_visible: bool = True

    def __len__(self) -> int:
        """The number of instances."""
        return len(self.offsets) - 1

    @property
    def has_images(self) -> bool:
        """Whether it holds images; otherwise it holds their features."""
        return self.encoding != FEATURES

    @property
    def magnification(self) -> float | None:
        """That of the stored tiles: as the feature file said it, else by convention 10 / mpp; None if unknown."""
        if "magnification" in self.attributes:
            return float(self.attributes["magnification"])
        return magnification_of(self.mpp) if math.isfinite(self.mpp) else None

    @property
    def mpp_level0(self) -> MicronsPerPixel:
        """Microns per pixel of level 0; NaN if unknown."""
        by_tile = level0_mpp(self.mpp, self.tile_size, self.tile_size_level0)
        found = float(self.attributes.get("mpp_level0", by_tile))
        return MicronsPerPixel(found if found > 0 else math.nan)

    @property
    def overlap(self) -> TilePixels | None:
        """Pixels of the stored tile that neighbours share; None if unknown, which it may be for features only."""
        if "overlap" in self.attributes:
            return TilePixels(int(self.attributes["overlap"]))
        if "step_level0" in self.attributes:
            return shared_pixels(self.tile_size, int(self.attributes["step_level0"]), self.tile_size_level0)
        return TilePixels(0) if self.has_images else None

    def encoded(self, index: int) -> bytes:
        """The encoded bytes of one image."""
        if not self.has_images:
            raise InputError(f"{self.path}: holds features, not images: there is no picture of its tiles")
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path} has {len(self)} images, no number {index}")
        return self._images[self.offsets[index] : self.offsets[index + 1]].tobytes()

    @cached_property
    def coords(self) -> npt.NDArray[np.int64]:
        """(N, 2) x, y of each tile's top-left corner at level 0."""
        return read_coords(self.path)

    @cached_property
    def names(self) -> list[str]:
        """The source file name of each instance."""
        return read_names(self.path)

    @property
    def has_labels(self) -> bool:
        """Whether the file holds instance labels that may be read."""
        return self.labels_visible and self.labels is not None

    @cached_property
    def labels(self) -> npt.NDArray[np.int8] | None:
        """(N,) instance ground truth: 1, 0, or -1 for unknown; None if the file has none.

        Raises:
            InputError: If the file was opened without labels.
        """
        if not self.labels_visible:
            raise InputError(f"{self.path}: instance labels are out of reach here (opened without labels)")
        return read_labels(self.path)

    @cached_property
    def _images(self) -> npt.NDArray[np.uint8]:
        return read_encoded(self.path, 0, len(self), len(self))[1]


def write_tile_file(
    path: Path,
    images: Sequence[bytes],
    coords: npt.ArrayLike,
    names: Sequence[str],
    labels: npt.ArrayLike | None = None,
    *,
    bag_id: str,
    tile_size: TilePixels,
    tile_size_level0: Level0Pixels,
    mpp: MicronsPerPixel,
    source: str,
    encoding: str,
    attributes: Mapping[str, str | int | float] | None = None,
) -> None:
    """Write a tile file; it appears whole or not at all.

    Args:
        path: Where to write; see `layout.tile_path`.
        images: The encoded images, one per instance; taken one at a time, so that they may lie in a file.
        coords: (N, 2) x, y of each tile's top-left corner in pixels of level 0.
        names: The source file name of each instance.
        labels: Instance ground truth, 1, 0 or -1 for unknown; None if there is none.
        bag_id: The bag.
        tile_size: Pixels of the stored square tiles.
        tile_size_level0: Pixels that a tile covers at level 0.
        mpp: Microns per pixel of the stored tiles, NaN if unknown.
        source: What the tiles were made from.
        encoding: "png" or "jpeg".
        attributes: More attributes to keep with the file.

    Raises:
        InputError: If the parts do not fit together.
    """
    lengths = [len(image) for image in images]
    if not lengths or min(lengths) == 0:
        raise InputError(f"bag {bag_id!r}: a tile file needs at least one image, and none may be empty")
    if encoding not in _ENCODINGS:
        raise InputError(f"bag {bag_id!r}: encoding must be one of {', '.join(_ENCODINGS)}, got {encoding!r}")
    offsets = np.zeros(len(images) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    described = _description(bag_id, tile_size, tile_size_level0, mpp, source, encoding, attributes)
    with _tile_file(path, len(images), coords, names, labels, described, int(offsets[-1])) as file:
        stored = file.create_dataset("images", shape=(offsets[-1],), dtype=np.uint8)
        for image, start, end in zip(images, offsets[:-1], offsets[1:], strict=True):
            stored[start:end] = np.frombuffer(image, dtype=np.uint8)
        file.create_dataset("offsets", data=offsets)


def write_feature_tiles(
    path: Path,
    features: npt.ArrayLike,
    coords: npt.ArrayLike,
    names: Sequence[str],
    labels: npt.ArrayLike | None = None,
    *,
    bag_id: str,
    tile_size: TilePixels,
    tile_size_level0: Level0Pixels,
    mpp: MicronsPerPixel,
    source: str,
    attributes: Mapping[str, str | int | float] | None = None,
) -> None:
    """Write a tile file that holds features (N, D) instead of images; otherwise as `write_tile_file`.

    Raises:
        InputError: If the parts do not fit together, or a feature is not finite.
    """
    values = half_or_single(features)
    if values.ndim != 2 or 0 in values.shape:
        raise InputError(f"bag {bag_id!r}: expected features (N, D) of at least one instance, got {values.shape}")
    if not np.isfinite(values).all():
        raise InputError(f"bag {bag_id!r}: has features that are not finite")
    described = _description(bag_id, tile_size, tile_size_level0, mpp, source, FEATURES, attributes)
    with _tile_file(path, len(values), coords, names, labels, described, values.nbytes) as file:
        file.create_dataset(FEATURES, data=values)


def half_or_single(features: npt.ArrayLike) -> npt.NDArray[np.float16 | np.float32]:
    """Features in the precision they are kept in: half as half, which takes half the room, all others as float32."""
    values = np.asarray(features)
    return values if values.dtype == np.float16 else values.astype(np.float32, copy=False)


def _description(
    bag_id: str,
    tile_size: TilePixels,
    tile_size_level0: Level0Pixels,
    mpp: MicronsPerPixel,
    source: str,
    encoding: str,
    attributes: Mapping[str, str | int | float] | None,
) -> dict[str, str | int | float]:
    return {
        **{name: _as_text(said) if isinstance(said, str) else said for name, said in (attributes or {}).items()},
        "bag_id": bag_id,
        "mpp": float(mpp),
        "tile_size": int(tile_size),
        "tile_size_level0": int(tile_size_level0),
        "source": _as_text(source),
        "encoding": encoding,
        "its2clr_version": __version__,
    }


@contextmanager
def _tile_file(
    path: Path,
    count: int,
    coords: npt.ArrayLike,
    names: Sequence[str],
    labels: npt.ArrayLike | None,
    described: Mapping[str, str | int | float],
    needs: int,
) -> Iterator[h5py.File]:
    """A tile file to write the instances into; the rest is written here, and it appears whole."""
    places = np.asarray(coords, dtype=np.int64)
    known = None if labels is None else np.asarray(labels, dtype=np.int8)
    bag_id = described["bag_id"]
    if places.shape != (count, 2) or len(names) != count or (known is not None and known.shape != (count,)):
        parts = f"coords of shape {places.shape}, {len(names)} names"
        parts += "" if known is None else f", labels of shape {known.shape}"
        raise InputError(f"bag {bag_id!r}: {count} images do not fit {parts}")
    if known is not None and not np.isin(known, (-1, 0, 1)).all():
        raise InputError(f"bag {bag_id!r}: instance labels must be 1, 0 or -1 (unknown)")
    with new_hdf5(path, needs) as file:
        yield file
        file.create_dataset("coords", data=places)
        text = h5py.string_dtype("utf-8")
        file.create_dataset("names", data=[_as_text(name) for name in names], dtype=text)
        if known is not None:
            file.create_dataset("labels", data=known)
        for holder in (file, file["coords"]):
            holder.attrs.update(described)
        content = {f"content_{name}": value for name, value in _content(file)._asdict().items()}
        for holder in (file, file["coords"]):
            holder.attrs.update(content)


def read_content(path: Path) -> Content:
    """Hash all that a tile file holds, as it is now.

    Raises:
        InputError: If the file is damaged.
    """
    with damage_said(f"{path}: cannot be read, the file is damaged", _ADVICE), open_hdf5(path) as file:
        return _content(file)


def written_content(path: Path) -> Content | None:
    """What a tile file held when it was written; None for one of an older version, or one that cannot be read."""
    try:
        with open_hdf5(path) as file:
            return Content(*(str(file.attrs[f"content_{name}"]) for name in Content._fields))
    except Exception:  # noqa: BLE001 - a damaged HDF5 file may raise anything
        return None


def _content(file: h5py.File) -> Content:
    facts = [(name, _plain(file.attrs[name])) for name in _TILE_FACTS if name in file.attrs]
    return Content(_hash(file, _TILE_DATA, repr(facts)), _hash(file, _LABEL_DATA, ""))


def _hash(file: h5py.File, datasets: Mapping[str, str | None], facts: str) -> str:
    digest = hashlib.sha256(facts.encode())
    for name, dtype in datasets.items():
        if name not in file:
            continue
        stored = file[name]
        digest.update(f"\n{name} {stored.shape}\n".encode())
        if dtype is None:
            for text in stored[:]:
                digest.update(len(text).to_bytes(8, "little") + text)
            continue
        rows = max(1, _BYTES_AT_ONCE // (stored.dtype.itemsize * math.prod(stored.shape[1:])))
        for first in range(0, stored.shape[0], rows):
            digest.update(stored[first : first + rows].astype(dtype, copy=False).tobytes())
    return digest.hexdigest()[:32]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def read_tiles(path: Path, *, labels_visible: bool = True) -> TileFile:
    """Open a tile file and check its structure; no image and no label is read yet.

    Args:
        path: The tile file.
        labels_visible: Whether `TileFile.labels` may be asked for.

    Raises:
        InputError: If the file is missing, damaged, or no tile file.
    """
    if not path.exists():
        raise InputError(f"{path}: the tile file is missing; make the cohort again")
    try:
        with open_hdf5(path) as file:
            held = (FEATURES,) if FEATURES in file else ("images", "offsets")
            missing = [name for name in (*held, "coords", "names") if not isinstance(file.get(name), h5py.Dataset)]
            if missing:
                raise InputError(f"{path}: is not a tile file, it has no {', '.join(missing)}; {_ADVICE}")  # noqa: TRY301
            shapes = {name: tuple(one.shape) for name, one in file.items() if isinstance(one, h5py.Dataset)}
            offsets = np.arange(len(file[FEATURES]) + 1) if FEATURES in file else file["offsets"][:].astype(np.int64)
            attributes = dict(file.attrs)
            tiles = TileFile(
                path=path,
                offsets=offsets,
                bag_id=str(attributes["bag_id"]),
                mpp=MicronsPerPixel(float(attributes["mpp"])),
                tile_size=TilePixels(int(attributes["tile_size"])),
                tile_size_level0=Level0Pixels(int(attributes["tile_size_level0"])),
                source=str(attributes["source"]),
                encoding=str(attributes["encoding"]),
                its2clr_version=str(attributes["its2clr_version"]),
                attributes=attributes,
                labels_visible=labels_visible,
            )
    except InputError:
        raise
    except KeyError as error:
        raise InputError(f"{path}: is not a tile file, attribute {error} is missing; {_ADVICE}") from error
    except Exception as error:
        raise InputError(f"{path}: cannot be read, it is damaged or no HDF5 file ({error}); {_ADVICE}") from error
    _check_structure(tiles, shapes)
    return tiles


def _check_structure(tiles: TileFile, shapes: Mapping[str, tuple[int, ...]]) -> None:
    offsets, count = tiles.offsets, len(tiles.offsets) - 1
    if offsets.ndim != 1 or count < 1 or offsets[0] != 0 or (np.diff(offsets) <= 0).any():
        raise InputError(f"{tiles.path}: offsets must rise from 0; {_ADVICE}")
    if tiles.has_images and shapes.get("images") != (offsets[-1],):
        message = f"offsets end at {offsets[-1]} but images has shape {shapes.get('images')}"
        raise InputError(f"{tiles.path}: {message}; {_ADVICE}")
    wanted = {"coords": (count, 2), "names": (count,), "labels": (count,)}
    for name, shape in wanted.items():
        if shapes.get(name, shape) != shape:
            message = f"{name} has shape {shapes[name]}, expected {shape} for {count} images"
            raise InputError(f"{tiles.path}: {message}; {_ADVICE}")


def read_labels(path: Path) -> npt.NDArray[np.int8] | None:
    """Read the instance ground truth of a tile file alone, without its images; None if it has none."""
    labels = _read_dataset(path, "labels", optional=True)
    return None if labels is None else labels.astype(np.int8, copy=False)


def read_coords(path: Path) -> npt.NDArray[np.int64]:
    """Read the coordinates of a tile file alone, (N, 2)."""
    coords: npt.NDArray[np.int64] = _read_dataset(path, "coords").astype(np.int64, copy=False)
    return coords


def read_names(path: Path) -> list[str]:
    """Read the source file names of a tile file alone."""
    return [name.decode("utf-8", "replace") for name in _read_dataset(path, "names")]


def read_features(path: Path) -> npt.NDArray[np.float32]:
    """Read the features of a tile file alone, (N, D)."""
    features: npt.NDArray[np.float32] = _read_dataset(path, FEATURES).astype(np.float32, copy=False)
    return features


def read_encoded(path: Path, first: int, last: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Read a range of encoded images of a tile file alone.

    Args:
        path: The tile file.
        first: The first image.
        last: One past the last image.
        count: How many images the file must hold.

    Returns:
        Offsets that begin at 0, and the encoded images end to end.

    Raises:
        InputError: If the file is damaged or holds another number of images.
    """
    with damage_said(f"{path}: images cannot be read, the file is damaged", _ADVICE), open_hdf5(path) as file:
        offsets, images = file["offsets"], file["images"]
        if offsets.shape != (count + 1,):
            message = f"holds {offsets.shape[0] - 1} images, bags.csv says {count}; make the cohort again"
            raise InputError(f"{path}: {message}")
        places: npt.NDArray[np.int64] = offsets[first : last + 1].astype(np.int64, copy=False)
        return places - places[0], images[places[0] : places[-1]]


def _read_dataset(path: Path, name: str, *, optional: bool = False) -> Any:
    with damage_said(f"{path}: {name} cannot be read, the file is damaged", _ADVICE), open_hdf5(path) as file:
        return None if optional and name not in file else file[name][:]


def decode(encoded: bytes) -> npt.NDArray[np.uint8]:
    """Decode one stored image.

    Returns:
        (H, W, 3) uint8 RGB.

    Raises:
        InputError: If the bytes are no whole PNG or JPEG image.
    """
    try:
        with Image.open(io.BytesIO(encoded), formats=_FORMATS) as image:
            return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    except Exception as error:
        raise InputError(f"the image cannot be decoded ({error})") from error


def _as_text(name: str) -> str:
    """File names may hold bytes that are no UTF-8; HDF5 text may not."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
