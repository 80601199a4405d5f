"""From cells to jobs: which runs an experiment needs, each once, and where they are kept."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from its2clr.config import RunConfig, resolve_config
from its2clr.errors import InputError
from its2clr.experiments.metrics import of_features
from its2clr.experiments.spec import Budget, Cell, Resampling, Stage, datasets, methods

_SECTIONS_OF_STAGE: dict[Stage, tuple[str, ...]] = {
    "pretrain": ("refine", "end_to_end"),
    "refine": ("end_to_end",),
    "end_to_end": ("refine",),
}
"""Sections of the settings that a stage does not look at: runs that differ there only are the same run."""


@dataclass(frozen=True)
class Job:
    """One training, for one seed: a run directory.

    Attributes:
        stage: What is trained from the SimCLR start.
        cohort: Folder of the cohort given by the user.
        resampling: How it is changed first.
        values: Settings beyond the budget's, as sorted pairs of key and JSON.
        seed: Training seed.
    """

    stage: Stage
    cohort: str
    resampling: Resampling
    values: tuple[tuple[str, str], ...]
    seed: int

    @property
    def settings(self) -> dict[str, Any]:
        """Settings beyond the budget's, by dotted key."""
        return {key: json.loads(value) for key, value in self.values}

    @property
    def start(self) -> "Job | None":
        """The pretraining this job starts from; None when it is that itself, or starts from scratch."""
        if self.settings.get("end_to_end.start") == "scratch":
            return None
        start = Job("pretrain", self.cohort, Resampling(), (), self.seed)
        return None if start == self else start

    @property
    def name(self) -> str:
        """Name of its folder, the same for the same training."""
        described = json.dumps([self.cohort, self.resampling.model_dump(), self.values])
        digest = hashlib.sha256(described.encode()).hexdigest()[:8]
        return "-".join(filter(None, [self.stage, self.resampling.name, digest]))

    def folder(self, out: Path) -> Path:
        """Its run directory."""
        return out / "runs" / self.name / f"seed-{self.seed}"

    def describe(self) -> str:
        """In words, for progress and for the index of runs."""
        changes = ", ".join(f"{key}={value}" for key, value in self.values)
        return " ".join(filter(None, [self.stage, self.resampling.name, f"({changes})" if changes else ""]))


@dataclass
class Needs:
    """What is measured of a job's encoder.

    Attributes:
        aggregators: Trained on its frozen features; None is the run's own.
        features: Whether class separation and linear probe are wanted.
    """

    aggregators: set[str | None] = field(default_factory=set)
    features: bool = False


class Planner:
    """Gives the job of a cell.

    Args:
        budget: How much is trained.
        cohorts: Folder of the cohort of each dataset; "" is for all others.
        recipe: Replaces the budget's settings.
        overrides: Settings that hold for every run.
    """

    def __init__(
        self, budget: Budget, cohorts: Mapping[str, Path], recipe: str | None, overrides: Mapping[str, Any]
    ) -> None:
        self.budget, self.cohorts = budget, cohorts
        self.recipe = recipe or budget.recipe
        self.values = {**(budget.values if recipe is None else {}), **overrides}
        self._chosen = set(overrides)
        self.base = resolve_config(self.recipe, self.values)
        unknown = set(cohorts) - {"", *datasets()}
        if unknown:
            raise InputError(f"--cohort: no dataset named {unknown.pop()!r}; there are {', '.join(datasets())}")

    def job(self, cell: Cell, seed: int) -> Job:
        """The training a cell is measured on.

        Raises:
            InputError: No cohort was given for the cell's dataset.
        """
        assert cell.method is not None
        method = methods()[cell.method]
        cohort = self.cohorts.get(cell.dataset, self.cohorts.get(""))
        if cohort is None:
            raise InputError(f"no cohort given for {cell.dataset}")
        of_dataset = {key: value for key, value in datasets()[cell.dataset].items() if key not in self._chosen}
        values = {**of_dataset, **method.values, **cell.values}
        if values.get("aggregator.name", self.base.aggregator.name) != self.base.aggregator.name:
            values["aggregator.options"] = {}
        kept = {
            key: value
            for key, value in values.items()
            if key.split(".")[0] not in _SECTIONS_OF_STAGE[method.stage] and value != _setting(self.base, key)
        }
        pairs = tuple(sorted((key, json.dumps(value)) for key, value in kept.items()))
        return Job(method.stage, str(cohort), cell.cohort, pairs, seed)

    def setting(self, cell: Cell) -> Any:
        """The value of a cell's setting in the run it would be."""
        assert cell.setting is not None
        values = {**self.values, **self.job(cell, 0).settings}
        return _setting(resolve_config(self.recipe, values), cell.setting)

    def plan(self, cells: Iterable[Cell], seeds: int) -> dict[Job, Needs]:
        """Every job of some cells with what is needed of it, starts first; cells without a job are passed over."""
        jobs: dict[Job, Needs] = {}
        for cell in cells:
            for seed in range(seeds):
                try:
                    job = self.job(cell, seed) if cell.method and not (cell.missing or cell.setting) else None
                except InputError:
                    continue
                if job is not None:
                    needs = jobs.setdefault(job, Needs())
                    needs.aggregators.add(self.other(job, cell.aggregator))
                    needs.features |= of_features(cell.metric)
        starts = {job.start: Needs({None}) for job in jobs if job.start is not None and job.start not in jobs}
        everything = {**{start: needs for start, needs in starts.items() if start is not None}, **jobs}
        return dict(sorted(everything.items(), key=lambda item: _order(item[0])))

    def other(self, job: Job, aggregator: str | None) -> str | None:
        """An aggregator's name where it is not the job's own, else None."""
        own = job.settings.get("aggregator.name", self.base.aggregator.name)
        return None if aggregator == own else aggregator

    def overrides(self, job: Job, out: Path) -> dict[str, Any]:
        """All settings of a job's run, beyond the recipe."""
        start = {} if job.start is None else {"pretrain.start": str(job.start.folder(out).absolute())}
        return {**self.values, **job.settings, "seed": job.seed, **start}


def _order(job: Job) -> tuple[Any, ...]:
    """Starts first, then cohort by cohort, so that a worker's decoded tiles serve many jobs."""
    return (job.start is not None, job.cohort, job.resampling.name, job.seed, job.name)


def _setting(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
