"""What the viewer shows: an evaluated run, or what `its2clr predict` wrote; both look the same to the rest of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from its2clr.cohort import Cohort
from its2clr.cohort.features.feature_file import feature_path, read_feature_file
from its2clr.cohort.layout import BAGS_FILE, INFO_FILE, tile_path
from its2clr.errors import InputError
from its2clr.files import stamp
from its2clr.maps.source import open_source
from its2clr.predict.prediction_folder import (
    INSTANCES,
    PREDICTIONS,
    PROVENANCE,
    read_predictions,
    read_provenance,
    thresholds_of,
)
from its2clr.run.decisions import Thresholds, read_thresholds
from its2clr.run.names import encoder_names
from its2clr.run.scores import BAG_PREDICTIONS_FILE, PREDICTIONS_FILE, RESULTS_FILE, BagScores, Model, RunScores

UNKNOWN = -1
"""Label of a bag that has none."""


class ShownBag(NamedTuple):
    """A bag of the list.

    Attributes:
        bag_id: Its name.
        group: Its group.
        split: Its split.
        label: 1, 0 or `UNKNOWN`.
        n_instances: How many tiles it has.
        cohort: Where its tiles are.
        stored_id: What it is called there.
    """

    bag_id: str
    group: str
    split: str
    label: int
    n_instances: int
    cohort: Cohort
    stored_id: str


class ShownModel(NamedTuple):
    """A model whose scores are shown.

    Attributes:
        model: Which it is.
        title: What people call it.
        thresholds: From which probability on it calls a bag, and an instance, positive.
    """

    model: Model
    title: str
    thresholds: Thresholds


class Shown(Protocol):
    """What the viewer asks of what it shows.

    Attributes:
        path: The folder.
        bags: Every bag, in the order of its number.
        models: Every model.
        best: The model that is shown first.
        rounds: Epochs after which pseudo labels were made; none among predictions.
        outdated: What has changed since the bags were scored, in sentences.
        tables: Files that what is in memory was read from.
        is_run: Whether its training bags can be corrected.
    """

    path: Path
    bags: Sequence[ShownBag]
    models: Sequence[ShownModel]
    best: Model
    rounds: list[int]
    outdated: list[str]
    tables: list[Path]
    is_run: bool

    def probability(self) -> NDArray[np.float64]:
        """(models, bags) bag probabilities, NaN where a model did not see a bag."""
        ...

    def check_bag(self, bag: ShownBag) -> None:
        """Refuse a bag whose tiles are not those that were scored."""
        ...

    def scores(self, bag: ShownBag, model: Model) -> BagScores:
        """What a model says about a bag."""
        ...

    def about_rounds(self) -> dict[int, dict[str, Any]]:
        """What was measured after each round, by epoch."""
        ...

    def round(self, epoch: int) -> pd.DataFrame:
        """Pseudo labels of a round; see `RunScores.round`."""
        ...

    def features(self, encoder: str, bag: ShownBag) -> NDArray[np.float32]:
        """Features of a bag's instances; an InputError where there are none."""
        ...


def open_shown(folder: str | Path) -> Shown:
    """Open the folder of an evaluated run, or of predictions.

    Raises:
        InputError: It is neither, or cannot be shown.
    """
    path = Path(folder)
    if path.is_file():
        raise InputError(f"{path}: is a file; to look at new slides with a model: `its2clr view {path} SLIDE...`")
    predicted = (path / PROVENANCE).is_file() and not (path / "config.yaml").is_file()
    return PredictionsShown(path) if predicted else RunShown(path)


class RunShown:
    """An evaluated run.

    Args:
        run: Its folder.
    """

    is_run = True

    def __init__(self, run: Path) -> None:
        self.path = run
        self.run = RunScores(run)
        cohort, config = self.run.cohort, self.run.config
        labels = cohort.bags["label"].tolist()
        columns = (cohort.bags[name].tolist() for name in ("bag_id", "group", "split", "n_instances"))
        self.bags: Sequence[ShownBag] = [
            ShownBag(bag_id, group, split, label, count, cohort, bag_id)
            for bag_id, group, split, count, label in zip(*columns, labels, strict=True)
        ]
        names = encoder_names(config)
        self.models: Sequence[ShownModel] = [
            ShownModel(
                model,
                f"{names.get(model.encoder, model.encoder)} + {model.aggregator}",
                read_thresholds(run, config, self.run.results, model),
            )
            for model in self.run.models
        ]
        self.best = self.run.best
        self.rounds = list(self.run.rounds)
        self.outdated = self.run.outdated()
        self.tables = [
            *(run / name for name in (RESULTS_FILE, PREDICTIONS_FILE, BAG_PREDICTIONS_FILE)),
            *run.glob("rounds/*/pseudo_labels.parquet"),
            *run.glob("checkpoints/encoder-*.safetensors"),
            *run.glob("aggregators/*.safetensors"),
            *_cohort_tables([cohort]),
        ]

    def probability(self) -> NDArray[np.float64]:
        """(models, bags) bag probabilities; see `Shown`."""
        found = np.full((len(self.models), len(self.bags)), np.nan)
        row = {shown.model: number for number, shown in enumerate(self.models)}
        place = {bag.bag_id: number for number, bag in enumerate(self.bags)}
        columns = (self.run.bags[name].tolist() for name in ("bag_id", "encoder", "aggregator", "probability"))
        for bag_id, encoder, aggregator, probability in zip(*columns, strict=True):
            if (number := place.get(bag_id)) is not None:
                found[row[Model(encoder, aggregator)], number] = probability
        return found

    def check_bag(self, bag: ShownBag) -> None:
        """Refuse a bag whose tiles have changed."""
        self.run.check_bag(bag.bag_id)

    def scores(self, bag: ShownBag, model: Model) -> BagScores:
        """What a model says about a bag."""
        return self.run.bag(bag.bag_id, model)

    def about_rounds(self) -> dict[int, dict[str, Any]]:
        """What was measured after each round."""
        return {entry["epoch"]: entry for entry in self.run.results.get("rounds", ())}

    def round(self, epoch: int) -> pd.DataFrame:
        """Pseudo labels of a round."""
        return self.run.round(epoch)

    def features(self, encoder: str, bag: ShownBag) -> NDArray[np.float32]:
        """What the run's encoder left in `RUN/features`."""
        path = feature_path(self.path / "features" / encoder, bag.bag_id)
        command = f"`its2clr extract --out {self.path} --encoder {encoder}` writes them"
        if not path.is_file():
            raise InputError(f"no features of {encoder} for this bag; {command}")
        found = read_feature_file(path)
        if self.run.made_of(bag.bag_id, encoder) not in (None, (found.encoder, found.tiles)):
            raise InputError(f"{path}: not the features of these tiles by this encoder; {command}")
        if len(found.features) != bag.n_instances:
            count = len(found.features)
            raise InputError(f"{path}: features of {count} instances, the bag has {bag.n_instances}; {command}")
        return found.features


class PredictionsShown:
    """What `its2clr predict` wrote.

    Args:
        folder: Its folder.
    """

    is_run = False

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._source = open_source(folder)
        self._fresh: dict[str, list[int]] = {}
        described, self._predicted = read_provenance(folder), read_predictions(folder)[1]
        known = described["model"]
        self.best = Model(known["encoder"], known["aggregator"])
        self.models: Sequence[ShownModel] = [
            ShownModel(self.best, f"{known['method']} + {known['aggregator']}", thresholds_of(described))
        ]
        rows: dict[Path, dict[Any, dict[Any, Any]]] = {}
        bags: list[ShownBag] = []
        for bag_id in self._predicted.index.tolist():
            place = self._source.places[bag_id]
            if place.cohort.path not in rows:
                rows[place.cohort.path] = place.cohort.bags.set_index("bag_id")[["group", "n_instances"]].to_dict(
                    "index"
                )
            stored = rows[place.cohort.path][place.bag_id]
            label = UNKNOWN if place.label is None else int(place.label)
            bags.append(
                ShownBag(bag_id, stored["group"], place.split, label, stored["n_instances"], place.cohort, place.bag_id)
            )
        self.bags: Sequence[ShownBag] = bags
        self.rounds: list[int] = []
        self.outdated: list[str] = []
        cohorts = list({place.cohort.path: place.cohort for place in self._source.places.values()}.values())
        self.tables = [*(folder / name for name in (PROVENANCE, PREDICTIONS, INSTANCES)), *_cohort_tables(cohorts)]

    def probability(self) -> NDArray[np.float64]:
        """(1, bags) bag probabilities; see `Shown`."""
        return self._predicted["probability"].to_numpy(dtype=np.float64)[None]

    def check_bag(self, bag: ShownBag) -> None:
        """Refuse a bag whose tiles have changed."""
        now = stamp(tile_path(bag.cohort.path, bag.stored_id))
        if self._fresh.get(bag.bag_id) != now:
            self._source.best.bag(bag.bag_id)
            self._fresh[bag.bag_id] = now

    def scores(self, bag: ShownBag, model: Model) -> BagScores:
        """What the model says about a bag."""
        assert model == self.best
        return self._source.best.bag(bag.bag_id)

    def about_rounds(self) -> dict[int, dict[str, Any]]:
        """Nothing: predictions have no rounds."""
        return {}

    def round(self, epoch: int) -> pd.DataFrame:
        """There is none."""
        raise InputError(f"{self.path}: predictions have no rounds, and none after epoch {epoch}")

    def features(self, encoder: str, bag: ShownBag) -> NDArray[np.float32]:
        """There are none."""
        raise InputError(f"predictions hold no features of {encoder}, so similar tiles of {bag.bag_id} are not known")


def _cohort_tables(cohorts: Sequence[Cohort]) -> list[Path]:
    return [cohort.path / name for cohort in cohorts for name in (BAGS_FILE, INFO_FILE)]
