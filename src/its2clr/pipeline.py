"""Open a run for working on it: settings, engine and stages put together."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from its2clr.config import resolve_config
from its2clr.engine.devices import Engine
from its2clr.engine.rundir import RunDirectory, read_run_config
from its2clr.errors import InputError
from its2clr.plugins import import_plugins
from its2clr.stages import Stages


def open_run(
    run: str | Path,
    cohort: str | Path | None = None,
    recipe: str | Path | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    quiet: bool = False,
    engine: Engine | None = None,
    write_features: bool = True,
) -> Stages:
    """Open or begin a run.

    Args:
        run: Folder of the run.
        cohort: Folder of the cohort; None for a run that has begun.
        recipe: Recipe name or file; None keeps the settings of a run that has begun, else takes the paper's.
        overrides: Settings that replace some of these.
        quiet: Say nothing.
        engine: An engine to work with; None makes one from the settings.
        write_features: Whether features are written to the run, or only held in memory.

    Raises:
        InputError: The settings are wrong, or differ from those the run was begun with.
    """
    saved = read_run_config(run)
    if saved is None and cohort is None:
        raise InputError(f"{run}: no run has begun here; begin one by naming a cohort: `its2clr fit COHORT --out RUN`")
    base = saved[0].model_dump(mode="json") if saved is not None and recipe is None else None
    config = resolve_config(recipe, overrides, base)
    import_plugins(config.plugins)
    engine = engine or Engine(config.engine)
    if quiet:
        engine.bars.enabled = False
    return Stages(RunDirectory(run, config, cohort, engine), engine, write_features=write_features)
