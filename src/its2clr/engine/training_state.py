"""What a training saves between epochs and restores after a stop, and its best network so far."""

import shutil
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from its2clr.engine.checkpoint import (
    load_checkpoint,
    load_module,
    load_optimiser,
    optimiser_tensors,
    prefixed,
    save_checkpoint,
    under,
)
from its2clr.engine.workspace import Workspace
from its2clr.errors import InputError
from its2clr.files import atomic_path
from its2clr.signals import interrupts_wait

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SAVE_SHARE = 0.05
"""Checkpoints may take at most about this share of the training time."""
Found = TypeVar("Found", bound="DataclassInstance")


class TrainingState(Generic[Found]):
    """A network, its optimiser and what the training found so far.

    Args:
        run: Folder of the checkpoint.
        stage: Name of the checkpoint.
        network: Saved and restored.
        optimiser: Saved and restored.
        found: A dataclass of tensors and of values that JSON can hold; saved, and restored in place.
    """

    def __init__(
        self, run: Workspace, stage: str, network: nn.Module, optimiser: torch.optim.Optimizer, found: Found
    ) -> None:
        self._run, self._stage = run, stage
        self._network, self._optimiser = network, optimiser
        self._path, self._good = run.checkpoint(stage), run.checkpoint(f"{stage}-best-state")
        self._saved_at, self._cost = -float("inf"), 0.0
        self.found = found

    def resume(self) -> int:
        """Restore the last saved state; returns the number of finished epochs (0 if there is none)."""
        if not self._path.is_file():
            self._run.forget_after(self._stage, 0)
            self._run.saved = self._stage, 0
            return 0
        epoch = self._load(self._path)
        self._run.saved = self._stage, epoch
        self._run.engine.say(f"{self._stage}: continuing after epoch {epoch}")
        return epoch

    def save(self, epoch: int, *, last: bool = False) -> None:
        """Save after an epoch, unless the last save is so recent that saving again would slow down the training."""
        if not self._run.engine.is_writer:
            return
        now = time.monotonic()
        if not last and now - self._saved_at < self._cost / SAVE_SHARE:
            return
        with interrupts_wait():
            self._write(self._path, epoch, self.found)
            self._run.saved = self._stage, epoch
        self._saved_at = time.monotonic()
        self._cost = self._saved_at - now

    def mark_good(self, epoch: int, found: Found) -> None:
        """Keep the network and optimiser as they are now, with what was found up to this epoch, for `go_back`."""
        if self._run.engine.is_writer:
            self._write(self._good, epoch, found)

    @property
    def can_go_back(self) -> bool:
        """Whether a good state was marked."""
        return self._good.is_file()

    def go_back(self) -> int:
        """Restore the state that was marked last; returns its epoch. What was found is restored in place."""
        return self._load(self._good)

    def _load(self, path: Path) -> int:
        tensors, state = load_checkpoint(path)
        processes = self._run.engine.world_size
        if state["processes"] != processes:
            raise InputError(
                f"{self._run.path}: {self._stage} began with {state['processes']} process(es) and cannot continue with "
                f"{processes}, because the random draws depend on it; use {state['processes']} again"
            )
        load_module(self._network, under("network", tensors), path)
        load_optimiser(self._optimiser, under("optimiser", tensors))
        self._restore({**state["notes"], **under("extra", tensors)})
        epoch: int = state["epoch"]
        self._run.forget_after(self._stage, epoch)
        return epoch

    def _write(self, path: Path, epoch: int, found: Found) -> None:
        values = {field.name: getattr(found, field.name) for field in fields(found)}
        extra = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        notes = {name: value for name, value in values.items() if name not in extra}
        tensors = (
            prefixed("network", self._network.state_dict())
            | prefixed("optimiser", optimiser_tensors(self._optimiser))
            | prefixed("extra", extra)
        )
        processes = self._run.engine.world_size
        save_checkpoint(path, tensors, {"epoch": epoch, "processes": processes, "notes": notes})

    def _restore(self, values: Mapping[str, Any]) -> None:
        for field in fields(self.found):
            if field.name in values:
                setattr(self.found, field.name, values[field.name])


class BestCheckpoints:
    """Networks of a stage that were the best when they were measured; one file per epoch and part.

    A file is written before the training state that names its epoch, and all are removed when the stage is done. So a
    run that was killed at any moment finds the file that its state names.

    Args:
        run: Folder of the files.
        stage: The stage they belong to.
    """

    def __init__(self, run: Workspace, stage: str) -> None:
        self._run, self._stage = run, stage

    def path(self, epoch: int, part: str = "encoder") -> Path:
        """The file of an epoch."""
        return self._run.checkpoint(f"{self._stage}-best-{part}-{epoch:04d}")

    def hand_over(self, epoch: int, target: Path, part: str = "encoder") -> None:
        """Copy the file of an epoch to `target`, the result of the stage; every process waits for the copy."""
        if self._run.engine.is_writer:
            with atomic_path(target) as temporary:
                shutil.copyfile(self.path(epoch, part), temporary)
        self._run.engine.barrier()

    def remove(self) -> None:
        """Remove all files; only an unfinished training needs them."""
        if self._run.engine.is_writer:
            for path in self._run.path.glob(f"checkpoints/{self._stage}-best-*.safetensors"):
                path.unlink()
