"""What a study leaves: a table of its trials, the best recipe, and a page about them."""

import csv
import io
import json
import shlex
import textwrap
from importlib import resources
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from its2clr.files import write_text
from its2clr.settings import config_difference
from its2clr.tune.judge import MEASURE
from its2clr.tune.study import LEAST_FOR_IMPORTANCES, Found, Study
from its2clr.version import __version__

TABLE_FILE, RECIPE_FILE, PAGE_FILE = "trials.csv", "best.yaml", "report.html"
LONGEST_WHY = 100
"""Characters of a reason in a printed line and on the page; trials.csv has all of it."""


def write_results(study: Study) -> None:
    """Write trials.csv, best.yaml (once a trial has finished) and report.html into the folder of a study."""
    write_text(study.path / TABLE_FILE, _table(study))
    best = study.best()
    if best is not None:
        write_text(study.path / RECIPE_FILE, _recipe(study, best))
    write_text(study.path / PAGE_FILE, _page(study, best))


def said(trial: Found, best: Found | None) -> str:
    """One line about a trial that has ended."""
    if trial.state == "finished":
        assert trial.value is not None
        ending = f"{trial.value:.4f}" + (" (the best so far)" if best and best.number == trial.number else "")
    else:
        ending = f"{trial.state} after {trial.rounds} rounds ({_reason(trial)})"
    name = "trial 0 (the recipe)" if trial.number == 0 else f"trial {trial.number}"
    return f"{name}: {ending}; " + ", ".join(
        f"{key.removeprefix('refine.')} {_short(value)}" for key, value in trial.settings.items()
    )


def summary(study: Study) -> list[str]:
    """What the search gained, and how to use it, in lines."""
    best, trials = study.best(), study.trials()
    if best is None:
        return [f"none of {len(trials)} trials has finished; the same command with a larger budget goes on"]
    assert best.value is not None
    if best.number == 0:
        gain = "no trial was better than the recipe itself"
    else:
        recipe = trials[0]
        own = f"{recipe.value:.4f}" if recipe.state == "finished" else f"none, {recipe.state}"
        gain = f"the recipe itself: {own}"
    return [f"best of {len(trials)} trials: trial {best.number}, {MEASURE} {best.value:.4f}; {gain}"]


def fit_command(study: Study) -> str:
    """The command that trains with the best recipe."""
    allow = " --allow-plugins" if study.config.plugins else ""
    return f"its2clr{allow} fit {shlex.quote(str(study.cohort))} --recipe {shlex.quote(str(study.path / RECIPE_FILE))}"


def _recipe(study: Study, best: Found) -> str:
    config = study.config_of(best)
    changes = config_difference(study.config, config)
    lines = [
        f"Trial {best.number} of an its2clr study: {MEASURE} {best.value:.4f}.",
        f"Against the recipe ({study.recipe}) it changes:" if changes else "It is the recipe unchanged.",
        *(f"  {change}" for change in changes),
    ]
    settings = config.model_dump(mode="json", exclude={"engine"})
    return "".join(f"# {line}\n" for line in lines) + yaml.safe_dump(settings, sort_keys=False)


def _table(study: Study) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    keys = list(study.space)
    writer.writerow(["trial", "state", "value", "rounds", "seconds", "why", *keys])
    for trial in study.trials():
        drawn = [json.dumps(trial.settings.get(key)) for key in keys]
        value = "" if trial.value is None else repr(trial.value)
        writer.writerow([trial.number, trial.state, value, trial.rounds, f"{trial.seconds:.1f}", trial.why, *drawn])
    return text.getvalue()


def _page(study: Study, best: Found | None) -> str:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(_packaged("its2clr.tune", "study.html.j2"))
    importances = study.importances()
    return template.render(
        title=study.path.resolve().name,
        version=__version__,
        style=Markup(_packaged("its2clr.report", "report.css")),  # noqa: S704 - our own file
        measure=MEASURE,
        summary=summary(study),
        best=best,
        changes=[] if best is None else config_difference(study.config, study.config_of(best)),
        command=fit_command(study),
        cohort=study.cohort,
        recipe=study.recipe,
        trials=study.trials(),
        keys=list(study.space),
        importances=importances,
        least=LEAST_FOR_IMPORTANCES,
        space={
            key: yaml.safe_dump(entry, default_flow_style=True).strip() for key, entry in study.space.written().items()
        },
        short=_short,
        reason=_reason,
    ).lstrip()


def _packaged(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


def _reason(trial: Found) -> str:
    return textwrap.shorten(trial.why, LONGEST_WHY)
