"""The page and the closing words of a cross-validation."""

from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from its2clr.crossval.study import CrossValidation
from its2clr.evaluation.bags import BAG_METRICS
from its2clr.evaluation.uncertainty import Summary, said_interval
from its2clr.files import write_text
from its2clr.version import __version__

PAGE_FILE = "report.html"


def write_page(study: CrossValidation, results: dict[str, Any]) -> None:
    """Write `report.html`."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(_packaged("its2clr.crossval", "crossval.html.j2"))
    page = template.render(
        title=study.path.resolve().name,
        version=__version__,
        style=Markup(_packaged("its2clr.report", "report.css")),  # noqa: S704 - our own file
        results=results,
        rows=results_rows(results),
        metrics={name: metric.title for name, metric in BAG_METRICS.items()},
        interval=said_interval,
        summary=summary(results),
        starts=said_starts(results),
    )
    write_text(study.path / PAGE_FILE, page.lstrip())


def results_rows(results: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Rows of the closing table: model; bag AUC and instance AUC of all bags out of fold; bag AUC of the folds."""
    rows = []
    for kind, found in results["models"].items():
        interval = said_interval(found["bag_intervals"]["auc"])
        instance = "-"
        if "instance" in found:
            instance = f"{found['instance']['auc']:.3f} {said_interval(found['instance_auc_interval'])}".rstrip()
        bags = f"{found['bag']['auc']:.3f} {interval}".rstrip()
        rows.append((results["names"][kind], bags, instance, _spread(found["of_folds"]["bag_auc"])))
    return rows


def summary(results: dict[str, Any]) -> list[str]:
    """What was found, in sentences."""
    cohort = results["cohort"]
    counted = f"{cohort['bags']} bags ({cohort['positive_bags']} positive) of {cohort['groups']} groups"
    lines = [f"{counted}, each scored by the one of {results['folds']} folds that has not seen it"]
    if "comparison" in results:
        difference = results["comparison"]["bag_auc_difference"]
        low, high = results["comparison"]["bag_auc_difference_interval"]
        found = "better than" if low > 0 else "worse than" if high < 0 else "level with, within chance,"
        lines.append(
            f"refined is {found} its start in bag AUC: {difference:+.3f} (95% interval {low:+.3f} to {high:+.3f})"
        )
    kept = results["handed_over"].count("start")
    if kept:
        lines.append(f"{kept} of {results['folds']} folds hand over their start, since refining did not improve it")
    return lines


def said_starts(results: dict[str, Any]) -> str:
    """What the folds share."""
    if results["start_is_trained"]:
        return (
            "Every fold pretrains a start of its own, on its training bags alone. None is shared: a start that has "
            "seen the tiles of a bag would flatter the scores of this bag."
        )
    return "The start is given and not trained here, so all folds have the same one; nothing of a bag leaks by it."


def _spread(found: Summary) -> str:
    deviation = "" if found["std"] is None else f" ({found['std']:.3f})"
    return f"{found['mean']:.3f}{deviation}, {min(found['values']):.3f} to {max(found['values']):.3f}"


def _packaged(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
