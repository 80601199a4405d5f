"""Where scores come from: the folder of an evaluated run, or of predictions for new bags; both look the same here."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pandas as pd

from its2clr.cohort import Cohort
from its2clr.cohort.tiles import TileFile
from its2clr.errors import InputError
from its2clr.evaluation.frozen import refinement_name
from its2clr.results.scores import BagScores, Model, RunScores

INSTANCES_FILE = "instances.parquet"
PREDICTIONS_FILE = "predictions.csv"
ENCODERS = ("simclr", "its2clr", "end_to_end")


@dataclass(frozen=True, eq=False)
class ScoredModel:
    """A model and what it says.

    Attributes:
        name: As on the command line and in files: its encoder, and its aggregator if that is not the run's own.
        title: In plain words.
        bag: Gives the scores of a bag.
    """

    name: str
    title: str
    bag: Callable[[str], BagScores]

    @property
    def folder(self) -> str:
        """The name as a folder."""
        return quote(self.name, safe="+ ")


@dataclass(frozen=True, eq=False)
class Source:
    """Scored bags.

    Attributes:
        path: The folder.
        cohort: Where the bags are.
        models: All models, in the order in which they are shown.
        usual: Those that are shown if none is named.
        best: The model whose regions are wanted.
        bag_ids: All bags with scores.
    """

    path: Path
    cohort: Cohort
    models: tuple[ScoredModel, ...]
    usual: tuple[ScoredModel, ...]
    best: ScoredModel
    bag_ids: tuple[str, ...]

    @property
    def best_first(self) -> tuple[ScoredModel, ...]:
        """The usual models, the best one at their head."""
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
        """The bags to show: those named; or the positive ones of a split and then the others, in their order.

        Args:
            bag_ids: Bags by name; None: all of the split.
            split: Which; None: all.
            limit: How many at most, 0 for all; what is named is not limited.

        Raises:
            InputError: If there is no such bag or split.
        """
        if bag_ids:
            for bag_id in bag_ids:
                if bag_id not in self.bag_ids:
                    raise InputError(f"{self.path}: no predictions for bag {bag_id!r}")
            return list(dict.fromkeys(bag_ids))
        bags = (self.cohort if split is None else self.cohort.split(split)).bags
        bags = bags[bags["bag_id"].isin(self.bag_ids)]
        if "label" in bags.columns:
            bags = bags.sort_values("label", ascending=False, kind="stable")
        found: list[str] = bags["bag_id"].tolist()
        return found[:limit] if limit else found


def bag_file(folder: Path, bag_id: str, suffix: str) -> Path:
    """The file of a bag in a folder, whatever the bag is called."""
    return folder / f"{quote(bag_id, safe='')}{suffix}"


def mpp_level0(tiles: TileFile) -> float:
    """Microns per pixel of level 0 of a tile file; NaN if unknown."""
    mpp = float(tiles.attributes.get("mpp_level0", tiles.mpp * tiles.tile_size / tiles.tile_size_level0))
    return mpp if mpp > 0 else math.nan


def open_source(folder: str | Path) -> Source:
    """Open the folder of an evaluated run, or what `its2clr predict` wrote.

    Raises:
        InputError: If it is neither, or what is in it does not fit together.
    """
    path = Path(folder)
    return _predicted(path) if (path / INSTANCES_FILE).is_file() else _run(path)


def default_split(source: Source) -> str | None:
    """Test bags of a run; all bags that were predicted."""
    return None if (source.path / INSTANCES_FILE).is_file() else "test"


def _run(path: Path) -> Source:
    scores = RunScores(path)
    own = scores.config.aggregator.name
    titles = {"simclr": "SimCLR", "its2clr": refinement_name(scores.config.refine), "end_to_end": "End to end"}
    order = sorted(
        scores.models,
        key=lambda model: (model.aggregator != own, ENCODERS.index(model.encoder) if model.encoder in ENCODERS else 9),
    )

    def scored(model: Model) -> ScoredModel:
        more = "" if model.aggregator == own else model.aggregator
        title = titles.get(model.encoder, model.encoder)
        return ScoredModel(
            f"{model.encoder}+{more}" if more else model.encoder,
            f"{title} + {more}" if more else title,
            partial(scores.bag, model=model),
        )

    models = {model: scored(model) for model in order}
    usual = tuple(one for model, one in models.items() if model.aggregator == own)
    everything = tuple(models.values())
    bag_ids = tuple(dict.fromkeys(scores.bags["bag_id"].tolist()))
    return Source(path, scores.cohort, everything, usual or everything, models[scores.best], bag_ids)


def _predicted(path: Path) -> Source:
    """Scores of `DIR/instances.parquet` and `DIR/predictions.csv`, of the bags of `DIR/cohort`."""
    cohort = Cohort.open(path / "cohort")
    try:
        bags = pd.read_csv(path / PREDICTIONS_FILE, dtype={"bag_id": str}, keep_default_na=False)
        table = pd.read_parquet(path / INSTANCES_FILE, columns=["bag_id", "instance", "x", "y", "probability"])
        probabilities = dict(zip(bags["bag_id"], bags["probability"].astype(float), strict=True))
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path}: its predictions cannot be read ({error}); run `its2clr predict` again") from error
    rows = {str(bag_id): part.sort_values("instance") for bag_id, part in table.groupby("bag_id", sort=False)}

    def bag(bag_id: str) -> BagScores:
        if bag_id not in rows or bag_id not in probabilities:
            raise InputError(f"{path}: no predictions for bag {bag_id!r}")
        tiles, part = cohort.tile_file(bag_id), rows[bag_id]
        if not np.array_equal(part[["x", "y"]].to_numpy(), tiles.coords):
            raise InputError(f"{path}: predictions of bag {bag_id!r} are not of the tiles in {tiles.path}")
        truth = tiles.labels if tiles.has_labels else None
        instances = part["probability"].to_numpy(dtype=np.float64)
        return BagScores(bag_id, probabilities[bag_id], instances, tiles.coords, tiles.tile_size_level0, truth)

    model = ScoredModel("its2clr", "ItS2CLR", bag)
    return Source(path, cohort, (model,), (model,), model, tuple(probabilities))
