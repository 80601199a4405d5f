"""A round of Algorithm 1: the reader is trained on the features of the bags and scores every instance."""

import time
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from its2clr.aggregators.folds import fold_of_bags
from its2clr.aggregators.trained import TrainedAggregators, balanced_log_loss
from its2clr.aggregators.training import aggregator_seeds, train_aggregators
from its2clr.bag_features import BagFeatures
from its2clr.bags import Bags, Context
from its2clr.config import RefineConfig
from its2clr.encoders.encoder import Encoder
from its2clr.encoders.extraction import extract_bags
from its2clr.files import atomic_path, write_json
from its2clr.refine.labels import InstanceLabels, LabelSource
from its2clr.refine.learner import Progress
from its2clr.refine.pseudo_labels import (
    Pools,
    false_discovery_threshold,
    negative_bag_threshold,
    pseudo_labels,
    same_share_threshold,
)
from its2clr.refine.sampling import epoch_pools


class RoundFeatures(NamedTuple):
    """Features of training and validation bags by the current encoder; `started` says when the round began."""

    train: BagFeatures
    validation: BagFeatures
    started: float


@dataclass(frozen=True)
class Reading:
    """What the reader found in one round.

    Attributes:
        validation_auc: Bag-level AUC on the validation bags, mean over the round's aggregators.
        validation_loss: Log loss of their mean probability on the validation bags, both classes weighing the same.
        probabilities: (aggregators, N) instance probabilities of the training instances.
        label_probabilities: (N,) those that make the labels: the mean, or each bag's by the aggregator new to it.
        threshold: Probability above which an instance is pseudo-positive.
        seconds: How long the round took.
        epoch: The epoch before the round; 0 for the first round.
        aggregators: The trained aggregators; in the first process only.
    """

    validation_auc: float
    validation_loss: float
    probabilities: NDArray[np.float32]
    label_probabilities: NDArray[np.float32]
    threshold: float
    seconds: float
    epoch: int
    aggregators: TrainedAggregators | None

    @property
    def labels(self) -> InstanceLabels:
        """Labels of the training instances."""
        return InstanceLabels(self.label_probabilities, self.threshold, self.epoch)


class Reader:
    """The aggregator whose instance scores become pseudo labels; a new one is trained in every round.

    Args:
        context: Settings, bags, device and run.
        start: An encoder whose features the reader sees beside the current ones; None: those alone.
    """

    def __init__(self, context: Context, start: Encoder | None = None) -> None:
        self._context, self._config = context, context.config.refine
        self._aggregator = self._config.reader or context.config.aggregator
        self._seeds = aggregator_seeds(context.seed, self._config.aggregator_seeds)
        self._of_start = None if start is None else self._extract(start.to(context.engine.device))

    def extract(self, encoder: Encoder) -> RoundFeatures:
        """Lines 3 to 6: features of every instance, grouped into bags; with those of the start, where it has them."""
        started = time.perf_counter()
        train, validation = self._extract(encoder)
        if self._of_start is not None:
            train, validation = self._of_start[0].beside(train), self._of_start[1].beside(validation)
        return RoundFeatures(train, validation, started)

    def _extract(self, encoder: Encoder) -> tuple[BagFeatures, BagFeatures]:
        context = self._context
        train, validation = (
            extract_bags(encoder, part, context.engine) for part in (context.train, context.validation)
        )
        return train, validation

    def read(self, features: RoundFeatures, epoch: int) -> Reading:
        """Lines 7 to 9: train the aggregators after an epoch and measure them on the validation bags.

        The first process trains them and sends the results to the others.
        """
        trained: list[TrainedAggregators] = []

        def train_them() -> tuple[float, float, NDArray[np.float32], NDArray[np.float32], float]:
            trained.append(train_aggregators(self._aggregator, features.train, features.validation, self._seeds))
            probabilities = trained[0].predict(features.train).instance_probability.astype(np.float32)
            of_labels = probabilities.mean(axis=0)
            if self._config.out_of_fold:
                fold = fold_of_bags(features.train, self._seeds)[self._context.train.bag_of_instance]
                of_labels = probabilities[fold, np.arange(len(fold))]
            validation = self._context.validation
            found = trained[0].predict(features.validation)
            on_validation = found.instance_probability.mean(axis=0)
            threshold = threshold_by_rule(self._config, validation, on_validation)
            if self._config.threshold_rule == "false_discoveries":
                of_positive = on_validation[_in_positive_bags(validation)]
                threshold = same_share_threshold(
                    threshold, of_positive, of_labels[_in_positive_bags(self._context.train)]
                )
            loss = float(balanced_log_loss(validation.labels, found.bag_probability.mean(axis=0)).sum())
            return float(np.mean(trained[0].validation_auc)), loss, probabilities, of_labels, threshold

        found = self._context.engine.on_writer(train_them)
        return Reading(*found, time.perf_counter() - features.started, epoch, trained[0] if trained else None)


def threshold_by_rule(config: RefineConfig, validation: Bags, probabilities: NDArray[np.floating[Any]]) -> float:
    """Probability above which an instance is pseudo-positive, according to `threshold_rule`.

    Args:
        config: The rule and its numbers.
        validation: Validation bags.
        probabilities: (N,) probabilities of their instances by the reader.
    """
    if config.threshold_rule == "fixed":
        return config.threshold
    positive = _in_positive_bags(validation)
    if config.threshold_rule == "false_discoveries":
        found = false_discovery_threshold(probabilities, positive, config.false_discovery_rate)
        if found is not None:
            return found
    return negative_bag_threshold(probabilities[~positive], config.false_positive_rate)


def _in_positive_bags(bags: Bags) -> NDArray[np.bool_]:
    positive: NDArray[np.bool_] = bags.labels[bags.bag_of_instance] == 1
    return positive


class Gate:
    """Line 11: a round passes if no earlier round was better on the validation bags; the first one always passes.

    Args:
        progress: Keeps the best round so far.
        rule: What is compared: the AUC, as in the paper, the log loss, or nothing: then every round passes.
    """

    def __init__(self, progress: Progress, rule: Literal["auc", "log_loss", "none"] = "auc") -> None:
        self._progress, self._rule = progress, rule

    def passes(self, reading: Reading) -> bool:
        """Whether this round is at least as good as every earlier one; if so, it becomes the best."""
        progress = self._progress
        score = reading.validation_auc if self._rule == "auc" else -reading.validation_loss
        if self._rule != "none" and progress.best_score is not None and score < progress.best_score:
            return False
        progress.best_score, progress.best_validation_auc = score, reading.validation_auc
        progress.best_epoch = reading.epoch
        return True

    @property
    def best_epoch(self) -> int:
        """Epoch of the last round that passed."""
        assert self._progress.best_epoch is not None, "no round has been measured"
        return self._progress.best_epoch


def record_round(
    context: Context, reading: Reading, source: LabelSource, labels: InstanceLabels | None, *, improved: bool
) -> None:
    """Log a round and write what it found: pseudo labels, aggregators and numbers.

    Args:
        context: Settings, bags, device and run.
        reading: What the reader found.
        source: Where labels come from.
        labels: The labels that training uses next.
        improved: Whether the round passed the gate.
    """
    config, run, epoch = context.config.refine, context.run, reading.epoch
    replaced = labels is not None and labels.epoch == epoch
    if run.engine.is_writer:
        folder = run.path / "rounds" / f"{epoch:03d}"
        following = min(epoch + 1, config.epochs)  # after the last round: what the last epoch trained with
        selected = source.pools(epoch_pools(labels, context.train, config, following))
        with atomic_path(folder / "pseudo_labels.parquet") as temporary:
            _table(reading, context.train, source, selected, top_instance=config.top_instance).to_parquet(
                temporary, index=False
            )
        assert reading.aggregators is not None
        reading.aggregators.save(folder / "aggregator.safetensors")
        found = {
            "validation_auc": reading.validation_auc,
            "validation_loss": reading.validation_loss,
            "threshold": reading.threshold,
            "epoch": epoch,
        }
        write_json(folder / "metrics.json", {**found, "improved": improved, "pseudo_labels_replaced": replaced})
    logged = {
        "validation_auc": reading.validation_auc,
        "validation_loss": reading.validation_loss,
        "replaced": replaced,
        "seconds": reading.seconds,
    }
    run.log("round", epoch, config.epochs, logged)


def _table(reading: Reading, train: Bags, source: LabelSource, selected: Pools, *, top_instance: bool) -> pd.DataFrame:
    """One row per training instance: the reader's probability, the pseudo label, and whether the next epoch uses it."""
    bag = train.bag_of_instance
    called = source.labels(reading.labels, None)
    in_positive_bag = train.labels[bag].astype(bool)
    positive = pseudo_labels(called.probabilities, in_positive_bag, bag, called.threshold, top_instance=top_instance)
    table = pd.DataFrame(
        {
            "bag_id": train.bag_ids[bag],
            "instance": np.arange(len(bag)) - train.offsets[bag],
            "probability": reading.labels.probabilities,
            "pseudo_label": positive.astype(np.int8),
            **source.columns(),
        }
    )
    table["selected"] = np.zeros(len(bag), dtype=np.int8)
    table.loc[selected.pseudo_positive, "selected"] = 1
    table.loc[selected.pseudo_negative, "selected"] = -1
    for number, values in enumerate(reading.probabilities):
        table[f"probability_{number}"] = values
    return table
