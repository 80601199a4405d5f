"""The numbers of an experiment, from the results of its runs: mean and spread over seeds, or why there is none."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from its2clr.aggregators.trained import TrainedAggregators
from its2clr.errors import InputError
from its2clr.experiments.metrics import SWEPT, Value, read_metric
from its2clr.experiments.plan import Job, Planner
from its2clr.experiments.spec import Cell, Experiment
from its2clr.files import read_json, read_metrics
from its2clr.run.names import START
from its2clr.run.results_file import training_seconds


@dataclass(frozen=True)
class Found:
    """What was found for a cell.

    Attributes:
        mean: Mean over seeds; None if there is no number.
        spread: Standard deviation over seeds, or with one seed over retrainings; None if there is one of each.
        over: What the spread is over: "seeds" or "retrainings".
        values: The number of each seed that has one.
        reason: Why there is no number, or why seeds are missing.
    """

    mean: float | None = None
    spread: float | None = None
    over: str | None = None
    values: Mapping[int, float] = field(default_factory=dict)
    reason: str | None = None


@dataclass(frozen=True)
class Point:
    """One point of a curve: mean and deviation over seeds, None with one seed."""

    x: float
    mean: float
    spread: float | None


@dataclass
class Collector:
    """Reads the numbers of cells.

    Attributes:
        planner: Knows the job of a cell.
        seeds: How many training seeds there are.
        failures: Why jobs failed.
    """

    planner: Planner
    seeds: int
    failures: Mapping[Job, str]

    def cell(self, cell: Cell, scale: float) -> Found:
        """The number of a cell, times `scale`."""
        if cell.missing is not None:
            return Found(reason=cell.missing)
        if cell.setting is not None:
            setting = float(self.planner.setting(cell))
            return Found(setting, values={0: setting})
        assert cell.metric is not None
        values: dict[int, Value] = {}
        reasons: dict[str, list[str]] = {}
        for seed in range(self.seeds):
            try:
                job = self.planner.job(cell, seed)
            except InputError as error:
                return Found(reason=str(error))
            value = self._read(job, cell)
            if isinstance(value, Value):
                values[seed] = value
            else:
                reasons.setdefault(value, []).append(str(seed))
        listed = "; ".join(f"seed {', '.join(seeds)}: {reason}" for reason, seeds in reasons.items())
        return _summary(values, scale, listed or None)

    def _read(self, job: Job, cell: Cell) -> Value | str:
        assert cell.metric is not None
        results = self.results(job)
        if results is None:
            return self.failures.get(job, "not run")
        start = self.planner.folder(job.start) if job.start is not None else None
        seconds = 0.0 if start is None else training_seconds(read_metrics(start)).get("pretrain", 0.0)
        other = self.planner.other(job, cell.aggregator)
        return read_metric(results, job.stage, cell.metric, other, cell.round, seconds)

    def sweep(self, spec: Experiment) -> dict[tuple[str, str], dict[str, Found]]:
        """What was measured at every value of a sweep, see `SWEPT`."""
        return {
            place: {metric: self.cell(cell.with_(Cell(metric=metric)), spec.scale) for metric in SWEPT}
            for place, cell in spec.cells().items()
        }

    def rounds(self, cell: Cell, field_: str) -> list[Point]:
        """A field of every round, by the round's epoch."""
        found = [self.results(job) for job in self.finished(cell)]
        curves = [{entry["epoch"]: entry.get(field_) for entry in one.get("rounds", [])} for one in found if one]
        return _points(curves)

    def training(self, cell: Cell, field_: str) -> list[Point]:
        """`train_loss`, `validation_loss` or `validation_auc` of an aggregator or end-to-end training, by bags seen."""
        read = {"end_to_end": _end_to_end, "aggregate": _aggregator}
        return _points([read[job.stage](self.planner.folder(job), field_) for job in self.finished(cell)])

    def finished(self, cell: Cell) -> list[Job]:
        """The jobs of a cell that have a result, seed by seed; none if no cohort was given for the cell."""
        try:
            jobs = [self.planner.job(cell, seed) for seed in range(self.seeds)]
        except InputError:
            return []
        return [job for job in jobs if self.results(job) is not None]

    def results(self, job: Job) -> dict[str, Any] | None:
        """Results of a job's run; None if it failed or was not run."""
        path = self.planner.folder(job) / "results.json"
        if job in self.failures or not path.is_file():
            return None
        results: dict[str, Any] = read_json(path)
        return results


def _summary(values: Mapping[int, Value], scale: float, reason: str | None) -> Found:
    if not values:
        return Found(reason=reason)
    means = {seed: value.mean * scale for seed, value in values.items()}
    spread, over = None, None
    if len(means) > 1:
        spread, over = float(np.std(list(means.values()), ddof=1)), "seeds"
    elif (std := next(iter(values.values())).std) is not None:
        spread, over = std * scale, "retrainings"
    return Found(float(np.mean(list(means.values()))), spread, over, means, reason)


def _points(curves: list[dict[float, float | None]]) -> list[Point]:
    points = []
    for x in sorted({x for curve in curves for x in curve}):
        values = [value for curve in curves if (value := curve.get(x)) is not None]
        if values:
            points.append(Point(x, float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None))
    return points


def _end_to_end(folder: Path, field_: str) -> dict[float, float | None]:
    name = "loss" if field_ == "train_loss" else field_
    return {entry["bags_seen"]: entry[name] for entry in read_metrics(folder) if entry["stage"] == "end_to_end"}


def _aggregator(folder: Path, field_: str) -> dict[float, float | None]:
    """Mean over retrainings of the aggregator on SimCLR features."""
    bags = read_json(folder / "results.json")["cohort"]["splits"]["train"]["bags"]
    history = TrainedAggregators.load(folder / "aggregators" / f"{START}.safetensors").history
    return {record["epoch"] * bags: float(np.mean(record[field_])) for record in history}  # type: ignore[literal-required]
