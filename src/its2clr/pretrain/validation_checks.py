"""How good an encoder is while it is pretrained: validation bag AUC of a quick aggregator, and when to stop by it."""

import math
from typing import Any

import numpy as np

from its2clr.aggregators.config import AggregatorTraining
from its2clr.aggregators.training import train_aggregators
from its2clr.config import PretrainConfig
from its2clr.encoders.encoder import EmbeddingNetwork
from its2clr.encoders.weights import load_network, save_network
from its2clr.engine.devices import Engine
from its2clr.refine.rounds import Bags, aggregator_seeds
from its2clr.run.directory import RunDirectory

CANDIDATE = "pretrain-candidate-{epoch:04d}"
"""Checkpoint of an encoder that was the best when it was checked; the state that names the best is saved after it."""


class Checks:
    """Checks an encoder every few epochs, keeps the best, and says when to stop (paper, appendix A.2).

    Args:
        network: The encoder that the pretraining would leave.
        train: Training bags.
        validation: Validation bags.
        config: How often, how long, how patient.
        aggregator: The run's aggregator, which the quick one is but for its epochs.
        engine: Device and processes.
        run: Where candidates and metrics go.
        notes: Kept with the training's state, so that a run that goes on knows what was found.
        seed: Seed of the aggregator; the same in every check.
    """

    def __init__(
        self,
        network: EmbeddingNetwork,
        train: Bags,
        validation: Bags,
        config: PretrainConfig,
        aggregator: AggregatorTraining,
        engine: Engine,
        run: RunDirectory,
        notes: dict[str, Any],
        seed: int,
    ) -> None:
        self._network, self._train, self._validation = network, train, validation
        self._config, self._engine, self._run, self._notes = config, engine, run, notes
        self._aggregator = aggregator.model_copy(update={"epochs": config.check_epochs})
        self._seeds = aggregator_seeds(seed, 1)

    @property
    def stopped(self) -> bool:
        """Whether patience has run out."""
        patience = self._config.patience
        return patience is not None and self._notes.get("checks_without_improvement", 0) >= patience

    def after(self, epoch: int) -> None:
        """Check after an epoch, if it is time; a better encoder becomes the candidate."""
        config = self._config
        if config.check_every == 0 or (epoch % config.check_every and epoch != config.epochs):
            return
        auc = self._measure()
        improved = auc > self._notes.get("best_validation_auc", -math.inf)
        if improved:
            self._notes |= {"best_validation_auc": auc, "best_epoch": epoch, "checks_without_improvement": 0}
            if self._engine.is_writer:
                path = self._run.checkpoint(CANDIDATE.format(epoch=epoch))
                save_network(path, self._network, self._run.config, dict(self._notes))
        else:
            self._notes["checks_without_improvement"] += 1
        self._run.log("pretrain_check", epoch, config.epochs, {"validation_auc": auc, "improved": improved})
        if self.stopped and epoch < config.epochs:
            self._engine.say(
                f"pretrain: no better validation bag AUC than {self._notes['best_validation_auc']:.3f} (epoch "
                f"{self._notes['best_epoch']}) in {config.patience} checks; stopped after epoch {epoch}"
            )

    def best(self) -> EmbeddingNetwork:
        """The encoder to keep: the best one checked, or without checks the last."""
        if "best_epoch" not in self._notes:
            return self._network
        self._engine.barrier()
        return load_network(self._run.checkpoint(CANDIDATE.format(epoch=self._notes["best_epoch"])))

    def _measure(self) -> float:
        train = self._train.features(self._network.encoder, self._engine)
        validation = self._validation.features(self._network.encoder, self._engine)

        def train_them() -> float:
            found = train_aggregators(self._aggregator, train, validation, self._seeds)
            return float(np.mean(found.validation_auc))

        return self._engine.on_writer(train_them)


def remove_candidates(run: RunDirectory) -> None:
    """Remove what only a pretraining that is still going needs."""
    for path in run.path.glob("checkpoints/pretrain-candidate-*.safetensors") if run.engine.is_writer else ():
        path.unlink()
