"""The report of a run: what was gathered, drawn and said, put into the template and written as one page."""

import base64
import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from its2clr.errors import DiskFullError, InputError
from its2clr.files import write_text
from its2clr.report import figure_data, figures, page_tables, shown_tiles, words
from its2clr.report.run_facts import Decisions, RunFacts, called_at_validation, collect
from its2clr.report.run_state import FAILURE_FILE, note_failure
from its2clr.run.names import REFINED, START, encoder_names, refinement_name
from its2clr.version import __version__

REPORT_FILE = "report.html"
_MEASURED = (
    "bag_results", "instance_results", "decisions", "test_bags", "other_bags", "intervals", "bag_curves",
    "instance_curves", "calibration", "distributions",
)  # fmt: skip
"""What the page has of an evaluated run only."""


def write_report(run: str | Path, out: str | Path | None = None) -> Path:
    """Write one self-contained HTML page about a run, in whatever state the run is.

    Args:
        run: Folder of the run.
        out: Where to; None: `report.html` in the run.

    Returns:
        Where it is.

    Raises:
        InputError: The folder is no run, or the page cannot be written there.
    """
    return _write(run, out)[0]


def _write(run: str | Path, out: str | Path | None = None) -> tuple[Path, RunFacts]:
    path = Path(run) / REPORT_FILE if out is None else Path(out)
    if path.is_dir():
        raise InputError(f"{path}: is a folder; give a file, for example {path / REPORT_FILE}")
    facts = collect(run)
    write_text(path, render(facts))
    return path, facts


@contextmanager
def reported(run: Path, say: Callable[[str], None], *, enabled: bool = True) -> Iterator[None]:
    """Write the report when the block ends; when it fails, note the reason and write the report all the same.

    On a full disk there is no report. A report that cannot be written is said, and never an error.

    Args:
        run: Folder of the run.
        say: Told where the report is, or why there is none. When the block fails, also told the warnings about the
            pseudo labels; a run that ends well has printed them already.
        enabled: Off in processes that do not write.
    """
    if not enabled:
        yield
        return
    (run / FAILURE_FILE).unlink(missing_ok=True)
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            note_failure(run, error)
        if isinstance(error, Exception) and not isinstance(error, DiskFullError):
            _try_to_write(run, say, failed=True)
        raise
    _try_to_write(run, say)


def _try_to_write(run: Path, say: Callable[[str], None], *, failed: bool = False) -> None:
    try:
        path, facts = _write(run)
        for warning in (facts.health or {}).get("warnings", ()) if failed else ():
            say(f"warning: {warning}")
        say(f"report in {path}")
    except Exception as error:  # noqa: BLE001 - a report must not take a finished training down
        say(f"warning: no report was written ({type(error).__name__}: {error}); `its2clr report {run}` tries again")


def render(facts: RunFacts) -> str:
    """The report as one HTML page that needs nothing else."""
    script, style = _packaged("report.js"), _packaged("report.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(_packaged("report.html.j2"))
    # Made before the page is: what cannot be shown is among the problems that the page begins with.
    called = facts.attempt("Decisions", lambda: called_at_validation(facts.models)) or {}
    content = {**_about(facts), **_results(facts, called), **_pictures(facts), **_training(facts)}
    page = template.render(
        content,
        facts=facts,
        script=Markup(script),  # noqa: S704 - our own file
        style=Markup(style),  # noqa: S704 - our own file
        script_hash=f"sha256-{digest}",
        infinity=math.inf,
        most_models=figure_data.MOST_MODELS,
        panels_abreast=figure_data.PANELS_ABREAST,
    )
    return page.lstrip()


def _packaged(name: str) -> str:
    return resources.files("its2clr.report").joinpath(name).read_text(encoding="utf-8")


def _about(facts: RunFacts) -> dict[str, Any]:
    again = facts.attempt("The command", lambda: words.command_again(facts.run, facts.cohort_path, facts.config))
    return {
        "title": facts.run.resolve().name,
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": __version__,
        "method": refinement_name(facts.config.refine),
        "cohort_table": facts.attempt("The cohort", lambda: page_tables.cohort_table(facts)),
        "cohort_words": words.cohort(facts),
        "command": again[0] if again else None,
        "recipe": again[1] if again else None,
        "changed": words.changed_settings(facts.config),
        "settings": words.all_settings(facts.config),
    }


def _results(facts: RunFacts, called: dict[str, Decisions]) -> dict[str, Any]:
    say = (lambda: words.headline(facts, called)) if facts.results is not None else (lambda: words.unfinished(facts))
    headline, models = facts.attempt("The summary", say) or [], facts.models
    if not models:
        return {"headline": headline} | dict.fromkeys(_MEASURED)
    return {
        "headline": headline,
        "bag_results": facts.attempt("Bag results", lambda: page_tables.bag_results(models)),
        "instance_results": facts.attempt("Instance results", lambda: page_tables.instance_results(models)),
        "decisions": page_tables.decision_table(called) if called else None,
        "test_bags": facts.attempt("Test bags", lambda: page_tables.bag_table(facts, ["test"], "test-bags")),
        "other_bags": facts.attempt("Bags", lambda: page_tables.bag_table(facts, ["val", "train"], "other-bags")),
        "intervals": facts.attempt("Intervals", lambda: figure_data.interval_figure(models)),
        "bag_curves": facts.attempt("Bag curves", lambda: figure_data.bag_curves(models)),
        "instance_curves": facts.attempt("Instance curves", lambda: figure_data.instance_curves(models)),
        "calibration": facts.attempt("Calibration", lambda: figure_data.calibration(models)),
        "distributions": facts.attempt("Distributions", lambda: figure_data.distributions(models, called)),
    }


def _pictures(facts: RunFacts) -> dict[str, Any]:
    strips: list[shown_tiles.Strip] = []
    mistakes: list[shown_tiles.Strip] = []
    wrong: list[shown_tiles.WrongBag] = []
    best, cohort = facts.best, facts.cohort
    if best is not None and best.instances is not None and cohort is not None:
        instances, at = best.instances, best.thresholds
        strips = facts.attempt("Tiles", lambda: shown_tiles.ranked_strips(cohort, best, instances)) or []
        if at is not None:
            strip = partial(shown_tiles.mistake_strips, cohort, instances, at.instance)
            mistakes = facts.attempt("Wrong instances", strip) or []
            pictured = partial(shown_tiles.pictured_mistakes, cohort, best, at.bag, instances)
            wrong = facts.attempt("Wrong bags", pictured) or []
    return {
        "strips": strips,
        "mistakes": mistakes,
        "wrong_bags": wrong,
        "best": best,
        "embedding": facts.attempt("The embedding map", lambda: _embedding(facts)),
        "separation": facts.attempt(
            "Class separation", lambda: page_tables.separation_table(facts.results or {}, _names(facts))
        ),
    }


def _names(facts: RunFacts) -> dict[str, str]:
    names = encoder_names(facts.config)
    return {**names, START: f"{names[START]} (before)", REFINED: f"{names[REFINED]} (after)"}


def _embedding(facts: RunFacts) -> dict[str, Any] | None:
    best = facts.best
    if best is None or best.instances is None:
        return None
    labels = dict(zip(best.bags["bag_id"].astype(str), best.bags["label"].astype(int), strict=True))
    names = _names(facts)
    found = figure_data.embed(facts.run, list(names), best.instances, labels)
    if found is None:
        return None
    called = {1: "positive tile", 0: "negative tile", -1: "unknown"}
    if not found.of_truth:
        called = {1: "tile of a positive bag", 0: "tile of a negative bag", -1: "unknown"}
    points = {names[encoder]: (places, found.shares[encoder]) for encoder, places in found.places.items()}
    return {"figure": figures.maps(points, found.classes, called), "found": found}


def _training(facts: RunFacts) -> dict[str, Any]:
    health = facts.health
    refined = (facts.results or {}).get("refine")
    return {
        "rounds_figure": facts.attempt("Rounds", lambda: figure_data.rounds(facts.rounds)) if facts.rounds else None,
        "rounds_table": facts.attempt("Rounds", lambda: page_tables.rounds_table(facts.rounds))
        if facts.rounds
        else None,
        "rounds_words": facts.attempt("Rounds", lambda: words.rounds_words(facts.rounds, refined["best_epoch"]))
        if refined and facts.rounds
        else "",
        "training_figure": facts.attempt("Training", lambda: figure_data.training(facts.metrics)),
        "training_words": words.training_words(facts.metrics),
        "health": facts.attempt("Health", lambda: words.health_checks(health, facts.config.refine)) if health else None,
        "health_warnings": list((health or {}).get("warnings", ())),
        "timings": facts.attempt("Timings", lambda: page_tables.timings_table(facts)),
    }
