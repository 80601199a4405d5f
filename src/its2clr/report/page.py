"""The page: what was collected, drawn and said, put into the template."""

import base64
import hashlib
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Any, NamedTuple

import jinja2
import pandas as pd
from markupsafe import Markup

from its2clr.evaluation.arrays import both_classes
from its2clr.evaluation.thresholds import balanced_accuracy_threshold
from its2clr.report import figures, panels, tables, words
from its2clr.report.collect import RunFacts, Scored
from its2clr.report.curves import Decisions, decisions
from its2clr.report.embedding import embed
from its2clr.report.settings import all_settings, changed_settings, command_again
from its2clr.report.tiles import (
    TILES_OF_BAG,
    Picture,
    pictures,
    ranked,
    wrong_bags,
    wrong_instances,
)
from its2clr.run.names import REFINED, START, encoder_names, refinement_name
from its2clr.version import __version__


class Strip(NamedTuple):
    """A row of pictures with its heading."""

    title: str
    pictures: Sequence[Picture]
    nothing: str = "There are none."


class WrongBag(NamedTuple):
    """A bag that was called wrongly, with its highest tiles."""

    bag_id: str
    label: str
    probability: float
    pictures: Sequence[Picture]


def render(facts: RunFacts) -> str:
    """The report as one HTML page that needs nothing else."""
    script, style = _packaged("report.js"), _packaged("report.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(_packaged("report.html.j2"))
    # Gathered first: what cannot be shown adds to the problems that the page begins with.
    content = {**_about(facts), **_results(facts), **_pictures(facts), **_training(facts)}
    page = template.render(
        content,
        facts=facts,
        script=Markup(script),  # noqa: S704 - our own file
        style=Markup(style),  # noqa: S704 - our own file
        script_hash=f"sha256-{digest}",
        infinity=math.inf,
        most_models=panels.MOST_MODELS,
        panels_abreast=panels.PANELS_ABREAST,
    )
    return page.lstrip()


def _packaged(name: str) -> str:
    return resources.files("its2clr.report").joinpath(name).read_text(encoding="utf-8")


def _about(facts: RunFacts) -> dict[str, Any]:
    again = facts.attempt("The command", lambda: command_again(facts.run, facts.cohort_path, facts.config))
    return {
        "title": facts.run.resolve().name,
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": __version__,
        "method": refinement_name(facts.config.refine),
        "cohort_table": facts.attempt("The cohort", lambda: tables.cohort_table(facts)),
        "cohort_words": words.cohort(facts),
        "command": again[0] if again else None,
        "recipe": again[1] if again else None,
        "changed": changed_settings(facts.config),
        "settings": all_settings(facts.config),
    }


def called_at_validation(models: Sequence[Scored]) -> dict[str, Decisions]:
    """Each model's test bags called at the threshold its validation bags choose."""
    found = {}
    for scored in models:
        validation, test = scored.split("val"), scored.split("test")
        if both_classes(validation[0]) and test[0].size:
            found[scored.name] = decisions(*test, balanced_accuracy_threshold(*validation))
    return found


def _results(facts: RunFacts) -> dict[str, Any]:
    models = facts.models
    called = facts.attempt("Decisions", lambda: called_at_validation(models)) or {}
    evaluated = facts.results is not None
    content: dict[str, Any] = dict.fromkeys(
        ("bag_results", "instance_results", "decisions", "test_bags", "other_bags", "intervals")
    )
    content["headline"] = facts.attempt("The summary", lambda: _said(facts, called)) or []
    content |= dict.fromkeys(("bag_curves", "instance_curves", "calibration", "distributions"))
    if not evaluated or not models:
        return content
    content |= {
        "bag_results": facts.attempt("Bag results", lambda: tables.bag_results(models)),
        "instance_results": facts.attempt("Instance results", lambda: tables.instance_results(models)),
        "decisions": tables.decision_table(called) if called else None,
        "test_bags": facts.attempt("Test bags", lambda: tables.bag_table(facts, called, ["test"], "test-bags")),
        "other_bags": facts.attempt("Bags", lambda: tables.bag_table(facts, called, ["val", "train"], "other-bags")),
        "intervals": facts.attempt("Intervals", lambda: panels.interval_figure(models)),
        "bag_curves": facts.attempt("Bag curves", lambda: panels.bag_curves(models)),
        "instance_curves": facts.attempt("Instance curves", lambda: panels.instance_curves(models)),
        "calibration": facts.attempt("Calibration", lambda: panels.calibration(models)),
        "distributions": facts.attempt("Distributions", lambda: panels.distributions(models, called)),
    }
    return content


def _said(facts: RunFacts, called: dict[str, Decisions]) -> list[str]:
    return words.headline(facts, called) if facts.results is not None else words.unfinished(facts)


def _pictures(facts: RunFacts) -> dict[str, Any]:
    strips: list[Strip] = []
    mistakes: list[Strip] = []
    wrong: list[WrongBag] = []
    best = facts.best
    if best is not None and best.instances is not None and facts.cohort is not None:
        instances = best.instances
        strips = facts.attempt("Tiles", lambda: _strips(facts, best, instances)) or []
        mistakes = facts.attempt("Wrong instances", lambda: _wrong_instances(facts, instances)) or []
        wrong = facts.attempt("Wrong bags", lambda: _wrong_bags(facts, best, instances)) or []
    return {
        "strips": strips,
        "mistakes": mistakes,
        "wrong_bags": wrong,
        "best": best,
        "embedding": facts.attempt("The embedding map", lambda: _embedding(facts)),
        "separation": facts.attempt(
            "Class separation", lambda: tables.separation_table(facts.results or {}, _names(facts))
        ),
    }


def _pictured(facts: RunFacts, rows: pd.DataFrame) -> list[Picture]:
    return pictures(facts.cohort, rows) if facts.cohort is not None else []


def _strips(facts: RunFacts, best: Scored, instances: pd.DataFrame) -> list[Strip]:
    test = best.bags[best.bags["split"] == "test"]
    strips = []
    for label, name in ((1, "positive"), (0, "negative")):
        bags = set(test.loc[test["label"] == label, "bag_id"])
        for highest in (True, False):
            title = f"{'Highest' if highest else 'Lowest'}-ranked tiles of {name} test bags"
            strips.append(Strip(title, _pictured(facts, ranked(instances, bags, highest=highest))))
    return strips


def _wrong_instances(facts: RunFacts, instances: pd.DataFrame) -> list[Strip]:
    if not (instances["label"] >= 0).any():
        return []
    return [
        Strip(title, _pictured(facts, wrong_instances(instances, truth)), nothing)
        for title, truth, nothing in (
            ("Truly negative tiles with the highest probability", 0, "No negative tile has 0.5 or more."),
            ("Truly positive tiles with the lowest probability", 1, "No positive tile has less than 0.5."),
        )
    ]


def _wrong_bags(facts: RunFacts, best: Scored, instances: pd.DataFrame) -> list[WrongBag]:
    called = called_at_validation([best]).get(best.name)
    test = best.bags[best.bags["split"] == "test"]
    found = []
    for label, name in ((1, "positive, called negative"), (0, "negative, called positive")):
        for row in wrong_bags(test, called.threshold if called else 0.5, label).to_dict("records"):
            bag_id = str(row["bag_id"])
            highest = ranked(instances, {bag_id}, highest=True, count=TILES_OF_BAG, per_bag=TILES_OF_BAG)
            found.append(WrongBag(bag_id, name, float(row["probability"]), _pictured(facts, highest)))
    return found


def _names(facts: RunFacts) -> dict[str, str]:
    names = encoder_names(facts.config)
    return {**names, START: f"{names[START]} (before)", REFINED: f"{names[REFINED]} (after)"}


def _embedding(facts: RunFacts) -> dict[str, Any] | None:
    best = facts.best
    if best is None or best.instances is None:
        return None
    labels = dict(zip(best.bags["bag_id"].astype(str), best.bags["label"].astype(int), strict=True))
    names = _names(facts)
    found = embed(facts.run, list(names), best.instances, labels)
    if found is None:
        return None
    called = {1: "positive tile", 0: "negative tile", -1: "unknown"}
    if not found.of_truth:
        called = {1: "tile of a positive bag", 0: "tile of a negative bag", -1: "unknown"}
    points = {names[encoder]: (places, found.shares[encoder]) for encoder, places in found.places.items()}
    return {"figure": figures.maps(points, found.classes, called), "found": found}


def _training(facts: RunFacts) -> dict[str, Any]:
    health = facts.health
    return {
        "rounds_figure": facts.attempt("Rounds", lambda: panels.rounds(facts.rounds)) if facts.rounds else None,
        "rounds_table": facts.attempt("Rounds", lambda: tables.rounds_table(facts.rounds)) if facts.rounds else None,
        "training_figure": facts.attempt("Training", lambda: panels.training(facts.metrics)),
        "training_words": words.training_words(facts.metrics),
        "health": facts.attempt("Health", lambda: words.health_checks(health, facts.config.refine)) if health else None,
        "health_warnings": list((health or {}).get("warnings", ())),
        "timings": facts.attempt("Timings", lambda: tables.timings_table(facts)),
    }
