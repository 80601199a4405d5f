"""From cells to jobs: which runs an experiment needs, each once, and where they are kept."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from its2clr.cohort import Cohort
from its2clr.cohort.layout import BAGS_FILE
from its2clr.config import RunConfig
from its2clr.errors import InputError
from its2clr.experiments.metrics import OF_FEATURES
from its2clr.experiments.spec import (
    BASE_DATASET,
    OF_A_DATASET,
    Budget,
    Cell,
    Resampling,
    Stage,
    dataset_settings,
    datasets,
    methods,
    starts,
)
from its2clr.settings import flatten, read_recipe, resolve_config, settings_by_key
from its2clr.wording import did_you_mean

_NOT_LOOKED_AT: dict[Stage, tuple[str, ...]] = {
    "pretrain": ("aggregator", "refine", "end_to_end", "evaluation"),
    "aggregate": ("refine", "end_to_end"),
    "refine": ("end_to_end",),
    "end_to_end": ("refine",),
}
"""Sections of the settings that a stage does not look at: runs that differ only there are the same run.

A pretraining looks at the aggregator if it is checked with it."""
_OF_THE_START = ("encoder", "projector", "pretrain")
"""Sections that make a start what it is."""


@dataclass(frozen=True)
class Job:
    """One training, for one seed: a run directory.

    Attributes:
        stage: What is trained.
        cohort: Folder of the cohort given by the user.
        resampling: How it is changed first.
        values: Settings beyond those of every run, as sorted pairs of key and JSON.
        seed: Training seed.
        checked: Whether its pretraining is checked with the run's aggregator, so that the start depends on that too.
    """

    stage: Stage
    cohort: str
    resampling: Resampling
    values: tuple[tuple[str, str], ...]
    seed: int
    checked: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """Settings beyond those of every run, by dotted key."""
        return {key: json.loads(value) for key, value in self.values}

    @property
    def start(self) -> "Job | None":
        """The pretraining this job starts from; None when it is one itself, or starts from scratch."""
        if self.stage == "pretrain" or self.settings.get("end_to_end.start") == "scratch":
            return None
        sections = (*_OF_THE_START, "aggregator") if self.checked else _OF_THE_START
        values = tuple(pair for pair in self.values if pair[0].split(".")[0] in sections)
        return Job("pretrain", self.cohort, Resampling(), values, self.seed, self.checked)

    @property
    def unused(self) -> tuple[str, ...]:
        """Sections of the settings that it does not look at."""
        return tuple(name for name in _NOT_LOOKED_AT[self.stage] if not (self.checked and name == "aggregator"))

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
    """Knows the job of a cell, the settings of a job, and where its run is.

    A run is named after everything it is made of: its cohort, all settings that its stage looks at, and its start. So
    runs with other settings or on other cohorts can be kept in the same folder.

    Args:
        budget: How much is trained.
        cohorts: Folder of the cohort of each dataset; "" is for all others.
        recipe: Replaces the budget's settings.
        overrides: Settings that hold for every run.
        out: Folder of the runs.
    """

    def __init__(
        self,
        budget: Budget,
        cohorts: Mapping[str, Path],
        recipe: str | None,
        overrides: Mapping[str, Any],
        out: Path = Path(),
    ) -> None:
        unknown = set(cohorts) - {"", *datasets()}
        if unknown:
            name = min(unknown)
            raise InputError(f"--cohort: no dataset named {name!r}{did_you_mean(name, datasets(), else_list=True)}")
        if "seed" in overrides:
            raise InputError("--set seed: seeds are 0, 1, ...; --seeds says how many")
        self.budget, self.cohorts, self.out = budget, cohorts, out
        self._recipe = recipe or budget.recipe
        self._starts = budget.starts if recipe is None else {}
        self._whole_recipes = budget.whole_recipes and recipe is None
        self._values = {**(budget.values if recipe is None else {}), **overrides}
        self._of_user = set(flatten(overrides))
        self._of_recipe = set() if recipe is None else set(flatten(read_recipe(recipe)))
        self.base = resolve_config(self._recipe, self._values)
        self.name = cache(self._name)
        """Name of a job's folder: the same for the same training, whatever asked for it."""
        self._identity = cache(self._read_identity)

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
        # What the user sets beats the settings of any dataset; a recipe beats those of the base dataset only.
        chosen = self._of_user | (self._of_recipe if cell.dataset == BASE_DATASET else set())
        chosen |= {"aggregator.options"} if "aggregator.name" in chosen else set()
        of_dataset = {key: value for key, value in self._of_dataset(cell.dataset).items() if key not in chosen}
        values = {**of_dataset, **self._start(cell.start), **method.values, **cell.values}
        if values.get("aggregator.name", self.base.aggregator.name) != self.base.aggregator.name:
            values.setdefault("aggregator.options", {})
        kept = {
            key: value
            for key, value in values.items()
            if key.split(".")[0] not in _NOT_LOOKED_AT[method.stage] and value != _setting(self.base, key)
        }
        pairs = tuple(sorted((key, json.dumps(value)) for key, value in kept.items()))
        checked = values.get("pretrain.check_every", self.base.pretrain.check_every) > 0
        return Job(method.stage, str(cohort), cell.cohort, pairs, seed, checked)

    def _of_dataset(self, name: str) -> dict[str, Any]:
        """What a column that is this dataset sets."""
        settings = dataset_settings(name)
        return settings if self._whole_recipes else {key: settings[key] for key in OF_A_DATASET}

    def _start(self, name: str | None) -> dict[str, Any]:
        """Settings of a start: the user may change how it is trained, but not what makes it that start."""
        if name is None:
            return {}
        of_budget = {key: value for key, value in self._starts.get(name, {}).items() if key not in self._of_user}
        return {**starts()[name], **of_budget}

    def config(self, job: Job) -> RunConfig:
        """All settings of a job's run; sections that its stage does not look at have their defaults."""
        resolved = resolve_config(self._recipe, {**self._values, **job.settings, "seed": job.seed})
        default = RunConfig()
        unused = {section: getattr(default, section) for section in job.unused}
        if job.stage != "pretrain":
            start = None if job.start is None else str(self.folder(job.start).absolute())
            unused["pretrain"] = default.pretrain.model_copy(update={"start": start})
        return resolved.model_copy(update=unused)

    def settings(self, cell: Cell) -> dict[str, Any]:
        """Every setting that a cell's training and the pretraining of its start look at, by dotted key."""
        job = self.job(cell, 0)
        config, unused = self.config(job), {*job.unused, "adapter", "engine", "plugins", "seed"}
        if job.start is None:
            unused.add("pretrain")
        else:
            config = config.model_copy(update={"pretrain": self.config(job.start).pretrain})
        found = settings_by_key(config).items()
        other = () if config.pretrain.method == "dino" else ("pretrain.dino.",)
        return {key: value for key, value in found if key.split(".")[0] not in unused and not key.startswith(other)}

    def setting(self, cell: Cell) -> Any:
        """The value of a cell's setting in the run that the cell describes."""
        assert cell.setting is not None
        return _setting(self.config(self.job(cell, 0)), cell.setting)

    def _name(self, job: Job) -> str:
        config = self.config(job).model_dump(mode="json")
        del config["seed"]
        config["engine"] = {key: config["engine"][key] for key in ("precision", "record_steps")}
        if job.start is not None:
            config["pretrain"] = self.name(job.start)
        sub_bag_size = self.budget.sub_bag_size if job.resampling.sub_bags else None
        described = [config, job.resampling.model_dump(), sub_bag_size, *self._identity(job.cohort)]
        return "-".join(filter(None, [job.stage, job.resampling.name, _digest(described)]))

    def folder(self, job: Job) -> Path:
        """A job's run directory."""
        return self.out / "runs" / self.name(job) / f"seed-{job.seed}"

    def resampled(self, job: Job) -> Path:
        """Folder of a job's cohort: the user's, or where the resampled one belongs."""
        if job.resampling == Resampling():
            return Path(job.cohort)
        described = [job.resampling.model_dump(), self.budget.sub_bag_size, *self._identity(job.cohort)]
        return self.out / "cohorts" / f"{Path(job.cohort).name}-{job.resampling.name}-{_digest(described)}"

    def plan(self, cells: Iterable[Cell], seeds: int) -> dict[Job, Needs]:
        """Every job of some cells with what is needed of it, starts first; cells without a job are skipped."""
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
                    needs.features |= cell.metric in OF_FEATURES
        starts = {job.start: Needs() for job in jobs if job.start is not None}
        everything = {**{start: needs for start, needs in starts.items() if start is not None}, **jobs}
        return dict(sorted(everything.items(), key=lambda item: _order(item[0])))

    def other(self, job: Job, aggregator: str | None) -> str | None:
        """An aggregator's name where it is not the job's own, else None."""
        own = job.settings.get("aggregator.name", self.base.aggregator.name)
        return None if aggregator == own else aggregator

    def _read_identity(self, cohort: str) -> tuple[str, str]:
        """Where a cohort is, and what it is; of one that is not there, only where."""
        folder = Path(cohort)
        return str(folder.resolve()), Cohort.open(folder).identity().digest if (folder / BAGS_FILE).is_file() else ""


def parse_cohorts(texts: Sequence[str]) -> dict[str, Path]:
    """Folders of cohorts by dataset, from `PATH` (for all datasets) and `DATASET=PATH` (for one).

    Raises:
        InputError: A dataset has two.
    """
    cohorts: dict[str, Path] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        key, value = (name, path) if equals and not Path(text).exists() else ("", text)
        if key in cohorts:
            raise InputError(f"--cohort: two cohorts for {key or 'all datasets'}: {cohorts[key]} and {value}")
        cohorts[key] = Path(value)
    return cohorts


def _order(job: Job) -> tuple[Any, ...]:
    """Starts first, then by seed and cohort, so that a worker's decoded tiles serve many jobs."""
    return (job.start is not None, job.seed, job.cohort, job.resampling.name, job.stage, job.values)


def _setting(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _digest(described: Any) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:8]
