"""`its2clr reproduce`: run what some tables and figures need, and write them beside the paper's numbers."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from its2clr.cluster.place import Cluster, can_spread
from its2clr.cohort import Cohort
from its2clr.cohort.resample import resample_cohort
from its2clr.errors import InputError
from its2clr.experiments.collect import Collector
from its2clr.experiments.execute import Outcome, Task, execute
from its2clr.experiments.pages import write_section
from its2clr.experiments.plan import Job, Needs, Planner
from its2clr.experiments.spec import Resampling, read_budget, select
from its2clr.files import atomic_path, write_text
from its2clr.plugins import check_allowed
from its2clr.version import __version__

Say = Callable[[str], None]
PAGE_EVERY_SECONDS = 60.0
"""How often the page is written while runs are under way, at most."""


def reproduce(
    names: list[str],
    cohorts: Mapping[str, Path],
    out: Path,
    *,
    budget: str = "quick",
    seeds: int | None = None,
    cluster: Cluster = Cluster(),  # noqa: B008 (it cannot change)
    recipe: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    train: bool = True,
    say: Say = print,
) -> tuple[Path, int]:
    """Make tables and figures of the paper on the user's cohort.

    Args:
        names: Labels, or "all".
        cohorts: Folder of the cohort for each dataset of the paper; "" is for all that are not named.
        out: Folder for runs, tables and the page; finished runs are not trained again.
        budget: "smoke", "quick" or "paper".
        seeds: Training seeds; None: the budget's.
        cluster: Where runs are trained; on this machine with one worker, in this process.
        recipe: Recipe to use instead of the budget's settings.
        overrides: Settings for every run.
        train: Whether to train runs that are not finished; otherwise tables are made from those that are.
        say: Takes a line of progress.

    Returns:
        The page: `out/results.md`, or the one table's or figure's own; and how many runs failed.

    Raises:
        InputError: A label or dataset is unknown, or a cohort cannot be read.
    """
    specs = select(names)
    plan_of = read_budget(budget)
    seeds = seeds or plan_of.seeds
    opened = {name: Cohort.open(path) for name, path in cohorts.items()}
    planner = Planner(plan_of, {name: cohort.path for name, cohort in opened.items()}, recipe, overrides or {}, out)
    jobs = planner.plan([cell for spec in specs for cell in spec.cells().values()], seeds)
    labelled = {str(cohort.path): cohort.has_instance_labels for cohort in opened.values()}
    failures = {
        job: "needs instance labels, this cohort has none"
        for job in jobs
        if not labelled[job.cohort] and needs_truth(job)
    }
    made_with = {
        "its2clr": __version__,
        "budget": budget if recipe is None else None,
        "recipe": recipe,
        "overrides": dict(overrides or {}),
        "seeds": seeds,
        "cohorts": {name or "all": cohort.name for name, cohort in opened.items()},
    }
    page = out / specs[0].folder / "README.md" if len(specs) == 1 else out / "results.md"

    def write_page(to_come: int = 0) -> None:
        collector = Collector(planner, seeds, failures)
        sections = [write_section(spec, collector, made_with) for spec in specs]
        if len(specs) > 1:
            about = plan_of.about if recipe is None else f"recipe {recipe}"
            introduction = _introduction(made_with, about, opened, failures, to_come)
            write_text(page, "\n".join([introduction, *sections]))

    failed = 0
    if train:
        tasks = {job: _task(job, needs, planner, say) for job, needs in jobs.items() if job not in failures}
        where = f"{cluster.workers or 1} worker(s)" if cluster.is_local else f"on {cluster.where}"
        say(f"{len(specs)} tables and figures, {len(tasks)} runs, {seeds} seed(s), {where}")
        write_page_sometimes = _Sometimes(write_page)

        def report(outcome: Outcome, done: int, total: int) -> None:
            _report(say, outcome, done, total)
            if outcome.failure is not None:
                failures[outcome.job] = outcome.failure
            if done < total:
                write_page_sometimes(total - done)

        failed = len(execute(tasks, cluster, report, say))
        _note_runs(out, planner, tasks, failures)
    write_page()
    return page, failed


class _Sometimes:
    """Calls a function, unless its last call was shortly ago; it takes a small share of the time.

    Args:
        function: The function.
    """

    def __init__(self, function: Callable[[int], None]) -> None:
        self._function, self._next = function, time.monotonic() + PAGE_EVERY_SECONDS

    def __call__(self, number: int) -> None:
        began = time.monotonic()
        if began >= self._next:
            self._function(number)
            ended = time.monotonic()
            self._next = ended + max(PAGE_EVERY_SECONDS, 20 * (ended - began))


def _report(say: Say, outcome: Outcome, done: int, total: int) -> None:
    ending = f"FAILED: {outcome.failure}" if outcome.failure else f"{outcome.seconds:.0f} s"
    say(f"[{done}/{total}] {outcome.job.describe()}, seed {outcome.job.seed}: {ending}")


def needs_truth(job: Job) -> bool:
    """Whether a job needs instance labels."""
    return job.resampling != Resampling() or job.settings.get("refine.labels") == "ground_truth"


def _task(job: Job, needs: Needs, planner: Planner, say: Say) -> Task:
    config = planner.config(job)
    check_allowed(config.plugins)
    if config.engine.tile_folder != planner.base.engine.tile_folder:
        raise InputError(f"{job.describe()}: engine.tile_folder is given after --set, not by a table's file")
    cohort = planner.resampled(job)
    if not (cohort / "bags.csv").is_file():
        summary = resample_cohort(
            Cohort.open(job.cohort),
            cohort,
            keep_negatives=job.resampling.keep_negatives,
            keep_positives=job.resampling.keep_positives,
            negative_bags=True,
            sub_bag_size=planner.budget.sub_bag_size if job.resampling.sub_bags else None,
        )
        say(
            f"{cohort.name}: {summary.bags} bags, {summary.instances} instances, witness rate "
            f"{summary.witness_rate_before:.3f} -> {summary.witness_rate_after:.3f}"
        )
    aggregators = tuple(sorted(needs.aggregators, key=lambda name: name or ""))
    return Task(job, planner.folder(job), cohort, config.model_dump(mode="json"), aggregators, needs.features)


def _introduction(
    made_with: Mapping[str, Any],
    about: str,
    cohorts: Mapping[str, Cohort],
    failures: Mapping[Job, str],
    to_come: int,
) -> str:
    changed = ", ".join(f"{key}={value}" for key, value in made_with["overrides"].items())
    lines = [
        "# The paper's tables and figures",
        "",
        f"Made by its2clr {__version__}, budget {about}" + (f", {changed}" if changed else "") + ";",
        f"{made_with['seeds']} training seed(s), each with its own pretraining.",
        "Ours in bold: mean and sample deviation over seeds (with one seed, over retrained aggregators); below",
        "it the paper's number, which is of other data. Of a curve: first, highest and last value, and where it went",
        "back the most. Models are selected on validation bags; all numbers are of test",
        "bags unless said otherwise. Methods are compared seed by seed, since those of a seed share their start; level",
        "means that the mean of these differences is within their standard deviation, and that the seeds do not agree",
        "on its sign beyond chance (which takes six of them).",
        "",
    ]
    for name, cohort in cohorts.items():
        splits = cohort.bags.groupby("split")["label"].agg(["size", "sum"])
        counts = ", ".join(f"{split} {row['size']} ({row['sum']} positive)" for split, row in splits.iterrows())
        where = f" for {name}" if name else ""
        lines.append(f"Cohort{where}: {cohort.name}, {cohort.n_instances} instances; bags: {counts}.\n")
    if to_come:
        lines.append(f"{to_come} run(s) are still to come; the page is written again as they end.\n")
    if failures:
        lines.append(f"{len(failures)} run(s) have no result; `problems.csv` says why.\n")
    return "\n".join(lines)


def _note_runs(out: Path, planner: Planner, tasks: Mapping[Job, Task], failures: Mapping[Job, str]) -> None:
    """Write what every run is to runs.csv, and those without a result to problems.csv; other runs' rows stay."""
    columns = ["folder", "stage", "cohort", "resampling", "settings", "seed", "problem"]
    rows = [
        (
            str(planner.folder(job).relative_to(out)),
            job.stage,
            job.cohort,
            job.resampling.name,
            " ".join(f"{key}={value}" for key, value in job.values),
            str(job.seed),
            failures.get(job),
        )
        for job in dict.fromkeys([*tasks, *failures])
    ]
    runs = pd.DataFrame(rows, columns=columns, dtype=object)
    for name, new in (("runs.csv", runs.drop(columns="problem")), ("problems.csv", runs.dropna(subset="problem"))):
        if (out / name).is_file():
            known = pd.read_csv(out / name, dtype=object)
            new = pd.concat([known[~known["folder"].isin(runs["folder"])], new])  # noqa: PLW2901
        with atomic_path(out / name) as temporary:
            new.to_csv(temporary, index=False)


def default_workers() -> int:
    """One per GPU; without a GPU two, or one on a single core, or where the packages for more are missing."""
    import torch

    if not can_spread():
        return 1
    return torch.cuda.device_count() or min(2, os.cpu_count() or 1)


def embedded_cohort(budget: str, out: Path) -> Path:
    """The embedded cohort of a budget, drawn if it is not there.

    Raises:
        InputError: The budget has none.
    """
    from its2clr.cohort.synthetic.synthetic_cohort import make_synthetic

    settings = read_budget(budget).embedded
    if settings is None:
        raise InputError(f"the budget {budget!r} needs a cohort of yours: --cohort PATH")
    folder = out / "cohort"
    make_synthetic(folder, **settings)
    return folder
