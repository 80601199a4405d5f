"""The settings of a run for the reader: what differs from the defaults, and a command that makes the run again."""

import json
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from its2clr.config import RunConfig
from its2clr.settings import flatten, recipe_names, resolve_config


class Setting(NamedTuple):
    """One setting: its dotted key, its value in this run, and the default."""

    key: str
    value: str
    default: str


def all_settings(config: RunConfig) -> list[Setting]:
    """Every setting; values as they are typed after `--set`."""
    here, default = _flat(config), _flat(RunConfig())
    return [Setting(key, said(here[key]), said(default[key]) if key in default else "not set") for key in here]


def changed_settings(config: RunConfig) -> list[Setting]:
    """Those that differ from the defaults, which are the paper's."""
    return [setting for setting in all_settings(config) if setting.value != setting.default]


def command_again(run: Path, cohort: Path, config: RunConfig) -> tuple[str, str | None] | None:
    """A command that starts a run with these very settings, and the recipe it begins with, if any.

    The recipe is the one that leaves the fewest settings to name. None where no command can say them.
    """
    wanted = _flat(config)
    best: tuple[list[str], str | None] | None = None
    for recipe in (None, *recipe_names()):
        start = _flat(resolve_config(recipe))
        overrides = [f"{key}={said(value)}" for key, value in wanted.items() if start.get(key, ...) != value]
        if (best is None or len(overrides) < len(best[0])) and resolve_config(recipe, overrides) == config:
            best = overrides, recipe
    if best is None:
        return None
    words = ["its2clr", "fit", str(cohort), "--out", str(run)]
    words += ["--recipe", best[1]] if best[1] is not None else []
    for override in best[0]:
        words += ["--set", override]
    return shlex.join(words), best[1]


def said(value: Any) -> str:
    """A value as it is typed after `--set`: plain text where YAML leaves it as it is, else JSON."""
    return value if isinstance(value, str) and _is_plain(value) else json.dumps(value)


def _is_plain(text: str) -> bool:
    try:
        return bool(yaml.safe_load(text) == text)
    except yaml.YAMLError:
        return False


def _flat(config: RunConfig) -> dict[str, Any]:
    return flatten(config.model_dump(mode="json"))
