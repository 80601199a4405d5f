"""Open a run for working on it: settings, engine and stages put together."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from its2clr.cohort.layout import INFO_FILE, CohortInfo, read_info
from its2clr.config import FEATURES, STANDARD, EncoderConfig, RunConfig
from its2clr.encoders.weight_files import with_constants
from its2clr.encoders.weights import check_same_network
from its2clr.engine.devices import Engine
from its2clr.errors import InputError
from its2clr.plugins import import_plugins
from its2clr.run.directory import RunDirectory
from its2clr.run.names import REFINED, encoder_file
from its2clr.run.saved import read_run_config, require_run_config
from its2clr.run.stages import Stages, started_from
from its2clr.settings import resolve_config


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
        recipe: Recipe name or file; None keeps the settings of a run that has begun; a new one takes the recipe
            `standard`, or `features` for a cohort of features.
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
    info = cohort_info(cohort if saved is None else saved[1])
    if recipe is None and saved is None:
        recipe = usual_recipe(info)
    resolved = with_features(resolve_config(recipe, overrides, base), info)
    import_plugins(resolved.plugins)
    config = with_constants(resolved, None if saved is None else saved[0])
    if saved is None and config.pretrain.start is not None:
        check_same_network(started_from(config.pretrain.start), config)
    engine = engine or Engine(config.engine)
    if quiet:
        engine.bars.enabled = False
    return Stages(RunDirectory(run, config, cohort, engine), engine, write_features=write_features)


def cohort_info(cohort: str | Path | None) -> CohortInfo | None:
    """What a cohort says of itself; None if there is none, which is said when it is opened."""
    if cohort is None or not (Path(cohort) / INFO_FILE).is_file():
        return None
    return read_info(Path(cohort))


def usual_recipe(info: CohortInfo | None) -> str:
    """The recipe of a run for which nobody names one."""
    return FEATURES if info is not None and info.kind == "features" else STANDARD


def with_features(config: RunConfig, info: CohortInfo | None) -> RunConfig:
    """The settings of a run on a cohort; where that holds features, the encoder is an adapter over them."""
    if info is None or info.kind == "tiles":
        return config
    if config.encoder.weights is not None or config.encoder.pretrained:
        raise InputError(
            "encoder.weights and encoder.pretrained are for tiles; this cohort holds features, which are the start"
        )
    encoder = EncoderConfig(name=FEATURES, options={"feature_dim": info.feature_dim})
    return config.model_copy(update={"encoder": encoder})


def open_corrected(run: str | Path, corrections: str | Path, out: str | Path, encoder: str = REFINED) -> Stages:
    """Begin or go on with a run that takes up another one with a person's corrections.

    Args:
        run: Folder of the run that was looked at; its cohort and settings are kept.
        corrections: Folder with a GeoJSON file per corrected bag; see `its2clr.refine.corrections`.
        out: Folder of the new run.
        encoder: Which encoder of the other run it starts from.

    Raises:
        InputError: The other run has no such encoder, or `out` holds a run with other settings.
    """
    config, cohort = require_run_config(run)
    if Path(out).resolve() == Path(run).resolve():
        raise InputError(f"{out}: corrections begin a run of their own; give another --out than the run itself")
    settings = config.model_dump(mode="json")
    settings["pretrain"]["start"] = str(started_from(str(encoder_file(Path(run).resolve(), encoder))))
    settings["encoder"] |= {"weights": None, "pretrained": False}
    settings["refine"]["corrections"] = str(Path(corrections).resolve())
    return open_run(out, cohort, None, settings)
