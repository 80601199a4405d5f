"""What `its2clr reproduce --plan` prints: the settings of every cell, without training anything."""

from collections.abc import Sequence
from typing import Any

import yaml

from its2clr.errors import InputError
from its2clr.experiments.plan import Planner
from its2clr.experiments.spec import Cell, Experiment, Resampling, methods

MISSING = "missing"


def shown_plan(specs: Sequence[Experiment], planner: Planner, seeds: int) -> str:
    """Tables and figures as YAML: settings in which no two cells differ, then of each cell what it is and its own."""
    return "\n".join(_of_one(spec, planner, seeds) for spec in specs)


def _of_one(spec: Experiment, planner: Planner, seeds: int) -> str:
    cells = {", ".join(filter(None, place)): cell for place, cell in spec.cells().items()}
    settings = {name: _settings(cell, planner) for name, cell in cells.items()}
    values: dict[str, list[Any]] = {}
    for found in settings.values():
        for key, value in found.items() if MISSING not in found else ():
            values.setdefault(key, []).append(value)
    shared = {key: found[0] for key, found in values.items() if all(value == found[0] for value in found)}
    own = {
        name: {
            **_what(cell, settings[name]),
            **{key: value for key, value in settings[name].items() if key not in shared},
        }
        for name, cell in cells.items()
    }
    jobs = planner.plan(cells.values(), seeds)
    starts = sum(job.stage == "pretrain" for job in jobs)
    about = f"# {spec.title}: {len(jobs)} runs, {starts} of them starts; {seeds} training seed(s)\n"
    return about + _yaml({spec.label: {"all cells": shared, "cells": own}})


def _settings(cell: Cell, planner: Planner) -> dict[str, Any]:
    """Settings of a cell's run, or why there are none; empty for a cell that needs no run."""
    if cell.missing:
        return {MISSING: cell.missing}
    try:
        return planner.settings(cell) if cell.method else {}
    except InputError as error:
        return {MISSING: str(error)}


def _what(cell: Cell, settings: dict[str, Any]) -> dict[str, Any]:
    """What a cell is, beside its settings."""
    if cell.method is None or MISSING in settings:
        return {}
    found = {"method": cell.method, "stage": methods()[cell.method].stage, "dataset": cell.dataset, "start": cell.start}
    found |= {"cohort": None if cell.cohort == Resampling() else cell.cohort.name, "metric": cell.metric}
    found |= {"aggregator": cell.aggregator or settings["aggregator.name"], "shows": cell.setting}
    return {key: value for key, value in found.items() if value is not None}


def _yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(_plain(values), sort_keys=False, width=120, allow_unicode=True, default_flow_style=None)


def _plain(value: Any) -> Any:
    """Tuples as lists: YAML has no tuples."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
