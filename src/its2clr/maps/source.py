"""Where scores come from: the folder of an evaluated run, or of predictions for new bags; both look the same here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import pandas as pd

from its2clr.cohort import Cohort
from its2clr.cohort.identity import bag_contents
from its2clr.cohort.splits import SPLITS
from its2clr.cohort.tiles import TileFile
from its2clr.errors import InputError
from its2clr.predict.prediction_folder import (
    COHORT,
    INSTANCES,
    OUT_OF_FOLD,
    PREDICTIONS,
    PROVENANCE,
    read_provenance,
    thresholds_of,
)
from its2clr.run.decisions import USUAL_INSTANCE_THRESHOLD, read_thresholds
from its2clr.run.names import ENCODERS, REFINED, encoder_names
from its2clr.run.scores import BagScores, Model, RunScores


@dataclass(frozen=True, eq=False)
class ScoredModel:
    """A model and what it says.

    Attributes:
        name: As on the command line and in files: its encoder, and its aggregator if that is not the run's own.
        title: What people call it.
        bag: Gives the scores of a bag.
        instance_threshold: Probability from which on it calls an instance positive.
    """

    name: str
    title: str
    bag: Callable[[str], BagScores]
    instance_threshold: float

    @property
    def folder(self) -> str:
        """The name as a folder."""
        return quote(self.name, safe="+ ")

    def positive_from(self, threshold: float | None) -> float:
        """The probability from which on an instance is positive: the one given, or else the model's own."""
        return self.instance_threshold if threshold is None else threshold


class Place(NamedTuple):
    """Where the tiles of a scored bag are.

    Attributes:
        cohort: The cohort that holds it.
        bag_id: What it is called there.
        split: Its split.
        label: Its label; None if it has none.
    """

    cohort: Cohort
    bag_id: str
    split: str
    label: int | None = None

    def tiles(self) -> TileFile:
        """Its tile file."""
        return self.cohort.tile_file(self.bag_id)


@dataclass(frozen=True, eq=False)
class Source:
    """Scored bags.

    Attributes:
        path: The folder.
        models: All models, in the order in which they are shown.
        usual: The models that are shown if none is named.
        best: The model whose regions are drawn if none is named.
        places: Where every scored bag is, by its id, in the order in which they are shown: in a run positive bags come
            first, among predictions the most probable ones.
        split: The split that is shown if none is named; None: all.
        outdated: What has changed since the bags were scored, in sentences.
    """

    path: Path
    models: tuple[ScoredModel, ...]
    usual: tuple[ScoredModel, ...]
    best: ScoredModel
    places: Mapping[str, Place]
    split: str | None = None
    outdated: tuple[str, ...] = ()

    @property
    def best_first(self) -> tuple[ScoredModel, ...]:
        """The usual models, the best one first."""
        return (self.best, *(model for model in self.usual if model is not self.best))

    def choose_models(self, names: Sequence[str] | None) -> tuple[ScoredModel, ...]:
        """The models of these names, or the usual ones.

        Raises:
            InputError: If there is no such model.
        """
        if not names:
            return self.usual
        known = {model.name: model for model in self.models}
        for name in names:
            if name not in known:
                raise InputError(f"{self.path}: no model {name!r}; there are {', '.join(known)}")
        return tuple(known[name] for name in dict.fromkeys(names))

    def choose_bags(self, bag_ids: Sequence[str] | None, split: str | None = None, limit: int = 0) -> list[str]:
        """The bags to show: those named, or the first ones of a split.

        Args:
            bag_ids: Bags by name; None: all of the split.
            split: The split; None: the one that the source shows.
            limit: How many bags of the split at most; 0: all.

        Raises:
            InputError: If there is no such bag or split.
        """
        if bag_ids:
            for bag_id in bag_ids:
                if bag_id not in self.places:
                    raise InputError(f"{self.path}: no predictions for bag {bag_id!r}")
            return list(dict.fromkeys(bag_ids))
        wanted = split or self.split
        if wanted not in (None, *SPLITS):
            raise InputError(f"unknown split {wanted!r}; splits are {', '.join(SPLITS)}")
        found = [bag_id for bag_id, place in self.places.items() if wanted in (None, place.split)]
        if not found:
            raise InputError(f"{self.path}: there are no bags of split {wanted}")
        return found[:limit] if limit else found


def said_thresholds(by_model: Mapping[str, float]) -> str:
    """Thresholds in words: `0.3`, or where models differ `0.31 (SimCLR), 0.12 (ItS2CLR)`."""
    if len(set(by_model.values())) == 1:
        return f"{next(iter(by_model.values())):.3g}"
    return ", ".join(f"{value:.3g} ({model})" for model, value in by_model.items())


def bag_file(folder: Path, bag_id: str, suffix: str) -> Path:
    """The file of a bag in a folder; characters that file systems refuse are percent-encoded."""
    return folder / f"{quote(bag_id, safe='')}{suffix}"


def open_source(folder: str | Path) -> Source:
    """Open the folder of an evaluated run, what `its2clr predict` wrote, or a cross-validation.

    Raises:
        InputError: If it is none of them, or what is in it does not fit together.
    """
    path = Path(folder)
    if (path / OUT_OF_FOLD / INSTANCES).is_file():
        path /= OUT_OF_FOLD
    return _predicted(path) if (path / INSTANCES).is_file() else _run(path)


def models_beside(source: Source, models: Sequence[ScoredModel], runs: Sequence[Path]) -> tuple[ScoredModel, ...]:
    """Models and, beside them, the best model of other runs on the same bags, such as ablations.

    Raises:
        InputError: If another run has no scores of a bag of the source.
    """
    shown = list(models)
    for run in runs:
        other = open_source(run)
        missing = set(source.places) - set(other.places)
        if missing:
            raise InputError(f"{run}: has no predictions for bag {min(missing)!r}; give runs on the same cohort")
        title, name = other.best.title, f"{other.path.resolve().name}+{other.best.name}"
        if any(model.title == title for model in shown):
            title = f"{title} ({other.path.resolve().name})"
        shown.append(replace(other.best, title=title, name=name))
    return tuple(shown)


def _run(path: Path) -> Source:
    scores = RunScores(path)
    own = scores.config.aggregator.name
    titles = encoder_names(scores.config)
    order = sorted(scores.models, key=lambda model: (model.aggregator != own, ENCODERS.index(model.encoder)))

    def scored(model: Model) -> ScoredModel:
        more = "" if model.aggregator == own else model.aggregator
        title = titles.get(model.encoder, model.encoder)
        return ScoredModel(
            f"{model.encoder}+{more}" if more else model.encoder,
            f"{title} + {more}" if more else title,
            partial(scores.bag, model=model),
            read_thresholds(path, scores.config, scores.results, model).instance,
        )

    models = {model: scored(model) for model in order}
    usual = tuple(one for model, one in models.items() if model.aggregator == own)
    everything = tuple(models.values())
    places = _places(scores.cohort, {bag_id: bag_id for bag_id in scores.bags["bag_id"].tolist()})
    places = dict(sorted(places.items(), key=lambda one: one[1].label != 1))
    usual = usual or everything
    return Source(path, everything, usual, models[scores.best], places, "test", tuple(scores.outdated()))


def _predicted(path: Path) -> Source:
    """Scores of `DIR/instances.parquet` and `DIR/predictions.csv`; the bags are where `DIR/prediction.json` says.

    Without that file they are in `DIR/cohort`.
    """
    provenance = path / PROVENANCE
    try:
        described = read_provenance(path) if provenance.is_file() else {}
        bags = pd.read_csv(path / PREDICTIONS, dtype={"bag_id": str}, keep_default_na=False)
        table = pd.read_parquet(path / INSTANCES, columns=["bag_id", "instance", "x", "y", "probability"])
        probabilities = dict(zip(bags["bag_id"], bags["probability"].astype(float), strict=True))
        likely_first = sorted(probabilities, key=lambda bag_id: -probabilities[bag_id])
        places = _predicted_places(path, described, likely_first)
        threshold = thresholds_of(described).instance if described else USUAL_INSTANCE_THRESHOLD
        scored = {
            name: entry["tiles"][bag_id]
            for entry in described.get("cohorts", ())
            for name, bag_id in entry["bags"].items()
            if "tiles" in entry  # predictions of an older version do not say it
        }
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{path}: its predictions cannot be read ({error}); run `its2clr predict` again") from error
    rows = {str(bag_id): places for bag_id, places in table.groupby("bag_id", sort=False).indices.items()}

    def bag(bag_id: str) -> BagScores:
        if bag_id not in rows or bag_id not in places:
            raise InputError(f"{path}: no predictions for bag {bag_id!r}")
        tiles, part = places[bag_id].tiles(), table.iloc[rows[bag_id]].sort_values("instance")
        wanted, place = scored.get(bag_id), places[bag_id]
        found = None if wanted is None else bag_contents(place.cohort.path, [place.bag_id])[place.bag_id].tiles
        if found != wanted or not np.array_equal(part[["x", "y"]].to_numpy(), tiles.coords):
            advice = "restore them, or run `its2clr predict` again"
            raise InputError(f"{path}: predictions of bag {bag_id!r} are not of the tiles in {tiles.path}; {advice}")
        truth = tiles.labels if tiles.has_labels else None
        instances = part["probability"].to_numpy(dtype=np.float64)
        return BagScores(bag_id, probabilities[bag_id], instances, tiles.coords, tiles.tile_size_level0, truth)

    model = ScoredModel(REFINED, described.get("model", {}).get("method", "ItS2CLR"), bag, threshold)
    return Source(path, (model,), (model,), model, places)


def _predicted_places(path: Path, described: dict[str, Any], bag_ids: list[str]) -> dict[str, Place]:
    """Where predicted bags are; a folder of predictions may have been moved together with the cohort in it."""
    own = path / COHORT
    places: dict[str, Place] = {}
    for entry in described.get("cohorts", [{"path": own, "bags": {bag_id: bag_id for bag_id in bag_ids}}]):
        folder = Path(entry["path"])
        cohort = Cohort.open(own if folder.name == own.name and not folder.exists() else folder)
        places |= _places(cohort, entry["bags"])
    return {bag_id: places[bag_id] for bag_id in bag_ids}


def _places(cohort: Cohort, names: Mapping[str, str]) -> dict[str, Place]:
    """The bags of a cohort, by their names in the scores."""
    bags = cohort.bags.set_index("bag_id")
    missing = sorted(set(names.values()) - set(bags.index))
    if missing:
        raise InputError(f"{cohort.path}: bag {missing[0]!r} has predictions but is not in this cohort any more")
    splits = bags["split"].to_dict()
    labels = bags["label"].to_dict() if "label" in bags.columns else {}
    return {name: Place(cohort, bag_id, splits[bag_id], labels.get(bag_id)) for name, bag_id in names.items()}
