"""Runs jobs: starts before what starts from them, several at a time when asked; a failed one does not stop the rest."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from its2clr.errors import Its2clrError
from its2clr.experiments.metrics import ENCODER_OF_STAGE
from its2clr.experiments.plan import Job

if TYPE_CHECKING:
    from its2clr.engine.devices import Engine


@dataclass(frozen=True)
class Task:
    """A job with all that a worker needs to run it."""

    job: Job
    folder: Path
    cohort: Path
    recipe: str
    overrides: Mapping[str, Any]
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
    for done, outcome in enumerate(_outcomes(tasks, workers), start=1):
        if outcome.failure is not None:
            failures[outcome.job] = outcome.failure
        report(outcome, done, len(tasks))
    return failures


def _outcomes(tasks: Mapping[Job, Task], workers: int) -> Iterator[Outcome]:
    if workers == 1:
        failed: set[Job | None] = set()
        for job, task in tasks.items():
            outcome = _not_started(job) if job.start in failed else run_task(task)
            failed |= {job} if outcome.failure else set()
            yield outcome
        return
    context = multiprocessing.get_context("spawn")
    devices = context.SimpleQueue()
    for number in range(workers):
        devices.put(number)
    with ProcessPoolExecutor(workers, context, _prepare_worker, (devices, workers)) as pool:
        waiting = {job for job in tasks if job.start is not None}
        running: dict[Future[Outcome], Job] = {
            pool.submit(run_task, t): job for job, t in tasks.items() if not job.start
        }
        try:
            while running:
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    del running[future]
                    outcome = future.result()
                    yield outcome
                    ready = [job for job in tasks if job in waiting and job.start == outcome.job]
                    waiting -= set(ready)
                    if outcome.failure is None:
                        running |= {pool.submit(run_task, tasks[job]): job for job in ready}
                    else:
                        yield from (_not_started(job) for job in ready)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_task(task: Task) -> Outcome:
    """Train and measure one job; the same again goes on where it stopped, or only reads."""
    from its2clr.evaluation.frozen import evaluate
    from its2clr.pipeline import open_run

    started = time.monotonic()
    try:
        stages = open_run(
            task.folder,
            task.cohort,
            task.recipe,
            task.overrides,
            quiet=True,
            engine=_engine(str(task.overrides.get("engine.accelerator", "auto"))),
            write_features=False,
        )
        getattr(stages, task.job.stage)()
        for aggregator in task.aggregators:
            stages.aggregate(ENCODER_OF_STAGE[task.job.stage], aggregator)
        evaluate(stages, of_features=task.of_features)
    except (Its2clrError, OSError, MemoryError, RuntimeError) as error:
        return Outcome(task.job, time.monotonic() - started, f"{type(error).__name__}: {error}")
    return Outcome(task.job, time.monotonic() - started)


@cache
def _engine(accelerator: str) -> "Engine":
    """One engine per process: its decoded tiles serve all runs on a cohort."""
    from its2clr.config import EngineConfig
    from its2clr.engine.devices import Engine

    engine = Engine(EngineConfig.model_validate({"accelerator": accelerator}))
    engine.memory = {}
    return engine


def _prepare_worker(devices: Any, workers: int) -> None:
    """Give a worker its share of the cores, and one of the GPUs."""
    number: int = devices.get()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    import torch

    gpus = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def _not_started(job: Job) -> Outcome:
    return Outcome(job, 0.0, "the pretraining it starts from failed")
