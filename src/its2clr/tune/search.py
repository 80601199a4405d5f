"""The search itself: trials one after the other or side by side, each a run directory, until a budget is spent."""

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from its2clr.cluster.place import Cluster
from its2clr.cluster.workers import WorkersDied, workers_of
from its2clr.cohort import Cohort
from its2clr.config import RunConfig
from its2clr.engine.devices import Engine
from its2clr.engine.progress import Progress, ProgressBar
from its2clr.engine.shared_gpu import shared_gpu
from its2clr.engine.workers import lasting_engine, locked
from its2clr.errors import DiskFullError, InputError, TrainingError
from its2clr.launcher import launched_processes
from its2clr.plugins import allow_plugins, allowed_plugins
from its2clr.run.opening import open_run
from its2clr.tune.judge import judged
from its2clr.tune.results import said, write_results
from its2clr.tune.study import Claim, Found, Study

DEFAULT_TRIALS = 30
OF_A_START = ("seed", "encoder", "adapter", "projector", "pretrain", "plugins")
"""Sections that a start depends on; the aggregator too, if checks in pretraining use it."""


class OutOfTimeError(Exception):
    """The hours of the study are over; the trial under way can be continued."""


class StoppedEarlyError(Exception):
    """A trial is worse than the median of the others."""


@dataclass(frozen=True)
class Budget:
    """What a search may use.

    Attributes:
        trials: Number of trials of the whole study; None: any number.
        deadline: When it ends, by the clock of the machine.
    """

    trials: int | None
    deadline: float = math.inf

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return time.time() >= self.deadline


def tune(
    study: Study,
    *,
    trials: int | None = None,
    hours: float | None = None,
    cluster: Cluster = Cluster(),  # noqa: B008 (it cannot change)
) -> Found | None:
    """Search until the budget of the study is spent, and write what was found into its folder.

    Args:
        study: The study; what it has finished already counts.
        trials: Number of trials of the whole study; None: `DEFAULT_TRIALS`, or any number if hours are given.
        hours: How long all commands of this study may run, one after the other; None: any time.
        cluster: Where trials are trained; on this machine with one worker, in this process.

    Returns:
        The best trial; None if none has finished.

    Raises:
        InputError: The cohort cannot be trained with, or this process was started by torchrun or srun.
        TrainingError: The first trials all failed.
    """
    if launched_processes() != (1, 1):
        raise InputError("its2clr tune trains whole trials side by side: use --workers instead of torchrun or srun")
    if not Cohort.open(study.cohort).is_labelled:
        raise InputError(f"{study.cohort}: this cohort has no labels; it can be predicted, not trained with")
    deadline = math.inf if hours is None else time.time() + 3600 * hours - study.seconds_spent()
    budget = Budget(DEFAULT_TRIALS if trials is None and hours is None else trials, deadline)
    bars = ProgressBar()
    stopwatch = study.stopwatch()
    try:
        if not budget.is_over:
            bars.print(f"tune: {len(list(study.space))} settings, judged on validation bags; folder {study.path}")
            train_start(study, study.config, Engine(study.config.engine), quiet=False)
        with bars.start("trials", budget.trials or 0, "trials") as bar:
            watch = Watch(study, bar, bars.print, stopwatch.note)
            if cluster.is_local and (cluster.workers or 1) == 1:
                work(study, budget, watch.look)
            else:
                _side_by_side(study, budget, cluster, watch)
            watch.look()
    finally:
        stopwatch.note(every=0.0)
        write_results(study)
    if (why := study.nothing_works()) is not None:
        raise TrainingError(f"the first {len(study.trials())} trials all failed, the last of them because: {why}")
    return study.best()


def work(study: Study, budget: Budget, look: Callable[[], None]) -> None:
    """Do one trial after the other until the budget is spent or no trial is left.

    Args:
        study: The study.
        budget: What it may use.
        look: Called after every round and every trial.
    """
    engine = Engine(study.config.engine)
    engine.memory = {}  # decoded tiles serve all trials
    while do_trial(study, budget, engine, look):
        look()


def do_trial(study: Study, budget: Budget, engine: Engine, look: Callable[[], None]) -> bool:
    """Do the next trial; whether there was one, and time for all of it."""
    if budget.is_over or (claim := study.claim(budget.trials)) is None:
        return False
    try:
        with claim.timed():
            value, why, failed = run_trial(study, claim, engine, budget, look)
        study.end(claim, value, why, failed=failed)
        shutil.rmtree(claim.folder / "checkpoints", ignore_errors=True)
    except OutOfTimeError:
        return False
    finally:
        claim.let_go()
    return True


def run_trial(
    study: Study, claim: Claim, engine: Engine, budget: Budget, look: Callable[[], None]
) -> tuple[float | None, str, bool]:
    """Refine with the settings of a trial, from where it was stopped.

    Returns:
        What it is judged by (None if it did not reach its end), why it ended before, and whether it failed. A collapse
        is not a failure: the search should learn from it.

    Raises:
        OutOfTimeError: The time is over.
        DiskFullError: There is no room for what it writes; the trial can be continued.
    """
    try:
        config = study.config if claim.is_recipe else study.space.config(claim.settings)
        settings: dict[str, Any] = config.model_dump(mode="json")
        settings["pretrain"]["start"] = str(train_start(study, config, engine))
        stages = open_run(claim.folder, study.cohort, None, settings, quiet=True, engine=engine, write_features=False)

        stages.run.on_log = partial(_after, claim, config, budget, look)
        stages.refine()
        return judged(claim.folder), "", False
    except (OutOfTimeError, DiskFullError):
        raise
    except StoppedEarlyError:
        return None, "worse than the median of the other trials", False
    except TrainingError as error:
        return None, str(error), False
    except Exception as error:  # noqa: BLE001 (whatever it was, the other trials go on, and the page names it)
        return None, f"{type(error).__name__}: {error}", True


def _after(claim: Claim, config: RunConfig, budget: Budget, look: Callable[[], None], stage: str, epoch: int) -> None:
    """Report a round of a trial as it comes, and stop the trial there if it is worse than others or time is over."""
    if stage != "round":
        return
    value = judged(claim.folder, epoch)
    assert value is not None, "a round leaves its number"
    worse = claim.report(math.ceil(epoch / config.refine.refresh_every), value)
    look()
    if epoch == config.refine.epochs:
        return
    if worse:
        raise StoppedEarlyError
    if budget.is_over:
        raise OutOfTimeError


def train_start(study: Study, config: RunConfig, engine: Engine, *, quiet: bool = True) -> Path:
    """The start that trials with these settings share; trained once, by the first process that needs it."""
    if config.pretrain.start is not None:
        return Path(config.pretrain.start)
    settings: dict[str, Any] = config.model_dump(mode="json")
    needed = [*OF_A_START, *(["aggregator"] if config.pretrain.check_every else [])]
    identity = json.dumps({name: settings[name] for name in needed}, sort_keys=True)
    folder = study.path.resolve() / "starts" / hashlib.sha256(identity.encode()).hexdigest()[:10]
    of_recipe = study.config.model_dump(mode="json")
    with locked(folder / ".start"):
        settings = {**of_recipe, **{name: settings[name] for name in needed}}
        stages = open_run(folder, study.cohort, None, settings, quiet=quiet, engine=engine, write_features=False)
        stages.pretrain()
    return folder


class Watch:
    """Shows how far a study is: a bar, and a line for every trial that has ended since the last look.

    Args:
        study: The study.
        bar: The bar.
        say: Takes a line.
        note: Called at every look, to note the time that was spent.
    """

    def __init__(self, study: Study, bar: Progress, say: Callable[[str], None], note: Callable[[], None]) -> None:
        self._study, self._bar, self.say, self._note = study, bar, say, note
        self._ended = {trial.number for trial in study.trials() if trial.state != "unfinished"}
        if self._ended:
            say(f"trials: {len(self._ended)} were there already")
            bar.advance(len(self._ended))

    def look(self) -> None:
        """Say what has ended; show what is under way."""
        trials, best = self._study.trials(), self._study.best()
        for trial in trials:
            if trial.state != "unfinished" and trial.number not in self._ended:
                self._ended.add(trial.number)
                self.say(said(trial, best))
                self._bar.advance()
        running = [trial for trial in trials if trial.state == "unfinished"]
        self._bar.note("; ".join(f"trial {trial.number}, round {trial.rounds}" for trial in running))
        self._bar.advance(0)
        self._note()


def _side_by_side(study: Study, budget: Budget, cluster: Cluster, watch: Watch) -> None:
    """Let several workers work on the study, a trial at a time, until no trial is left or the time is over."""
    study_is_over = False

    def next_piece() -> tuple[None, None] | None:
        return None if study_is_over or budget.is_over else (None, None)

    engine = json.dumps(study.config.engine.model_dump(mode="json"))
    trial = partial(_trial_in_worker, study.path.resolve(), engine, budget, allowed_plugins())
    most = None if budget.trials is None else max(1, budget.trials)
    with shared_gpu() if cluster.is_local else nullcontext(), workers_of(cluster, most, watch.say) as workers:
        for _, found in workers.work(trial, next_piece, look=watch.look):
            if isinstance(found, WorkersDied):
                raise TrainingError(
                    "a worker was killed from outside again and again, usually for want of memory: try fewer "
                    "--workers. The same command goes on where it stopped."
                )
            study_is_over |= not found


def _trial_in_worker(path: Path, engine: str, budget: Budget, plugins: list[str], _: None) -> bool:
    allow_plugins(plugins)
    return do_trial(Study(path, json.loads(engine)), budget, lasting_engine(engine), lambda: None)
