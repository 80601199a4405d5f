"""A study on disk: what is searched, Optuna's record of its trials, and which trial a worker does next."""

import os
import secrets
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from its2clr.cohort import Cohort
from its2clr.cohort.identity import only_test_labels, said_changes
from its2clr.config import FEATURES, STANDARD, RunConfig
from its2clr.engine.workers import locked, take_lock
from its2clr.errors import InputError
from its2clr.files import damage_said, disk_full_said, read_metrics, write_json, write_text
from its2clr.plugins import import_plugins
from its2clr.run.made_from import MADE_FROM_FILE, read_made_from
from its2clr.run.opening import cohort_info
from its2clr.seeds import derive_seed
from its2clr.settings import config_difference, parse_yaml, resolve_config, validate_config, without_folders
from its2clr.tune.judge import DIRECTION
from its2clr.tune.space import Space, default_space, read_space

try:
    import optuna
except ModuleNotFoundError as missing:
    raise InputError("`its2clr tune` needs Optuna: pip install 'its2clr[tune]'") from missing
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock, JournalStorage
from optuna.trial import FrozenTrial, Trial, TrialState

STUDY_FILE = "study.yaml"
NAME = "tune"
STARTUP_TRIALS = 4
"""Finished trials that the pruner waits for."""
MOST_ATTEMPTS = 3
"""A trial that was taken up so often without getting further is given up."""
FIRST_FAILURES = 3
"""If the first trials all fail, and these are so many, something else is wrong than the drawn settings."""
LEAST_FOR_IMPORTANCES = 4
STATES = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "stopped early",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "unfinished",
    TrialState.WAITING: "waiting",
}
optuna.logging.set_verbosity(optuna.logging.ERROR)


@dataclass(frozen=True)
class Found:
    """A trial, as tables show it.

    Attributes:
        number: Its number; 0 is the recipe itself.
        state: A word of `STATES`.
        value: What it was judged by; of an unfinished one, so far.
        rounds: Rounds that were measured.
        seconds: How long it took.
        why: Why it was stopped or failed.
        settings: Its value of every setting that is searched.
    """

    number: int
    state: str
    value: float | None
    rounds: int
    seconds: float
    why: str
    settings: dict[str, Any]


class Claim:
    """A trial that this process works on; no other process takes it up until it is let go.

    Args:
        trial: Optuna's trial.
        folder: Its run directory.
        lock: Held while it is worked on.
        reported: Steps that a stopped process has noted already.
    """

    def __init__(self, trial: Trial, folder: Path, lock: IO[str], reported: Iterable[int]) -> None:
        self.trial, self.folder, self._lock, self._reported = trial, folder, lock, set(reported)

    @property
    def is_recipe(self) -> bool:
        """Whether it is the recipe itself, unchanged."""
        return self.trial.number == 0

    @property
    def settings(self) -> dict[str, Any]:
        """What was drawn."""
        drawn: dict[str, Any] = self.trial.user_attrs["settings"]
        return drawn

    def report(self, step: int, value: float) -> bool:
        """Note a round; True says that the trial is worse than the median of the others and should stop."""
        if step not in self._reported:
            self.trial.report(value, step)
        return not self.is_recipe and self.trial.should_prune()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the block to how long the trial took, however the block ends."""
        started = time.monotonic()
        try:
            yield
        finally:
            before = self.trial.user_attrs.get("seconds", 0.0)
            self.trial.set_user_attr("seconds", before + time.monotonic() - started)

    def let_go(self) -> None:
        """Let other processes take it up, if it has not ended."""
        self._lock.close()


class Study:
    """A study in its folder; several processes may open it at once.

    Args:
        path: The folder, which `Study.begin` has made.
        engine: Settings of the machine to use instead of the saved ones.

    Raises:
        InputError: The folder holds no study.
    """

    def __init__(self, path: Path, engine: Mapping[str, Any] | None = None) -> None:
        saved = _read(path)
        if saved is None:
            raise InputError(f"{path}: no study has begun here; begin one with `its2clr tune COHORT --out STUDY`")
        self.path, self.cohort, self.recipe = path, Path(saved["cohort"]), saved["recipe"]
        settings = {**saved["settings"], **({} if engine is None else {"engine": engine})}
        self.config = validate_config(settings, str(path / STUDY_FILE))
        import_plugins(self.config.plugins)
        self.space = Space(saved["space"], self.config, str(path / STUDY_FILE))
        self._storage = JournalStorage(Journal(path / "journal.log"))
        with locked(path / ".lock"):
            self._study = optuna.create_study(
                study_name=NAME,
                storage=self._storage,
                direction=DIRECTION,
                load_if_exists=True,
                pruner=optuna.pruners.MedianPruner(STARTUP_TRIALS, n_warmup_steps=1),
            )
            if not self._study.get_trials(deepcopy=False):
                self._study.enqueue_trial(self.space.recipe_parameters())

    @classmethod
    def begin(
        cls,
        path: str | Path,
        cohort: str | Path | None = None,
        recipe: str | None = None,
        overrides: Sequence[str] = (),
        space: str | Path | None = None,
    ) -> "Study":
        """Open a study, or begin one.

        Args:
            path: Folder of the study.
            cohort: Folder of the cohort; None for a study that has begun.
            recipe: Recipe name or file; None keeps the settings of a study that has begun; a new one
                takes the recipe `standard`, or `features` for a cohort of features.
            overrides: `--set` options.
            space: YAML file of the space; None keeps that of a study that has begun, else takes `default_space`.

        Raises:
            InputError: Something is wrong with the settings or the space, or they are not those it began with.
        """
        path = Path(path)
        saved = _read(path)
        if saved is None and cohort is None:
            raise InputError(f"{path}: no study has begun here; name a cohort: `its2clr tune COHORT --out STUDY`")
        wanted = planned(cohort or saved["cohort"], recipe, overrides, space, saved)  # type: ignore[index]
        if saved is None:
            with locked(path / ".lock"):  # two commands may begin it at once
                saved = _read(path)
                if saved is None:
                    written = {**wanted, "settings": without_folders(wanted["settings"])}
                    write_text(path / STUDY_FILE, yaml.safe_dump(written, sort_keys=False))
                    saved = wanted
        _refuse_changes(path, saved, wanted)
        _refuse_other_cohort(path, Path(saved["cohort"]))
        return cls(path, wanted["settings"]["engine"])

    def claim(self, most: int | None = None) -> Claim | None:
        """The next trial to work on: one that a stopped process left, else a new one; None if there is none.

        Args:
            most: Number of trials of the whole study; None: any number.
        """
        with locked(self.path / ".lock"):
            trials = self._study.get_trials(deepcopy=False)
            for left in [trial for trial in trials if trial.state == TrialState.RUNNING]:
                if (claim := self._take_up(left)) is not None:
                    return claim
            begun = sum(trial.state != TrialState.WAITING for trial in trials)
            if (most is not None and begun >= most) or self.nothing_works():
                return None
            # A seed per trial, so that a study that was stopped draws what it would have drawn.
            seed = derive_seed(self.config.seed, "tune", begun) % 2**32
            self._study.sampler = optuna.samplers.TPESampler(seed=seed)
            claim = self._claimed(self._study.ask())
            assert claim is not None, "a new trial cannot be taken by another process"
            return claim

    def end(self, claim: Claim, value: float | None, why: str = "", *, failed: bool = False) -> None:
        """Note how a trial ended: with a value; without one stopped early (which the search learns from), or failed."""
        if why:
            claim.trial.set_user_attr("why", why)
        if value is not None:
            self._study.tell(claim.trial, value)
        else:
            self._study.tell(claim.trial, state=TrialState.FAIL if failed else TrialState.PRUNED)

    def trials(self) -> list[Found]:
        """Every trial that has begun, by number."""
        trials = self._study.get_trials(deepcopy=False)
        return [_found(trial) for trial in trials if trial.state != TrialState.WAITING]

    def best(self) -> Found | None:
        """The best finished trial, the first of equals; None if none has finished."""
        finished = [trial for trial in self.trials() if trial.state == "finished" and trial.value is not None]
        sign = 1 if DIRECTION == "maximize" else -1
        return max(finished, key=lambda trial: (sign * (trial.value or 0.0), -trial.number), default=None)

    def config_of(self, trial: Found) -> RunConfig:
        """All settings of a trial."""
        return self.config if trial.number == 0 else self.space.config(trial.settings)

    def importances(self) -> dict[str, float] | None:
        """How much each searched setting mattered, as shares, largest first; None with too few finished trials."""
        finished = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if len(finished) < LEAST_FOR_IMPORTANCES or len({trial.value for trial in finished}) == 1:
            return None
        with warnings.catch_warnings(action="ignore"):  # that trials are few is said on the page
            return dict(optuna.importance.get_param_importances(self._study))

    def nothing_works(self) -> str | None:
        """Why the first trials failed, if all there are have failed."""
        trials = self.trials()
        failed = [trial for trial in trials if trial.state == "failed"]
        return failed[-1].why if len(failed) == len(trials) >= FIRST_FAILURES else None

    def seconds_spent(self) -> float:
        """How long all commands of this study have run."""
        return float(sum(value for key, value in self._study.user_attrs.items() if key.startswith("seconds ")))

    def stopwatch(self) -> "Stopwatch":
        """Counts the time of one command."""
        return Stopwatch(self._study)

    def _take_up(self, left: FrozenTrial) -> Claim | None:
        """Claim a trial whose process has ended; give it up if it does not get further."""
        number = self._storage.get_study_id_from_name(NAME)
        trial = Trial(self._study, self._storage.get_trial_id_from_study_id_trial_number(number, left.number))
        claim = self._claimed(trial, left.intermediate_values)
        if claim is None:
            return None
        attempts = [*trial.user_attrs.get("attempts", []), len(read_metrics(claim.folder))]
        trial.set_user_attr("attempts", attempts)
        if attempts[-MOST_ATTEMPTS:] == attempts[-1:] * MOST_ATTEMPTS:
            self.end(claim, None, "its process was killed again and again, usually for want of memory", failed=True)
            claim.let_go()
            return None
        return claim

    def _claimed(self, trial: Trial, reported: Iterable[int] = ()) -> Claim | None:
        folder = self.path / "trials" / f"{trial.number:03d}"
        lock = take_lock(folder / ".claim")
        if lock is None:
            return None
        if "settings" not in trial.user_attrs:
            of_recipe = trial.number == 0
            drawn = self.space.draw(trial, list(self.space.recipe_parameters()) if of_recipe else None)
            trial.set_user_attr("settings", self.space.recipe() if of_recipe else drawn)
        return Claim(trial, folder, lock, reported)


class Stopwatch:
    """Counts the time of one command and notes it in the study."""

    def __init__(self, study: optuna.Study) -> None:
        self._study, self._started, self._noted = study, time.monotonic(), 0.0
        self._key = f"seconds {os.getpid()}-{secrets.token_hex(4)}"

    def note(self, every: float = 10.0) -> None:
        """Write down how long the command has run, if the last time is long enough ago."""
        elapsed = time.monotonic() - self._started
        if elapsed - self._noted >= every:
            self._noted = elapsed
            self._study.set_user_attr(self._key, elapsed)


class Journal(JournalFileBackend):
    """Optuna's record of the trials, which stays readable when the disk is full.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), _MendingLock(path))
        self._path = path

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write further lines.

        Raises:
            DiskFullError: There is no room for them.
        """
        with disk_full_said(self._path):
            super().append_logs(logs)


class _MendingLock(JournalFileSymlinkLock):
    """Whoever writes first drops half a line that a full disk left at the end: nothing behind it could be read."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def acquire(self) -> bool:
        taken = super().acquire()
        with self._path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if size and file.read() != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        return taken


def planned(
    cohort: str | Path,
    recipe: str | None,
    overrides: Sequence[str],
    space: str | Path | None,
    saved: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What a study is about, as study.yaml says it; what is not given is taken from what is saved.

    Raises:
        InputError: The cohort is not there, or the settings or the space are wrong.
    """
    info = cohort_info(cohort)
    if info is None:
        raise InputError(f"{cohort}: not a cohort; `its2clr cohort` makes one")
    keeps = saved is not None and recipe is None
    usual = FEATURES if info.kind == "features" else STANDARD
    chosen = recipe or (saved["recipe"] if saved is not None else usual)
    config = resolve_config(None if keeps else chosen, overrides, dict(saved["settings"]) if saved and keeps else None)
    import_plugins(config.plugins)
    entries = saved["space"] if saved is not None else default_space(config, info.kind)
    where = "the default space"
    if space is not None:
        entries, where = read_space(space), str(space)
    return {
        "cohort": str(Path(cohort).resolve()),
        "recipe": chosen,
        "space": Space(entries, config, where).written(),
        "settings": config.model_dump(mode="json"),
    }


def _read(path: Path) -> dict[str, Any] | None:
    file = path / STUDY_FILE
    if not file.is_file():
        return None
    with damage_said(f"{file}: damaged, cannot be read"):
        text = file.read_text(encoding="utf-8")
    found = parse_yaml(text, f"{file}: damaged")
    if not isinstance(found, dict) or not {"cohort", "recipe", "space", "settings"} <= found.keys():
        raise InputError(f"{file}: not the description of a study")
    return {**found, "settings": without_folders(found["settings"])}


def _refuse_changes(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    before, now = (validate_config(one["settings"], str(path / STUDY_FILE)) for one in (saved, wanted))
    difference = config_difference(before, now)
    for key in sorted(saved["space"].keys() | wanted["space"].keys()):
        if saved["space"].get(key) != wanted["space"].get(key):
            difference.append(f"space of {key}: {saved['space'].get(key)} -> {wanted['space'].get(key)}")
    if saved["cohort"] != wanted["cohort"]:
        difference.insert(0, f"cohort: {saved['cohort']} -> {wanted['cohort']}")
    if difference:
        raise InputError(
            f"{path}: this study was begun with other settings; choose another --out folder or go on without "
            "changes:\n  " + "\n  ".join(difference)
        )


def _refuse_other_cohort(path: Path, cohort: Path) -> None:
    """Trials are compared with each other, so all must be of the same cohort; test labels have no part in them."""
    with locked(path / ".lock"):
        now, before = Cohort.open(cohort).identity(), read_made_from(path)
        if before is None:
            write_json(path / MADE_FROM_FILE, now.as_dict())
            return
    changes = now.changes_since(before)
    if not only_test_labels(changes):
        raise InputError(
            f"{cohort}: the cohort has changed since the study {path} began; restore it, or begin a new study (another "
            "--out folder):\n  " + "\n  ".join(said_changes(changes))
        )


def _found(trial: FrozenTrial) -> Found:
    reported = trial.intermediate_values
    return Found(
        number=trial.number,
        state=STATES[trial.state],
        value=trial.value if trial.value is not None else reported[max(reported)] if reported else None,
        rounds=len(reported),
        seconds=trial.user_attrs.get("seconds", 0.0),
        why=trial.user_attrs.get("why", ""),
        settings=trial.user_attrs.get("settings", {}),
    )
