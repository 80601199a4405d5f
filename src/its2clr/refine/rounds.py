"""One round of Algorithm 1: features, aggregator, validation AUC, instance probabilities (lines 3 to 9)."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from its2clr.aggregators.config import AggregatorTraining
from its2clr.aggregators.data import BagFeatures
from its2clr.aggregators.trained import TrainedAggregators
from its2clr.aggregators.training import train_aggregators
from its2clr.cohort import Cohort
from its2clr.config import RefineConfig
from its2clr.encoders.encoder import Encoder
from its2clr.encoders.extraction import extract_features
from its2clr.engine.devices import Engine
from its2clr.evaluation.health import contrast_auc
from its2clr.files import atomic_path, write_json
from its2clr.refine.pseudo_labels import Pools, negative_bag_threshold, pseudo_labels, trust
from its2clr.seeds import derive_seed
from its2clr.tile_store import TileStore


@dataclass(frozen=True)
class Bags:
    """One split as training may see it: tiles and bag labels, no instance labels, no test bags.

    Attributes:
        cohort: The bags of the split.
        engine: Device the tiles are for.
    """

    cohort: Cohort
    engine: Engine

    @cached_property
    def tiles(self) -> TileStore:
        """Tiles, bag after bag; decoded when first asked for."""
        return TileStore.from_cohort(self.cohort.without_labels(), self.engine)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """(bags + 1,) where each bag starts."""
        return self.cohort.offsets()

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """(bags,) bag labels."""
        return self.cohort.bags["label"].to_numpy(dtype=np.int64, copy=True)

    @cached_property
    def bag_ids(self) -> NDArray[np.str_]:
        """(bags,) names."""
        return self.cohort.bags["bag_id"].to_numpy(dtype=str)

    @property
    def bag_of_instance(self) -> NDArray[np.int64]:
        """(N,) position of each instance's bag."""
        return np.repeat(np.arange(len(self.labels), dtype=np.int64), np.diff(self.offsets))

    def features(self, encoder: Encoder, engine: Engine) -> BagFeatures:
        """Lines 3 to 6: represent every instance and group the representations into bags."""
        flat = extract_features(encoder, self.tiles, engine, engine.extract_batch_size)
        return BagFeatures(flat, torch.from_numpy(self.offsets), torch.from_numpy(self.labels))


@dataclass(frozen=True)
class Round:
    """What one round found.

    Attributes:
        validation_auc: Bag-level AUC on the validation bags, mean over the round's aggregators.
        selection_auc: The AUC that decides whether the round is better than those before.
        probabilities: (aggregators, N) instance probabilities of the training instances.
        threshold: Probability above which an instance is pseudo-positive.
        seconds: How long it took.
        aggregators: The trained aggregators; only in the first process.
    """

    validation_auc: float
    selection_auc: float
    probabilities: NDArray[np.float32]
    threshold: float
    seconds: float
    aggregators: TrainedAggregators | None


def threshold_by_rule(config: RefineConfig, validation: Bags, probabilities: NDArray[np.floating[Any]]) -> float:
    """Probability above which an instance is pseudo-positive, as `threshold_rule` has it.

    Args:
        config: The rule, and its numbers.
        validation: Validation bags.
        probabilities: (N,) of their instances, by the aggregator whose scores are to be cut.
    """
    if config.threshold_rule == "fixed":
        return config.threshold
    negative = validation.labels[validation.bag_of_instance] == 0
    return negative_bag_threshold(probabilities[negative], config.false_positive_rate)


def run_round(
    encoder: Encoder,
    train: Bags,
    validation: Bags,
    aggregator: AggregatorTraining,
    config: RefineConfig,
    seeds: Sequence[int],
    engine: Engine,
) -> Round:
    """Lines 3 to 9: extract, train the aggregator, measure it on the validation bags.

    The aggregators are trained by the first process, the others receive what it found.

    Args:
        encoder: f.
        train: Training bags.
        validation: Validation bags.
        aggregator: Whose scores become pseudo labels, and how it is trained.
        config: How the threshold is set, and rounds are compared.
        seeds: One aggregator is trained for each.
        engine: Device and processes.
    """
    started = time.perf_counter()
    train_features = train.features(encoder, engine)
    validation_features = validation.features(encoder, engine)
    trained: list[TrainedAggregators] = []

    def train_them() -> tuple[float, float, NDArray[np.float32], float]:
        trained.append(train_aggregators(aggregator, train_features, validation_features, seeds))
        probabilities = trained[0].predict(train_features).instance_probability.astype(np.float32)
        on_validation = trained[0].predict(validation_features).instance_probability
        threshold = threshold_by_rule(config, validation, on_validation.mean(axis=0))
        auc = selection = float(np.mean(trained[0].validation_auc))
        if config.selection == "contrast_auc":
            contrasts = [contrast_auc(one, validation.labels, validation.offsets) for one in on_validation]
            selection = float(np.mean(contrasts))
        return auc, selection, probabilities, threshold

    validation_auc, selection_auc, probabilities, threshold = engine.on_writer(train_them)
    seconds = time.perf_counter() - started
    return Round(validation_auc, selection_auc, probabilities, threshold, seconds, trained[0] if trained else None)


def aggregator_seeds(seed: int, count: int) -> list[int]:
    """Seeds of the aggregators; the same in every round, so that rounds differ by their features alone."""
    return [derive_seed(seed, "aggregator", number) % 2**31 for number in range(count)]


def save_round(
    folder: Path,
    round_: Round,
    train: Bags,
    selected: Pools,
    notes: dict[str, Any],
    trusted: NDArray[np.int8] | None = None,
) -> None:
    """Write a round's pseudo labels, aggregators and numbers.

    Args:
        folder: Folder of the round.
        round_: What it found.
        train: The training bags.
        selected: What the epoch after the round trains with (after the last round: what the last epoch did).
        notes: More numbers.
        trusted: What a person said of the instances: 1, 0, or -1 for nothing.
    """
    bag = train.bag_of_instance
    mean = round_.probabilities.mean(axis=0)
    in_positive_bag = train.labels[bag].astype(bool)
    table = pd.DataFrame(
        {
            "bag_id": train.bag_ids[bag],
            "instance": np.arange(len(bag)) - train.offsets[bag],
            "probability": mean,
            "pseudo_label": pseudo_labels(trust(mean, trusted), in_positive_bag, bag, round_.threshold).astype(np.int8),
        }
    )
    if trusted is not None:
        table["trusted"] = trusted
    table["selected"] = np.zeros(len(bag), dtype=np.int8)
    table.loc[selected.pseudo_positive, "selected"] = 1
    table.loc[selected.pseudo_negative, "selected"] = -1
    for number, values in enumerate(round_.probabilities):
        table[f"probability_{number}"] = values
    with atomic_path(folder / "pseudo_labels.parquet") as temporary:
        table.to_parquet(temporary, index=False)
    assert round_.aggregators is not None
    round_.aggregators.save(folder / "aggregator.safetensors")
    found = {key: getattr(round_, key) for key in ("validation_auc", "selection_auc", "threshold")}
    write_json(folder / "metrics.json", {**found, **notes})
