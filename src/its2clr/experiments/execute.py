"""Run jobs, starts before what starts from them, one or several at a time; one that fails does not stop the rest."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from its2clr.cluster.place import Cluster
from its2clr.cluster.workers import WorkersDied, workers_of
from its2clr.engine.shared_gpu import shared_gpu
from its2clr.experiments.metrics import ENCODER_OF_STAGE
from its2clr.experiments.plan import Job
from its2clr.plugins import allow_plugins, allowed_plugins

LONGEST_FIRST = ("pretrain", "end_to_end", "refine", "aggregate")
"""Stages in the order they are taken up: what others wait for, then the longest, so that none of these ends last."""
LOST = "its workers were killed from outside again and again, usually for want of memory: try fewer --workers"


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


def execute(
    tasks: Mapping[Job, Task],
    cluster: Cluster,
    report: Callable[[Outcome, int, int], None],
    say: Callable[[str], None] = lambda _: None,
) -> dict[Job, str]:
    """Run every task.

    Args:
        tasks: By job, starts first.
        cluster: Where; on this machine with one worker, in this process.
        report: Called after each task with its outcome, how many are done and how many there are.
        say: Takes a line about the workers.

    Returns:
        Why jobs failed, by job; what starts from a failed start fails too.
    """
    failures: dict[Job, str] = {}
    alone = cluster.is_local and min(cluster.workers or 1, len(tasks)) <= 1
    outcomes = _one_by_one(tasks) if alone else _side_by_side(tasks, cluster, say)
    for done, outcome in enumerate(outcomes, start=1):
        if outcome.failure is not None:
            failures[outcome.job] = outcome.failure
        report(outcome, done, len(tasks))
    return failures


def run_task(task: Task) -> Outcome:
    """Train and measure one job; if its run is there, continue it, or only read it if it is finished."""
    from its2clr.engine.workers import lasting_engine
    from its2clr.run.evaluation import evaluate
    from its2clr.run.opening import open_run

    started = time.monotonic()
    try:
        engine = lasting_engine(json.dumps(task.settings["engine"]))
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


def _side_by_side(tasks: Mapping[Job, Task], cluster: Cluster, say: Callable[[str], None]) -> Iterator[Outcome]:
    """Each worker takes the longest task whose start is finished; after one that fails its process does no more.

    A process in which work on the GPU failed may fail at everything after it.
    """
    pending = dict(tasks)
    settled: dict[Job, bool] = {}

    def next_task() -> tuple[Job, Task] | None:
        ready = [job for job in pending if job.start is None or settled.get(job.start)]
        if not ready:
            return None
        chosen = min(ready, key=lambda job: LONGEST_FIRST.index(job.stage))
        return chosen, pending.pop(chosen)

    with shared_gpu() if cluster.is_local else nullcontext(), workers_of(cluster, len(tasks), say) as workers:
        train = partial(_train, allowed_plugins())
        for job, result in workers.work(train, next_task, spoils=lambda outcome: outcome.failure is not None):
            outcome = Outcome(job, 0.0, LOST) if isinstance(result, WorkersDied) else result
            settled[job] = outcome.failure is None
            yield outcome
            for hopeless in [other for other in pending if other.start == job and outcome.failure is not None]:
                del pending[hopeless]
                yield _not_started(hopeless)


def _train(plugins: list[str], task: Task) -> Outcome:
    """Run a task in a worker. The worker that had it before may only have been cut off, and still be at it."""
    from its2clr.engine.workers import LOCK, locked

    allow_plugins(plugins)
    with locked(task.folder / LOCK):
        return run_task(task)


def _not_started(job: Job) -> Outcome:
    return Outcome(job, 0.0, "the pretraining it starts from failed")
