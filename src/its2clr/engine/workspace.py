"""Where a training writes: its checkpoints, its metrics, and a lock that keeps other trainings out."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING

from its2clr.engine.devices import Engine
from its2clr.errors import InputError
from its2clr.files import disk_full_said, read_metrics, write_text

if TYPE_CHECKING:
    from its2clr.engine.event_file import EventFile
    from its2clr.engine.mlflow_run import MlflowRun

SAY_EVERY_SECONDS = 5.0
"""Metrics of an epoch are printed at most this often."""


class Workspace:
    """The part of a run's folder that trainings write to.

    Args:
        path: The folder.
        engine: Only its first process writes.

    Attributes:
        on_log: Called in the first process after every entry of the log, with its stage and epoch; an error that it
            raises stops the training, which can be continued.
        saved: The stage that is being trained and its last saved epoch.
        mlflow: Where numbers go besides, in the first process, if the settings ask for it.
    """

    def __init__(self, path: Path, engine: Engine) -> None:
        self.path = path
        self.engine = engine
        self.on_log: Callable[[str, int], None] | None = None
        self.saved: tuple[str, int] | None = None
        self.mlflow: MlflowRun | None = None
        self._events: dict[str, EventFile] = {}
        self._last_said = 0.0

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other commands from training in this run; released when the process ends, even if it is killed.

        Raises:
            InputError: Another process is training in it.
        """
        with (self.path / ".lock").open("w", encoding="utf-8") as file:
            self.engine.on_writer(lambda: _lock_file(file, self.path))
            try:
                with nullcontext() if self.mlflow is None else self.mlflow.watched():
                    yield
            except KeyboardInterrupt:
                if self.saved is not None:
                    stage, epoch = self.saved
                    self.engine.say(f"{stage}: " + (f"saved after epoch {epoch}" if epoch else "no epoch is saved yet"))
                raise

    def checkpoint(self, name: str) -> Path:
        """Path of a checkpoint by name."""
        return self.path / "checkpoints" / f"{name}.safetensors"

    def log(
        self,
        stage: str,
        epoch: int,
        epochs: int,
        values: Mapping[str, float],
        unsaid: Mapping[str, float] | None = None,
    ) -> None:
        """Append to metrics.jsonl, TensorBoard and MLflow, print every few seconds; `unsaid` goes to the file only."""
        if not self.engine.is_writer:
            return
        path = self.path / "metrics.jsonl"
        with disk_full_said(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"stage": stage, "epoch": epoch, **values, **(unsaid or {})}) + "\n")
        named = {f"{stage}/{name}": value for name, value in values.items()}
        if (events := self._event_file(stage, epoch)) is not None:
            events.add(epoch, named)
        if self.mlflow is not None:
            self.mlflow.log(epoch, named)
        now = time.monotonic()
        if now - self._last_said > SAY_EVERY_SECONDS or epoch == epochs:
            self._last_said = now
            shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            self.engine.say(f"{stage} epoch {epoch}/{epochs}: {shown}")
        if self.on_log is not None:
            self.on_log(stage, epoch)

    def forget_after(self, stage: str, epoch: int) -> None:
        """Drop metrics of epochs that will be repeated."""
        self._events.pop(stage, None)  # the next file makes TensorBoard forget these epochs
        if self.engine.is_writer and (self.path / "metrics.jsonl").is_file():
            entries = read_metrics(self.path)
            kept = [entry for entry in entries if entry["stage"] != stage or entry["epoch"] <= epoch]
            write_text(self.path / "metrics.jsonl", "".join(json.dumps(entry) + "\n" for entry in kept))

    def _event_file(self, stage: str, epoch: int) -> "EventFile | None":
        """The file for TensorBoard; None where that is not installed."""
        if stage not in self._events and find_spec("tensorboard") is not None:
            from its2clr.engine.event_file import EventFile

            self._events[stage] = EventFile(self.path / "tensorboard" / stage, epoch)
        return self._events.get(stage)


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
