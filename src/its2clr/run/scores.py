"""What a run's models say about its bags and instances: computed, written as tables, and read back.

Maps, report and viewer stand on what is read here.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from its2clr.cohort import Cohort
from its2clr.cohort.identity import Identity, bag_contents
from its2clr.cohort.layout import tile_path
from its2clr.cohort.splits import SPLITS
from its2clr.errors import InputError
from its2clr.files import atomic_path, damage_said, read_json, stamp
from its2clr.run.handover import preferred_encoders
from its2clr.run.made_from import feature_maker, outdated, read_made_from
from its2clr.run.names import encoder_file
from its2clr.run.saved import require_run_config
from its2clr.units import Level0Pixels

if TYPE_CHECKING:
    from its2clr.aggregators.trained import TrainedAggregators
    from its2clr.bag_features import BagFeatures

_RESTORE = "restore it, or run `its2clr evaluate` again"


PREDICTIONS_FILE = "predictions.parquet"
BAG_PREDICTIONS_FILE = "bag_predictions.csv"
INSTANCES_AT_ONCE = 2**17
"""Instances whose rows of a table are made together."""
RESULTS_FILE = "results.json"


class Model(NamedTuple):
    """A trained pair: one of the run's encoders (`run.names.ENCODERS`), and an aggregator."""

    encoder: str
    aggregator: str


@dataclass(frozen=True)
class Scores:
    """What S retrained aggregators say about the bags of one split.

    Attributes:
        bags: (S, B) bag probabilities.
        instances: (S, N) instance probabilities.
    """

    bags: NDArray[np.float64]
    instances: NDArray[np.float64]

    @classmethod
    def of(cls, trained: "TrainedAggregators", features: "BagFeatures") -> "Scores":
        """Scores as probabilities in float64, so that confident instances stay ranked.

        Bags go through the aggregators one at a time: the last bits of a score depend on the padding, and a bag's score
        should not depend on the bags beside it.
        """
        from scipy.special import expit

        predictions = trained.predict(features, bags_per_batch=1)
        return cls(predictions.bag_probability, expit(predictions.instance_logit.astype(np.float64)))

    @property
    def bag_probability(self) -> NDArray[np.float64]:
        """(B,) mean over the retrainings."""
        return _mean(self.bags)

    @property
    def instance_probability(self) -> NDArray[np.float64]:
        """(N,) mean over the retrainings."""
        return _mean(self.instances)


def _mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean of the rows, always added in the same order; numpy adds in another order where there is one column."""
    total = np.zeros(values.shape[1])
    for row in values:
        total += row
    return total / len(values)


def write_predictions(
    run: Path, cohort: Cohort, scores: Mapping[Model, Mapping[str, Scores]], made_from: dict[str, Any]
) -> None:
    """Write what every model says about every split: one table of instances, one of bags.

    Args:
        run: Folder of the run.
        cohort: Its cohort.
        scores: What the models say.
        made_from: Identity of cohort and models; the table of instances carries it as an attribute.
    """
    with atomic_path(run / PREDICTIONS_FILE) as temporary:
        write_parquet(temporary, _instance_tables(cohort, scores), {"made_from": made_from})
    bag_tables = []
    for split in SPLITS:
        of_bags = cohort.split(split).bags[["bag_id", "label", "split", "group"]]
        for model, of_split in scores.items():
            bag_tables.append(of_bags.assign(**model._asdict(), probability=of_split[split].bag_probability))
    with atomic_path(run / BAG_PREDICTIONS_FILE) as temporary:
        pd.concat(bag_tables).to_csv(temporary, index=False)


def _instance_tables(cohort: Cohort, scores: Mapping[Model, Mapping[str, Scores]]) -> Iterator[pd.DataFrame]:
    """What every model says about the instances, some bags at a time."""
    for split in SPLITS:
        part = cohort.split(split)
        found = {
            model: (of_split[split].instance_probability, of_split[split].bag_probability)
            for model, of_split in scores.items()
        }
        bag = instance = 0
        for group in part.groups(INSTANCES_AT_ONCE):
            places, rows = _places(group), slice(instance, instance + group.n_instances)
            for model, (probability, bag_probability) in found.items():
                of_bag = bag_probability[bag : bag + len(group)][group.bag_index()]
                yield places.assign(**model._asdict(), probability=probability[rows], bag_probability=of_bag)
            bag, instance = bag + len(group), rows.stop


def write_parquet(path: Path, tables: Iterable[pd.DataFrame], attributes: dict[str, Any] | None = None) -> None:
    """Write tables with the same columns one below the other, each when it comes.

    Args:
        path: The file.
        tables: The tables; at least one.
        attributes: What `DataFrame.attrs` says when the file is read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer = None
    try:
        for table in tables:
            rows = pa.Table.from_pandas(table, preserve_index=False)
            if writer is None:
                told = {**(rows.schema.metadata or {}), b"PANDAS_ATTRS": json.dumps(attributes or {}).encode()}
                writer = pq.ParquetWriter(path, rows.schema.with_metadata(told))
            writer.write_table(rows.replace_schema_metadata(writer.schema.metadata))
    finally:
        if writer is not None:
            writer.close()


def _places(cohort: Cohort) -> pd.DataFrame:
    """One row per instance: where it is, and its ground truth (-1: unknown)."""
    bag, coords = cohort.bag_index(), cohort.coords()
    return pd.DataFrame(
        {
            "split": cohort.bags["split"].to_numpy()[bag],
            "bag_id": cohort.bags["bag_id"].to_numpy()[bag],
            "instance": np.arange(len(bag)) - cohort.offsets()[bag],
            "name": cohort.names(),
            "x": coords[:, 0],
            "y": coords[:, 1],
            "label": cohort.instance_labels() if cohort.has_instance_labels else np.full(len(bag), -1, np.int8),
        }
    )


@dataclass(frozen=True, eq=False)
class BagScores:
    """What one model says about one bag.

    Attributes:
        bag_id: The bag.
        probability: Probability that the bag is positive.
        instances: (N,) probability that each instance is positive.
        coords: (N, 2) x, y of each tile's top-left corner at level 0.
        side: Side of a tile, in pixels of level 0.
        truth: (N,) ground truth: 1, 0, or -1 for unknown; None if there is none.
    """

    bag_id: str
    probability: float
    instances: NDArray[np.float64]
    coords: NDArray[np.int64]
    side: Level0Pixels
    truth: NDArray[np.int8] | None


class _Predicted(NamedTuple):
    bags: dict[str, tuple[float, slice]]
    instances: NDArray[np.float64]


class RunScores:
    """The scores of an evaluated run; read when asked for.

    Args:
        run: Folder of the run.

    Raises:
        InputError: There is no run, or it was not evaluated yet.
    """

    def __init__(self, run: str | Path) -> None:
        self.run = Path(run)
        self.config, self.cohort_path = require_run_config(self.run)
        if not self._predictions.is_file():
            raise InputError(f"{run}: not evaluated yet; run `its2clr evaluate {run}` first")
        self._read: dict[Model, _Predicted] = {}
        self._fresh: dict[str, list[int]] = {}
        self._makers: dict[str, str | None] = {}

    @property
    def _predictions(self) -> Path:
        return self.run / PREDICTIONS_FILE

    @cached_property
    def cohort(self) -> Cohort:
        """The run's cohort."""
        return Cohort.open(self.cohort_path)

    @cached_property
    def results(self) -> dict[str, Any]:
        """The content of results.json."""
        found: dict[str, Any] = read_json(self.run / RESULTS_FILE)
        return found

    @cached_property
    def made_from(self) -> Identity | None:
        """The cohort as it was when the run began; None for a run of an older version."""
        return read_made_from(self.run)

    @cached_property
    def _scored_tiles(self) -> dict[str, str]:
        return {} if self.made_from is None else {bag.bag_id: bag.tiles for bag in self.made_from.bags}

    def outdated(self) -> list[str]:
        """What has changed since the run was evaluated, in sentences; empty if these scores are still its scores."""
        there = (self.run / RESULTS_FILE).is_file()
        return outdated(self.run, self.config, self.results, self.cohort) if there else []

    def check_bag(self, bag_id: str) -> None:
        """Refuse a bag whose tiles are not those that were scored.

        Raises:
            InputError: They are not.
        """
        wanted = self._scored_tiles.get(bag_id)
        place = stamp(tile_path(self.cohort.path, bag_id)) if wanted is not None else []
        if wanted is None or self._fresh.get(bag_id) == place:
            return
        if bag_contents(self.cohort.path, [bag_id])[bag_id].tiles != wanted:
            raise InputError(
                f"{self.run}: the tiles of bag {bag_id!r} have changed since they were scored; restore "
                f"{tile_path(self.cohort.path, bag_id)}, or train a new run"
            )
        self._fresh[bag_id] = place

    def made_of(self, bag_id: str, encoder: str) -> tuple[str, str] | None:
        """What a feature file of a bag must say about encoder and tiles; None if the run does not say."""
        tiles = self._scored_tiles.get(bag_id)
        if encoder not in self._makers:
            there = encoder_file(self.run, encoder).is_file()
            self._makers[encoder] = feature_maker(self.run, self.config, encoder) if there else None
        maker = self._makers[encoder]
        return None if tiles is None or maker is None else (maker, tiles)

    @cached_property
    def bags(self) -> pd.DataFrame:
        """One row per bag and model: `bag_id`, `label`, `split`, `group`, `encoder`, `aggregator`, `probability`."""
        path = self.run / BAG_PREDICTIONS_FILE
        with damage_said(f"{path}: is damaged", _RESTORE):
            table = pd.read_csv(
                path,
                dtype={"bag_id": str, "group": str},
                keep_default_na=False,
                converters={"probability": float},  # exactly what was written, with every version of pandas
            )
            table[["encoder", "aggregator"]] = table[["encoder", "aggregator"]].astype(str)  # KeyError: no such columns
            return table

    @cached_property
    def models(self) -> list[Model]:
        """Every evaluated model; those with the run's own aggregator first."""
        pairs = self.bags[["encoder", "aggregator"]].drop_duplicates()
        return [Model(*pair) for pair in pairs.itertuples(index=False)]

    @property
    def best(self) -> Model:
        """The model a user wants: the encoder that is handed over, with the run's aggregator, or what there is."""
        own = self.config.aggregator.name
        wanted = [Model(encoder, own) for encoder in preferred_encoders(self.run)]
        return next((model for model in wanted if model in self.models), self.models[0])

    def bag(self, bag_id: str, model: Model | None = None) -> BagScores:
        """What a model says about a bag.

        Args:
            bag_id: The bag.
            model: Which; None: the best.

        Raises:
            InputError: There is no such bag or model, or the bag has other tiles than those that were scored.
        """
        model = model or self.best
        predicted = self._predicted(model)
        if bag_id not in predicted.bags:
            raise InputError(f"{self.run}: no predictions for bag {bag_id!r}")
        self.check_bag(bag_id)
        probability, rows = predicted.bags[bag_id]
        tiles = self.cohort.tile_file(bag_id)
        truth = tiles.labels if tiles.has_labels else None
        return BagScores(bag_id, probability, predicted.instances[rows], tiles.coords, tiles.tile_size_level0, truth)

    def _predicted(self, model: Model) -> _Predicted:
        if model not in self._read:
            if model not in self.models:
                raise InputError(f"{self.run}: no model {' + '.join(model)}; there are {_listed(self.models)}")
            chosen = [("encoder", "==", model.encoder), ("aggregator", "==", model.aggregator)]
            columns = ["bag_id", "probability", "bag_probability"]
            with damage_said(f"{self._predictions}: is damaged", _RESTORE):
                table = pd.read_parquet(self._predictions, columns=columns, filters=chosen)
            probability = table["bag_probability"].to_numpy()
            bags = {
                bag_id: (float(probability[rows.start]), rows) for bag_id, rows in rows_of_bags(table["bag_id"]).items()
            }
            self._read[model] = _Predicted(bags, table["probability"].to_numpy(dtype=np.float64))
        return self._read[model]

    @cached_property
    def rounds(self) -> list[int]:
        """Epochs after which pseudo labels were made, in order."""
        return sorted(int(path.parent.name) for path in self.run.glob("rounds/*/pseudo_labels.parquet"))

    def round(self, epoch: int) -> pd.DataFrame:
        """Pseudo labels of a round: `bag_id`, `instance`, `probability`, `pseudo_label` and `selected` (1, -1 or 0).

        Raises:
            InputError: There was no such round.
        """
        if epoch not in self.rounds:
            raise InputError(f"{self.run}: no round after epoch {epoch}; there are {_listed(self.rounds)}")
        path = next(p for p in self.run.glob("rounds/*/pseudo_labels.parquet") if int(p.parent.name) == epoch)
        with damage_said(f"{path}: is damaged", "restore it"):
            return pd.read_parquet(path, columns=["bag_id", "instance", "probability", "pseudo_label", "selected"])


def rows_of_bags(bag_ids: "pd.Series[str]") -> dict[str, slice]:
    """Where the rows of each bag are in a table that holds one bag after the other."""
    codes, names = pd.factorize(bag_ids)  # numbers: millions of texts as Python objects would take seconds and memory
    starts = np.flatnonzero(np.diff(codes, prepend=-1)).tolist()
    ends = [*starts[1:], len(codes)]
    return {str(names[codes[start]]): slice(start, end) for start, end in zip(starts, ends, strict=True)}


def _listed(values: list[Any]) -> str:
    return ", ".join(" + ".join(value) if isinstance(value, tuple) else str(value) for value in values)
