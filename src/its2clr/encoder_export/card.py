"""The model card of an exported encoder: what it is, what it was made from, how good it was, what it is not for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePath
from typing import Any

import jinja2
import yaml

from its2clr.cohort import Cohort
from its2clr.config import FEATURES, EncoderConfig, RunConfig
from its2clr.encoder_export.network_files import TimmFolder, needed_in_code
from its2clr.encoder_export.trident import TridentFolder
from its2clr.evaluation.bags import BAG_METRICS
from its2clr.predict.tiling import Tiling
from its2clr.run.handover import said
from its2clr.run.names import START, encoder_names
from its2clr.version import __version__

_SECTIONS = ("seed", "encoder", "projector", "pretrain", "refine", "end_to_end", "aggregator")
_PATHS = (("encoder", "weights"), ("pretrain", "start"), ("refine", "corrections"))


@dataclass(frozen=True)
class Exported:
    """What an export holds.

    Attributes:
        encoder: Which encoder of the run.
        built: How it was built.
        feature_dim: Numbers per tile.
        timm: The folder for timm; None if not exported.
        onnx: Whether there is an ONNX file.
        trident: The folder of the features; None if not exported.
    """

    encoder: str
    built: EncoderConfig
    feature_dim: int
    timm: TimmFolder | None = None
    onnx: bool = False
    trident: TridentFolder | None = None


def model_card(
    exported: Exported,
    config: RunConfig,
    cohort: Cohort,
    results: Mapping[str, Any] | None,
    licence: str | None = None,
) -> str:
    """The card as Markdown; no path and no bag's name is in it.

    Args:
        exported: What it describes.
        config: Settings of the run.
        cohort: The run's cohort; its labels are not looked at.
        results: The content of results.json, None before evaluation.
        licence: As the user states it.
    """
    tiling = Tiling.of_cohort(cohort.info)
    template = resources.files("its2clr.encoder_export").joinpath("card.md.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)  # noqa: S701 (Markdown)
    return environment.from_string(template).render(
        vars(exported),
        name=exported.built.name,
        adapter=exported.built.name == FEATURES,
        method=encoder_names(config)[exported.encoder],
        in_code=needed_in_code(exported.built),
        version=__version__,
        licence=licence,
        cohort=cohort.name,
        kind=tiling.kind,
        label=cohort.info.settings.get("label", "label"),
        tile_size=tiling.tile_size,
        scale="" if tiling.mpp is None else f" at {tiling.mpp:g} microns per pixel",
        splits=_splits(cohort, results),
        measured=_measured(exported.encoder, config, results),
        handed_over=said(results["hand_over"]) if results is not None and "hand_over" in results else "",
        aggregator=config.aggregator.name,
        retrainings=config.evaluation.retrainings,
        settings=_settings(config),
    )


def _splits(cohort: Cohort, results: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Bags and tiles of every split; how many bags are positive is known once the run is evaluated."""
    known = (results or {}).get("cohort", {}).get("splits", {})
    return [
        {
            "name": name,
            "bags": len(part),
            "positive": known.get(name, {}).get("positive_bags", "not said"),
            "tiles": int(part["n_instances"].sum()),
        }
        for name, part in cohort.bags.groupby("split", sort=False)
    ]


def _measured(encoder: str, config: RunConfig, results: Mapping[str, Any] | None) -> list[list[str]]:
    """Rows of the table of metrics of the start and of this encoder, headings first; no rows before evaluation."""
    names, found = encoder_names(config), {}
    for other in dict.fromkeys((START, encoder)):
        if "test" in (results or {}).get(other, {}):
            name = f"{names[other]} (this one)" if other == encoder else names[other]
            found[name] = _cells((results or {})[other]["test"])
    titles = dict.fromkeys(title for cells in found.values() for title in cells)
    rows = [[title, *(cells.get(title, "not known") for cells in found.values())] for title in titles]
    return [["", *found], *rows] if found else []


def _cells(found: Mapping[str, Any]) -> dict[str, str]:
    """Metrics with their intervals, by title."""
    cells = {
        f"bag {metric.title}": _with_interval(found["bag"][name]["mean"], found["bag_intervals"][name])
        for name, metric in BAG_METRICS.items()
        if name in found["bag_intervals"]
    }
    if "instance_auc" in found:
        cells["instance AUC"] = _with_interval(found["instance_auc"], found["instance_auc_interval"])
    return cells


def _with_interval(value: float, interval: Sequence[float]) -> str:
    return f"{value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"


def _settings(config: RunConfig) -> str:
    sections = (*_SECTIONS, "adapter") if config.encoder.name == FEATURES else _SECTIONS
    settings = config.model_dump(mode="json", include=set(sections))
    for section, key in _PATHS:
        if settings[section][key] is not None:  # the name alone: folders of this machine stay private
            settings[section][key] = PurePath(settings[section][key]).name
    if settings["pretrain"]["start"] is not None:  # nothing was pretrained here
        settings["pretrain"] = {"start": settings["pretrain"]["start"]}
    return yaml.safe_dump({key: settings[key] for key in sections}, sort_keys=False).rstrip()
