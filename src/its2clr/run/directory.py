"""The run directory: config, progress of the stages, and refusing what does not fit them."""

from pathlib import Path
from typing import Any

import yaml

from its2clr.cohort import Cohort
from its2clr.cohort.identity import Identity, only_test_labels, said_changes
from its2clr.config import RunConfig
from its2clr.engine.devices import Engine
from its2clr.engine.workspace import Workspace
from its2clr.errors import InputError
from its2clr.files import hash_files, is_as_recorded, read_json, record, remove_half_written, write_json, write_text
from its2clr.run.made_from import MADE_FROM_FILE, read_made_from
from its2clr.run.saved import read_run_config
from its2clr.settings import config_difference, flatten, without_folders
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
            for name in ("state.json", MADE_FROM_FILE):
                (self.path / name).unlink(missing_ok=True)
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

    def check_cohort(self, cohort: Cohort) -> Identity:
        """Remember what the cohort is when it is first used; refuse it when it has changed since.

        Labels of test bags may change, since no training sees them; this is said.

        Args:
            cohort: The whole cohort of the run.

        Returns:
            What it is now.

        Raises:
            InputError: The cohort is not the one that the run began with.
        """
        identity = self.engine.on_writer(lambda: self._checked(cohort))
        self.engine.barrier()
        return identity

    def _checked(self, cohort: Cohort) -> Identity:
        with self.engine.progress("check", len(cohort), "bags") as progress:
            now = cohort.identity(progress.reach)
        before, state = read_made_from(self.path), self._state()
        if before is None:
            of_tables = hash_files(self.cohort / "bags.csv", self.cohort / "cohort.json")
            if state.get("cohort", of_tables) != of_tables:
                self._refuse_cohort(["other bags.csv or cohort.json"])
            if "cohort" in state:
                self.engine.say(f"{self.path}: begun by an older version; from now on the tiles are watched, too")
            write_json(self.path / MADE_FROM_FILE, now.as_dict())
            write_json(self.path / "state.json", {**state, "cohort": now.digest, "tile_size": cohort.tile_size})
            return now
        changes = now.changes_since(before)
        if not only_test_labels(changes):
            self._refuse_cohort(said_changes(changes))
        for line in said_changes(changes):
            self.engine.say(f"test labels have changed since the run began; no training has seen them. {line}")
        return now

    def _refuse_cohort(self, lines: list[str]) -> None:
        raise InputError(
            f"{self.cohort}: the cohort has changed since {self.path} began; restore it, or train a new run "
            "(another --out folder):\n  " + "\n  ".join(lines)
        )

    def open_loggers(self) -> None:
        """Reach what the settings want numbers to be sent to.

        Raises:
            InputError: It cannot be used.
        """

        def connect() -> None:
            from its2clr.engine.mlflow_run import MlflowRun

            settings = flatten(without_folders(self.config.model_dump(mode="json")))
            about = {"its2clr": __version__, "cohort": str(self.cohort), **settings}
            self.mlflow = MlflowRun(self.path, about, self.engine.say)

        if "mlflow" in self.config.engine.loggers and self.mlflow is None:
            self.engine.on_writer(connect)

    def check_given(self, setting: str, path: Path) -> None:
        """Remember a file or folder that a setting names when it is first used; refuse it when it has changed since.

        One that is not there any more is no harm: the run has taken from it what it needs.

        Raises:
            InputError: It holds something else than when the run began.
        """

        def check() -> None:
            state = self._state()
            given = state.setdefault("given", {})
            if not path.exists():
                return
            if setting not in given:
                given[setting] = record(path)
                write_json(self.path / "state.json", state)
            elif not is_as_recorded(path, given[setting]):
                raise InputError(
                    f"{setting}: {path} has changed since {self.path} began; restore it, or train a new run "
                    "(another --out folder)"
                )

        self.engine.on_writer(check)

    def check_written(self, stage: str) -> None:
        """Refuse files of a finished stage that are not those it wrote; one that was removed is missed when needed.

        Raises:
            InputError: With the file.
        """
        for name, recorded in (self.done(stage) or {}).get("files", {}).items():
            if (self.path / name).exists() and not is_as_recorded(self.path / name, recorded):
                raise InputError(
                    f"{self.path / name}: is not what `{stage}` wrote; restore it, or train a new run (an encoder can "
                    "be given as --set pretrain.start=FILE)"
                )

    def done(self, stage: str) -> dict[str, Any] | None:
        """What a finished stage noted, or None when it is not finished."""
        return self.finished().get(stage)

    def finished(self) -> dict[str, dict[str, Any]]:
        """Every finished stage with what it noted."""
        stages: dict[str, dict[str, Any]] = self._state()["stages"]
        return stages

    def mark_done(self, stage: str, files: tuple[Path, ...] = (), **notes: Any) -> None:
        """Note that a stage is finished, and which files it wrote; later calls skip it."""
        if self.engine.is_writer:
            state = self._state()
            written = {str(file.relative_to(self.path)): record(file) for file in files}
            state["stages"][stage] = {**notes, **({"files": written} if written else {})}
            write_json(self.path / "state.json", state)
        self.engine.barrier()

    def _state(self) -> dict[str, Any]:
        path = self.path / "state.json"
        state: dict[str, Any] = read_json(path) if path.is_file() else {"its2clr": __version__, "stages": {}}
        if not isinstance(state.get("stages"), dict):
            raise InputError(f"{path}: is damaged, it does not say which stages are finished; restore it")
        return state
