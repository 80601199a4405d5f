"""The run directory: config, progress of the stages, metrics, checkpoints; and going on where a run stopped."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
import yaml
from torch import Tensor, nn

from its2clr import __version__
from its2clr.config import RunConfig, config_difference, validate_config
from its2clr.engine.checkpoint import (
    load_checkpoint,
    load_module,
    load_optimiser,
    optimiser_tensors,
    prefixed,
    save_checkpoint,
    under,
)
from its2clr.engine.devices import Engine
from its2clr.errors import InputError
from its2clr.files import hash_files, read_json, remove_half_written, write_json, write_text
from its2clr.units import TilePixels

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

SAVE_SHARE = 0.05
"""Checkpoints may take about this share of the training time."""


class RunDirectory:
    """A folder that holds everything about one run; the same command run again goes on where it stopped.

    Args:
        path: The folder; made if missing.
        config: Settings of the run.
        cohort: The cohort's folder. None takes that of the run.
        engine: Only its first process writes.

    Raises:
        InputError: The folder belongs to a run with other settings or another cohort.
    """

    def __init__(self, path: str | Path, config: RunConfig, cohort: str | Path | None, engine: Engine) -> None:
        self.path = Path(path)
        self.engine = engine
        self._writers: dict[str, SummaryWriter] = {}
        self._last_said = 0.0
        saved = read_run_config(self.path)
        begun = (self.path / "checkpoints").is_dir()  # before that a mistake may still be corrected
        if saved is not None:
            if begun:
                self._refuse_changes(saved, config, cohort)
            cohort = cohort if cohort is not None else saved[1]
        elif cohort is None:
            raise InputError(f"{self.path}: no run has begun here; name a cohort")
        self.config = config
        self.cohort = Path(cohort).resolve()
        engine.barrier()
        if not begun and engine.is_writer:
            (self.path / "state.json").unlink(missing_ok=True)
            document = {"cohort": str(self.cohort), **self.config.model_dump(mode="json")}
            write_text(self.path / "config.yaml", yaml.safe_dump(document, sort_keys=False))
        if engine.is_writer:
            remove_half_written(self.path)
        engine.barrier()

    def _refuse_changes(self, saved: tuple[RunConfig, Path], config: RunConfig, cohort: str | Path | None) -> None:
        difference = config_difference(saved[0], config)
        if cohort is not None and Path(cohort).resolve() != saved[1].resolve():
            difference.insert(0, f"cohort: {saved[1]} -> {cohort}")
        if difference:
            raise InputError(
                f"{self.path}: this run was started with other settings; choose another --out folder or go on "
                "without changes:\n  " + "\n  ".join(difference)
            )

    def tile_size(self) -> TilePixels | None:
        """Pixels of the tiles this run was trained on; None before it began."""
        size: TilePixels | None = self._state().get("tile_size")
        return size

    def check_cohort(self, tile_size: TilePixels) -> None:
        """Remember the cohort when it is first used; refuse it when its bags have changed since.

        Raises:
            InputError: The folder holds other bags than when the run began.
        """
        fingerprint = hash_files(self.cohort / "bags.csv", self.cohort / "cohort.json")
        state = self._state()
        if state.get("cohort", fingerprint) != fingerprint:
            raise InputError(
                f"{self.cohort}: the cohort has changed since {self.path} began; start a new run folder for it"
            )
        if "cohort" not in state and self.engine.is_writer:
            write_json(self.path / "state.json", {**state, "cohort": fingerprint, "tile_size": tile_size})
        self.engine.barrier()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other commands from training in this run; given up when the process ends, however it ends.

        Raises:
            InputError: Another process is training in it.
        """
        with (self.path / ".lock").open("w", encoding="utf-8") as file:
            self.engine.on_writer(lambda: _lock_file(file, self.path))
            yield

    def checkpoint(self, name: str) -> Path:
        """Path of a checkpoint by name."""
        return self.path / "checkpoints" / f"{name}.safetensors"

    def done(self, stage: str) -> dict[str, Any] | None:
        """What a finished stage noted, or None when it is not finished."""
        return self.finished().get(stage)

    def finished(self) -> dict[str, dict[str, Any]]:
        """Every finished stage with what it noted."""
        stages: dict[str, dict[str, Any]] = self._state()["stages"]
        return stages

    def mark_done(self, stage: str, **notes: Any) -> None:
        """Note that a stage is finished; later calls skip it."""
        if self.engine.is_writer:
            state = self._state()
            state["stages"][stage] = notes
            write_json(self.path / "state.json", state)
        self.engine.barrier()

    def log(self, stage: str, epoch: int, epochs: int, values: Mapping[str, float]) -> None:
        """Append to metrics.jsonl and TensorBoard and say it, at most every few seconds."""
        if not self.engine.is_writer:
            return
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"stage": stage, "epoch": epoch, **values}) + "\n")
        writer = self._writer(stage, epoch)
        for name, value in values.items():
            writer.add_scalar(f"{stage}/{name}", value, epoch)
        now = time.monotonic()
        if now - self._last_said > 5 or epoch == epochs:
            self._last_said = now
            shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            self.engine.say(f"{stage} epoch {epoch}/{epochs}: {shown}")

    def forget_after(self, stage: str, epoch: int) -> None:
        """Drop metrics of epochs that will be done again."""
        if self.engine.is_writer and (self.path / "metrics.jsonl").is_file():
            entries = read_metrics(self.path)
            kept = [entry for entry in entries if entry["stage"] != stage or entry["epoch"] <= epoch]
            write_text(self.path / "metrics.jsonl", "".join(json.dumps(entry) + "\n" for entry in kept))

    def _state(self) -> dict[str, Any]:
        path = self.path / "state.json"
        state: dict[str, Any] = read_json(path) if path.is_file() else {"its2clr": __version__, "stages": {}}
        return state

    def _writer(self, stage: str, epoch: int) -> "SummaryWriter":
        if stage not in self._writers:
            from torch.utils.tensorboard import SummaryWriter

            folder = self.path / "tensorboard" / stage
            self._writers[stage] = SummaryWriter(str(folder), purge_step=epoch)
        return self._writers[stage]


def _lock_file(file: IO[str], run: Path) -> None:
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(f"{run}: another process is training in this run; wait for it or stop it first") from error
    except OSError:  # a file system without locks
        return


class TrainingState:
    """A network and its optimiser, saved between epochs and put back after a stop.

    Args:
        run: Where the checkpoint lives.
        stage: Its name.
        network: Saved and restored.
        optimiser: Saved and restored.
    """

    def __init__(self, run: RunDirectory, stage: str, network: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        self._run, self._stage = run, stage
        self._network, self._optimiser = network, optimiser
        self._path = run.checkpoint(stage)
        self._saved_at, self._cost = -float("inf"), 0.0
        self.tensors: dict[str, Tensor] = {}
        self.notes: dict[str, Any] = {}

    def resume(self) -> int:
        """Put the last saved state back and give the number of finished epochs (0 for a new start)."""
        if not self._path.is_file():
            self._run.forget_after(self._stage, 0)
            return 0
        tensors, state = load_checkpoint(self._path)
        processes = self._run.engine.world_size
        if state["processes"] != processes:
            raise InputError(
                f"{self._run.path}: {self._stage} was begun by {state['processes']} process(es) and is to go on with "
                f"{processes}; what a process draws depends on their number: start it with {state['processes']} again"
            )
        load_module(self._network, under("network", tensors), self._path)
        load_optimiser(self._optimiser, under("optimiser", tensors))
        self.tensors, self.notes = under("extra", tensors), state["notes"]
        epoch: int = state["epoch"]
        self._run.forget_after(self._stage, epoch)
        self._run.engine.say(f"{self._stage}: going on after epoch {epoch}")
        return epoch

    def save(self, epoch: int, *, last: bool = False) -> None:
        """Save after an epoch, unless the last save is so recent that saving would slow training down."""
        if not self._run.engine.is_writer:
            return
        now = time.monotonic()
        if not last and now - self._saved_at < self._cost / SAVE_SHARE:
            return
        tensors = (
            prefixed("network", self._network.state_dict())
            | prefixed("optimiser", optimiser_tensors(self._optimiser))
            | prefixed("extra", self.tensors)
        )
        processes = self._run.engine.world_size
        save_checkpoint(self._path, tensors, {"epoch": epoch, "processes": processes, "notes": self.notes})
        self._saved_at = time.monotonic()
        self._cost = self._saved_at - now


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """What a run logged, epoch by epoch; the line a killed run was writing is left out."""
    path = run / "metrics.jsonl"
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return entries


def read_run_config(path: str | Path) -> tuple[RunConfig, Path] | None:
    """Settings and cohort of an existing run, or None."""
    file = Path(path) / "config.yaml"
    if not file.is_file():
        return None
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: damaged, cannot be read ({error})") from error
    if not isinstance(document, dict) or "cohort" not in document:
        raise InputError(f"{file}: not the config of a run (no cohort in it)")
    cohort, inside = Path(document.pop("cohort")), Path(path) / "cohort"
    if not cohort.exists() and inside.is_dir():  # a run that was moved with its cohort in it, such as the demo
        cohort = inside
    return validate_config(document, str(file)), cohort
