"""Decoded tiles, gathered by index: on the GPU if they fit, else in host memory, else in a file mapped into memory.

No training step decodes anything. Size and free memory, or the setting `engine.tiles`, decide which of the three it is;
the log says which.
"""

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from its2clr.cohort import Cohort, load_tiles
from its2clr.engine.devices import Engine
from its2clr.engine.mapped_rows import give_back, map_rows, new_rows
from its2clr.errors import InputError
from its2clr.files import atomic_path, reserve
from its2clr.wording import readable_size

Tier = Literal["gpu", "memory", "disk"]

GPU_SHARE = 0.5
"""Share of the free GPU memory that tiles may take; the rest is for training."""
HOST_SHARE = 0.6
"""Share of the available host memory that tiles may take."""
SPLITS_KEPT = 3
"""How many decoded splits an engine with a memory keeps: those of one cohort."""


class TileStore:
    """All tiles of a cohort as uint8, or their features.

    Args:
        images: (N, 3, S, S) uint8, or features (N, D) float32, on any device.
        content: Hash of the tiles they were decoded from (`Identity.tiles`); None if they are of no cohort.
        folder: Where what is made of them may lie on disk; None: memory only.
    """

    def __init__(self, images: Tensor, content: str | None = None, folder: Path | None = None) -> None:
        self.images, self.content, self.folder = images, content, folder

    @classmethod
    def from_cohort(cls, cohort: Cohort, engine: Engine) -> "TileStore":
        """Decode a cohort's tiles in parallel, or take them from the engine's memory if they are there."""
        key = engine.on_writer(lambda: cohort.identity().tiles)
        if engine.memory is not None and key in engine.memory:
            kept: TileStore = engine.memory[key]
            return kept
        store = cls(_decoded(cohort, engine, key), key, disk_folder(cohort, engine))
        if engine.memory is not None:
            while len(engine.memory) >= SPLITS_KEPT:
                engine.memory.pop(next(iter(engine.memory)))
            engine.memory[key] = store
        return store

    def __len__(self) -> int:
        return len(self.images)

    @property
    def side(self) -> int:
        """Side of a tile in pixels; 1 for features."""
        return self.images.shape[-1] if self.images.dim() == 4 else 1

    def gather(self, rows: Tensor, device: torch.device) -> Tensor:
        """Tiles (B, 3, S, S) uint8 at `rows`, on the device."""
        batch = self.images.index_select(0, rows.to(self.images.device, non_blocking=True))
        give_back()
        return batch.to(device, non_blocking=True)

    def feed(self, batch_size: int, device: torch.device) -> "Feed":
        """Brings one batch after another to the device."""
        return Feed(self.images, batch_size, device)


class Feed:
    """Brings the tiles of one step after another to a fixed place on the device.

    If the store is already on the device, that place is the store itself and nothing is copied. From host memory or a
    mapped file, a thread gathers the tiles of the next steps and copies them while the device works on this step.

    Args:
        images: (N, 3, S, S) uint8 or (N, D) float32, the store.
        batch_size: Tiles per step.
        device: Device that needs the tiles.

    Attributes:
        tiles: (M, 3, S, S) uint8 on the device: the store, or the tiles of the step.
    """

    def __init__(self, images: Tensor, batch_size: int, device: torch.device) -> None:
        self._images, self._device = images, device
        self._moves = images.device != device
        if not self._moves:
            self.tiles = images
            return
        shape = (batch_size, *images.shape[1:])
        pinned = device.type == "cuda"
        self.tiles = torch.empty(shape, dtype=images.dtype, device=device)
        self._next = torch.empty_like(self.tiles)
        self._gathered = [torch.empty(shape, dtype=images.dtype, pin_memory=pinned) for _ in range(2)]
        self._rows = torch.arange(batch_size, device=device)

    def __call__(self, indices: Tensor) -> Iterator[Tensor]:
        """Rows of `tiles` for each step, valid until the next step.

        Args:
            indices: (steps, batch_size) rows of the store, on the device.
        """
        if not self._moves:
            for rows in indices:
                yield rows
                give_back()
            return
        with ThreadPoolExecutor(len(self._gathered)) as pool:
            yield from self._moved(indices.cpu().numpy(), pool)

    def _moved(self, indices: NDArray[np.int64], pool: ThreadPoolExecutor) -> Iterator[Tensor]:
        store = self._images.flatten(1).numpy()
        copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        copied = [torch.cuda.Event() for _ in self._gathered]  # type: ignore[no-untyped-call]
        taken = torch.cuda.Event()  # type: ignore[no-untyped-call]
        taken.record()

        def gather(step: int) -> Tensor:
            slot = step % 2
            copied[slot].synchronize()  # the previous content of this slot is on the device
            place = self._gathered[slot]
            # numpy, because in a thread torch starts more threads for every gather, which takes longer than the gather
            np.take(store, indices[step], axis=0, out=place.flatten(1).numpy(), mode="clip")
            return place

        ahead = deque(pool.submit(gather, step) for step in range(min(2, len(indices))))
        for step in range(len(indices)):
            gathered = ahead.popleft().result()
            with torch.cuda.stream(copies):
                copies.wait_event(taken)
                self._next.copy_(gathered, non_blocking=True)
                copied[step % 2].record(copies)
            if step + 2 < len(indices):
                ahead.append(pool.submit(gather, step + 2))
            give_back()
            torch.cuda.current_stream().wait_event(copied[step % 2])
            self.tiles.copy_(self._next)
            taken.record()
            yield self._rows


def choose_tier(nbytes: int, engine: Engine) -> Tier:
    """Where to keep this many bytes of decoded tiles: the fastest place with room, or the one `engine.tiles` names.

    Raises:
        InputError: `engine.tiles` names the GPU, but there is none.
    """
    if engine.tiles == "gpu" and engine.device.type != "cuda":
        raise InputError("engine.tiles=gpu, but the run is on a CPU; use auto, memory or disk")
    if engine.tiles != "auto":
        return engine.tiles
    if engine.device.type == "cuda" and _fits_on(engine.device, nbytes):
        return "gpu"
    return "memory" if nbytes < HOST_SHARE * available_memory() else "disk"


def available_memory() -> float:
    """Bytes of host memory that are available without swapping; infinite if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return math.inf
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return float(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else math.inf


def _decoded(cohort: Cohort, engine: Engine, content: str) -> Tensor:
    shape, dtype = (cohort.n_instances, *cohort.instance_shape), np.dtype(cohort.instance_dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    tier = engine.broadcast(choose_tier(nbytes, engine))
    what = f"tiles: {shape[0]} of {shape[2]} px" if cohort.kind == "tiles" else f"features: {shape[0]} of {shape[1]}"
    if tier == "disk":
        path = mapped_file(cohort, engine, content)
        engine.say(f"{what} ({readable_size(nbytes)}) in {path}")
        return torch.from_numpy(map_rows(path, dtype, shape))
    images = np.empty(shape, dtype=dtype)
    _decode_into(cohort, images, engine)
    places = {"gpu": "GPU memory", "memory": "host memory"}
    engine.say(f"{what} ({readable_size(nbytes)}) in {places[tier]}")
    return torch.from_numpy(images).to(engine.device if tier == "gpu" else "cpu")


def mapped_file(cohort: Cohort, engine: Engine, content: str) -> Path:
    """The file of a cohort's decoded tiles; the first process writes it if it does not exist yet.

    Its name is the hash of the tiles it was decoded from, so other tiles are never taken for these.
    """
    shape, dtype = (cohort.n_instances, *cohort.instance_shape), np.dtype(cohort.instance_dtype)
    path = disk_folder(cohort, engine) / f"{content}.{dtype}"

    def write() -> None:
        nbytes = math.prod(shape) * dtype.itemsize
        with atomic_path(path, nbytes) as temporary:
            with temporary.open("wb") as file:
                reserve(file, nbytes)
            tiles = map_rows(temporary, dtype, shape, "r+")
            _decode_into(cohort, tiles, engine)
            tiles.flush()

    if not engine.broadcast(path.is_file()):
        engine.on_writer(write)
    return path


def disk_folder(cohort: Cohort, engine: Engine) -> Path:
    """Where what does not fit into memory lies."""
    return Path(engine.tile_folder) if engine.tile_folder is not None else cohort.path / "decoded"


def room_for_features(count: int, feature_dim: int, engine: Engine, folder: Path | None) -> Tensor:
    """Zeros (count, D) for features of tiles: on the GPU, else in memory, or in a file if memory has no room.

    Args:
        count: Number of tiles.
        feature_dim: Features of a tile.
        engine: Device, and where tiles are kept; features are kept likewise.
        folder: Where the file would be; None: in memory in any case.
    """
    shape, on_disk = (count, feature_dim), False
    if engine.device.type == "cpu" and folder is not None:
        on_disk = choose_tier(4 * count * feature_dim, engine) == "disk"
    if on_disk and folder is not None:
        return torch.from_numpy(new_rows(shape, np.float32, folder))
    return torch.zeros(shape, device=engine.device)


def _decode_into(cohort: Cohort, out: NDArray[Any], engine: Engine) -> None:
    with engine.progress("decode", cohort.n_instances, "tiles") as progress:

        def reach(done: int, total: int) -> None:
            progress.reach(done, total)
            give_back()

        load_tiles(cohort, progress=reach, out=out)


def _fits_on(device: torch.device, nbytes: int) -> bool:
    free, _ = torch.cuda.mem_get_info(device)
    return nbytes < GPU_SHARE * free
