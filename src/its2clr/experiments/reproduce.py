"""`its2clr reproduce`: run what some tables and figures need, once, and write them beside the paper's."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from its2clr import __version__
from its2clr.cohort import Cohort
from its2clr.cohort.resample import resample_cohort
from its2clr.engine.files import atomic_path, write_text
from its2clr.errors import InputError
from its2clr.experiments.collect import Collector
from its2clr.experiments.execute import Outcome, Task, execute
from its2clr.experiments.pages import write_section
from its2clr.experiments.plan import Job, Needs, Planner
from its2clr.experiments.spec import Resampling, read_budget, select

Say = Callable[[str], None]


def reproduce(
    names: list[str],
    cohorts: Mapping[str, Path],
    out: Path,
    *,
    budget: str = "quick",
    seeds: int | None = None,
    workers: int = 1,
    recipe: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    train: bool = True,
    say: Say = print,
) -> Path:
    """Make tables and figures of the paper on the user's cohort.

    Args:
        names: Labels, or "all".
        cohorts: Folder of the cohort for each dataset of the paper; "" is for all that are not named.
        out: Folder for runs, tables and the page; what is there is not done again.
        budget: "smoke", "quick" or "paper".
        seeds: Training seeds; None: the budget's.
        workers: Processes that train side by side, shared out over the GPUs.
        recipe: Recipe to use instead of the budget's settings.
        overrides: Settings for every run.
        train: Whether to train what is not there; otherwise tables are made from the runs that are finished.
        say: Takes a line of progress.

    Returns:
        The page `out/results.md`.

    Raises:
        InputError: A label is unknown, or the cohort does not fit.
    """
    specs = select(names)
    plan_of = read_budget(budget)
    seeds = seeds or plan_of.seeds
    opened = {name: Cohort.open(path) for name, path in cohorts.items()}
    planner = Planner(plan_of, {name: cohort.path for name, cohort in opened.items()}, recipe, overrides or {})
    jobs = planner.plan([cell for spec in specs for cell in spec.cells().values()], seeds)
    labelled = {str(cohort.path): cohort.has_instance_labels for cohort in opened.values()}
    hopeless = {
        job: "needs instance labels, this cohort has none"
        for job in jobs
        if not labelled[job.cohort] and needs_truth(job)
    }
    failures = dict(hopeless)
    if train:
        tasks = _tasks({job: needs for job, needs in jobs.items() if job not in hopeless}, planner, out, say)
        _write_index(out, tasks)
        say(f"{len(specs)} tables and figures, {len(tasks)} runs, {seeds} seed(s), {workers} worker(s)")
        failures |= execute(tasks, workers, partial(_report, say))
        _write_problems(out, failures)
    collector = Collector(planner, out, seeds, failures)
    settings = {"budget": budget, "seeds": seeds, "its2clr": __version__, "cohorts": _cohort_names(opened)}
    sections = [write_section(spec, collector, _any(opened), settings) for spec in specs]
    page = out / "results.md"
    write_text(page, "\n".join([_introduction(settings, plan_of.about, opened, failures), *sections]))
    return page


def _report(say: Say, outcome: Outcome, done: int, total: int) -> None:
    ending = f"FAILED: {outcome.failure}" if outcome.failure else f"{outcome.seconds:.0f} s"
    say(f"[{done}/{total}] {outcome.job.describe()}, seed {outcome.job.seed}: {ending}")


def needs_truth(job: Job) -> bool:
    """Whether a job cannot be run without instance labels."""
    return job.resampling != Resampling() or job.settings.get("refine.labels") == "ground_truth"


def _tasks(jobs: Mapping[Job, Needs], planner: Planner, out: Path, say: Say) -> dict[Job, Task]:
    tasks = {}
    for job, needs in jobs.items():
        tasks[job] = Task(
            job,
            job.folder(out),
            _cohort_of(job, planner, out, say),
            planner.recipe,
            planner.overrides(job, out),
            tuple(sorted(needs.aggregators, key=lambda name: name or "")),
            needs.features,
        )
    return tasks


def _cohort_of(job: Job, planner: Planner, out: Path, say: Say) -> Path:
    """The cohort of a job, resampled when the job wants that and it is not there yet."""
    original = Path(job.cohort)
    if job.resampling == Resampling():
        return original
    folder = out / "cohorts" / f"{original.name}-{job.resampling.name}"
    if not (folder / "bags.csv").is_file():
        summary = resample_cohort(
            Cohort.open(original),
            folder,
            keep_negatives=job.resampling.keep_negatives,
            keep_positives=job.resampling.keep_positives,
            negative_bags=True,
            sub_bag_size=planner.budget.sub_bag_size if job.resampling.sub_bags else None,
        )
        say(
            f"{folder.name}: {summary.bags} bags, {summary.instances} instances, witness rate "
            f"{summary.witness_rate_before:.3f} -> {summary.witness_rate_after:.3f}"
        )
    return folder


def _any(cohorts: Mapping[str, Cohort]) -> Cohort:
    return cohorts.get("", next(iter(cohorts.values())))


def _cohort_names(cohorts: Mapping[str, Cohort]) -> dict[str, str]:
    return {name or "all": cohort.name for name, cohort in cohorts.items()}


def _introduction(
    settings: Mapping[str, Any], about: str, cohorts: Mapping[str, Cohort], failures: Mapping[Job, str]
) -> str:
    lines = [
        "# The paper's tables and figures",
        "",
        f"Made by its2clr {__version__}, budget {about}, {settings['seeds']} training seed(s).",
        "Ours in bold: mean and standard deviation over seeds (with one seed, over retrained aggregators); below it",
        "the paper's number, which is of other data. Models are selected on validation bags; all numbers are of test",
        "bags unless said otherwise.",
        "",
    ]
    for name, cohort in cohorts.items():
        splits = cohort.bags.groupby("split")["label"].agg(["size", "sum"])
        counts = ", ".join(f"{split} {row['size']} ({row['sum']} positive)" for split, row in splits.iterrows())
        where = f" for {name}" if name else ""
        lines.append(f"Cohort{where}: {cohort.name}, {cohort.n_instances} instances; bags: {counts}.\n")
    if failures:
        lines.append(f"{len(failures)} run(s) have no result; `problems.csv` says why.\n")
    return "\n".join(lines)


def _write_index(out: Path, tasks: Mapping[Job, Task]) -> None:
    rows = [{"folder": str(task.folder.relative_to(out)), **_described(job)} for job, task in tasks.items()]
    with atomic_path(out / "runs.csv") as temporary:
        pd.DataFrame(rows).to_csv(temporary, index=False)


def _write_problems(out: Path, failures: Mapping[Job, str]) -> None:
    rows = [{**_described(job), "problem": reason} for job, reason in failures.items()]
    with atomic_path(out / "problems.csv") as temporary:
        pd.DataFrame(rows, columns=["stage", "cohort", "resampling", "values", "seed", "problem"]).to_csv(
            temporary, index=False
        )


def _described(job: Job) -> dict[str, Any]:
    return asdict(job) | {"resampling": job.resampling.name, "values": " ".join(f"{k}={v}" for k, v in job.values)}


def default_workers() -> int:
    """Two on a machine without a GPU and with several cores, else one per GPU."""
    import torch

    return torch.cuda.device_count() or min(2, os.cpu_count() or 1)


def parse_cohorts(texts: Sequence[str]) -> dict[str, Path]:
    """`PATH` for all datasets, `DATASET=PATH` for one.

    Raises:
        InputError: One is given twice.
    """
    cohorts: dict[str, Path] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        key, value = (name, path) if equals and not Path(text).exists() else ("", text)
        if key in cohorts:
            raise InputError(f"--cohort: two cohorts for {key or 'all datasets'}: {cohorts[key]} and {value}")
        cohorts[key] = Path(value)
    return cohorts


def embedded_cohort(budget: str, out: Path) -> Path:
    """The embedded cohort that fits a budget, drawn when it is not there.

    Raises:
        InputError: The budget has none.
    """
    from its2clr.cohort.synthetic import make_synthetic

    settings = read_budget(budget).embedded
    if settings is None:
        raise InputError(f"the budget {budget!r} needs a cohort of yours: --cohort PATH")
    folder = out / "cohort"
    make_synthetic(folder, **settings)
    return folder
