"""The run directory: config, progress of the stages, and refusing what does not fit them."""

from pathlib import Path
from typing import Any

import yaml

from its2clr.config import RunConfig
from its2clr.engine.devices import Engine
from its2clr.engine.workspace import Workspace
from its2clr.errors import InputError
from its2clr.files import hash_files, read_json, remove_half_written, write_json, write_text
from its2clr.run.saved import read_run_config
from its2clr.settings import config_difference, without_folders
from its2clr.units import TilePixels
from its2clr.version import __version__


class RunDirectory(Workspace):
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
        super().__init__(Path(path), engine)
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
            document = {"cohort": str(self.cohort), **without_folders(self.config.model_dump(mode="json"))}
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

    def _state(self) -> dict[str, Any]:
        path = self.path / "state.json"
        state: dict[str, Any] = read_json(path) if path.is_file() else {"its2clr": __version__, "stages": {}}
        return state
