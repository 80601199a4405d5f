"""Decoded tiles, gathered by index straight to the device."""

import torch
from torch import Tensor

from its2clr.cohort import Cohort, load_tiles
from its2clr.engine.devices import Engine

SPLITS_KEPT = 3
"""Splits an engine with a memory keeps decoded: those of one cohort."""


class TileStore:
    """All tiles of a cohort as uint8, on the GPU when they fit into half of its free memory, else in host memory.

    Args:
        images: (N, 3, S, S) uint8.
        device: Where batches are wanted.
    """

    def __init__(self, images: Tensor, device: torch.device) -> None:
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            if images.nbytes < free / 2:
                images = images.to(device)
        self.images = images

    @classmethod
    def from_cohort(cls, cohort: Cohort, engine: Engine) -> "TileStore":
        """Decode a cohort's tiles in parallel; or take them from the engine's memory, where it keeps some."""
        key = (cohort.path.resolve(), tuple(cohort.bags["bag_id"]))
        if engine.memory is not None and key in engine.memory:
            kept: TileStore = engine.memory[key]
            return kept
        with engine.progress("decode", cohort.n_instances, "tiles") as progress:
            images = load_tiles(cohort, progress=progress.reach)
        store = cls(torch.from_numpy(images), engine.device)
        if engine.memory is not None:
            while len(engine.memory) >= SPLITS_KEPT:
                engine.memory.pop(next(iter(engine.memory)))
            engine.memory[key] = store
        return store

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tiles on the device and which of them are meant: the whole store where it is there, else these rows alone."""
        if self.images.device == rows.device == device:
            return self.images, rows
        return self.gather(rows, device), torch.arange(len(rows), device=device)

    def gather(self, rows: Tensor, device: torch.device) -> Tensor:
        """Tiles (B, 3, S, S) uint8 at `rows`, on the device."""
        batch = self.images.index_select(0, rows.to(self.images.device, non_blocking=True))
        return batch.to(device, non_blocking=True)
