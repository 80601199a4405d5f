"""Run jobs, starts before what starts from them, one or several at a time; one that fails does not stop the rest."""

import json
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from its2clr.engine.shared_gpu import shared_gpu
from its2clr.engine.workers import become_worker
from its2clr.experiments.metrics import ENCODER_OF_STAGE
from its2clr.experiments.plan import Job
from its2clr.plugins import allow_plugins, allowed_plugins
from its2clr.processes import Worker, WorkerLost
from its2clr.signals import interrupts_wait

if TYPE_CHECKING:
    from its2clr.engine.devices import Engine

LONGEST_FIRST = ("pretrain", "end_to_end", "refine", "aggregate")
"""Stages in the order they are taken up: what others wait for, then the longest, so that none of these ends last."""
LOST = "its worker was killed from outside, usually for want of memory: try fewer --workers"


@dataclass(frozen=True)
class Task:
    """A job with all that a worker needs to run it.

    Attributes:
        job: The job.
        folder: Its run directory.
        cohort: The cohort, resampled where the job wants that.
        settings: All settings of the run.
        aggregators: Trained on the frozen features; None is the run's own.
        of_features: Whether class separation and linear probe are measured.
    """

    job: Job
    folder: Path
    cohort: Path
    settings: Mapping[str, Any]
    aggregators: tuple[str | None, ...]
    of_features: bool


@dataclass(frozen=True)
class Outcome:
    """How a task ended."""

    job: Job
    seconds: float
    failure: str | None = None


def execute(tasks: Mapping[Job, Task], workers: int, report: Callable[[Outcome, int, int], None]) -> dict[Job, str]:
    """Run every task.

    Args:
        tasks: By job, starts first.
        workers: Processes; 1 runs in this one.
        report: Called after each task with its outcome, how many are done and how many there are.

    Returns:
        Why jobs failed, by job; what starts from a failed start fails too.
    """
    failures: dict[Job, str] = {}
    outcomes = _one_by_one(tasks) if workers == 1 else _side_by_side(tasks, min(workers, len(tasks)))
    for done, outcome in enumerate(outcomes, start=1):
        if outcome.failure is not None:
            failures[outcome.job] = outcome.failure
        report(outcome, done, len(tasks))
    return failures


def run_task(task: Task) -> Outcome:
    """Train and measure one job; if its run is there, continue it, or only read it if it is finished."""
    from its2clr.run.evaluation import evaluate
    from its2clr.run.opening import open_run

    started = time.monotonic()
    try:
        engine = _engine(json.dumps(task.settings["engine"]))
        stages = open_run(
            task.folder, task.cohort, None, task.settings, quiet=True, engine=engine, write_features=False
        )
        steps = {"refine": stages.refine, "end_to_end": stages.end_to_end}
        steps.get(task.job.stage, stages.pretrain)()
        if task.job.stage != "pretrain":
            for aggregator in task.aggregators:
                stages.aggregate(ENCODER_OF_STAGE[task.job.stage], aggregator)
            if task.job.stage == "refine":
                stages.hand_over()
            evaluate(stages, of_features=task.of_features)
    except Exception as error:  # noqa: BLE001 (whatever it was, the other jobs go on, and the page names it)
        return Outcome(task.job, time.monotonic() - started, f"{type(error).__name__}: {error}")
    return Outcome(task.job, time.monotonic() - started)


def _one_by_one(tasks: Mapping[Job, Task]) -> Iterator[Outcome]:
    failed: set[Job | None] = set()
    for job, task in tasks.items():
        outcome = _not_started(job) if job.start in failed else run_task(task)
        failed |= {job} if outcome.failure else set()
        yield outcome


def _side_by_side(tasks: Mapping[Job, Task], count: int) -> Iterator[Outcome]:
    """Each worker takes the longest task whose start is finished; a worker that dies fails its own task only."""
    pending = dict(tasks)
    settled: dict[Job, bool] = {}
    workers = [_Trainer(_serve, (allowed_plugins(), number, count)) for number in range(count)]
    with shared_gpu(), _stopped(workers):
        while pending or any(worker.job for worker in workers):
            for job in [job for job in pending if job.start is not None and settled.get(job.start) is False]:
                del pending[job]
                settled[job] = False
                yield _not_started(job)
            for worker in workers:
                ready = [job for job in pending if job.start is None or settled.get(job.start)]
                if worker.job is None and ready:
                    chosen = min(ready, key=lambda job: LONGEST_FIRST.index(job.stage))
                    worker.give(pending.pop(chosen))
            busy = {worker.pipe: worker for worker in workers if worker.job is not None}
            for pipe in multiprocessing.connection.wait(list(busy)):
                outcome = busy[pipe].take()  # type: ignore[index]
                settled[outcome.job] = outcome.failure is None
                yield outcome


@contextmanager
def _stopped(workers: list["_Trainer"]) -> Iterator[None]:
    try:
        yield
    finally:
        with interrupts_wait():
            for worker in workers:
                worker.stop()


class _Trainer(Worker):
    """A process that runs one task after the other; after a failure another one goes on."""

    job: Job | None = None

    def give(self, piece: Task) -> None:
        super().give(piece)
        self.job = piece.job

    def take(self) -> Outcome:
        assert self.job is not None
        job, self.job = self.job, None
        try:
            outcome: Outcome = super().take()
        except WorkerLost:
            return Outcome(job, 0.0, LOST)
        if outcome.failure is not None:
            self.stop()  # a process in which work on the GPU failed may fail at everything after it
        return outcome


def _serve(pipe: Connection, plugins: list[str], number: int, count: int) -> None:
    """Run tasks until the pipe closes, with a share of the cores and one of the GPUs."""
    become_worker(number, count)
    allow_plugins(plugins)
    while True:
        try:
            task: Task = pipe.recv()
        except EOFError:
            return
        pipe.send(run_task(task))


@cache
def _engine(settings: str) -> "Engine":
    """One engine per process and settings (as JSON): its decoded tiles serve all runs on a cohort."""
    from its2clr.config import EngineConfig
    from its2clr.engine.devices import Engine

    engine = Engine(EngineConfig.model_validate_json(settings))
    engine.memory = {}
    return engine


def _not_started(job: Job) -> Outcome:
    return Outcome(job, 0.0, "the pretraining it starts from failed")
