"""Checks during pretraining: the validation bag AUC of a quick aggregator decides what is kept and when to stop."""

from dataclasses import dataclass

import numpy as np

from its2clr.aggregators.training import aggregator_seeds, train_aggregators
from its2clr.bags import Context
from its2clr.encoders.encoder import EmbeddingNetwork
from its2clr.encoders.extraction import extract_bags
from its2clr.encoders.weights import BestEncoder, load_network


@dataclass
class ChecksFound:
    """What checks have found so far.

    Attributes:
        best_validation_auc: Highest validation AUC.
        best_epoch: The epoch after which it was measured.
        checks_without_improvement: Number of checks since then.
    """

    best_validation_auc: float | None = None
    best_epoch: int | None = None
    checks_without_improvement: int = 0


class Checks:
    """Checks an encoder every few epochs, keeps the best, and says when to stop (paper, appendix A.2).

    Args:
        network: The encoder that pretraining would keep.
        context: Settings, bags, device and run.
        best: Keeps the best encoder.
        found: What was found so far; saved with the training's state.
    """

    def __init__(self, network: EmbeddingNetwork, context: Context, best: BestEncoder, found: ChecksFound) -> None:
        self._network, self._context, self._best, self._found = network, context, best, found
        self._config = context.config.pretrain
        self._aggregator = context.config.aggregator.model_copy(update={"epochs": self._config.check_epochs})

    @property
    def stopped(self) -> bool:
        """Whether patience has run out."""
        patience = self._config.patience
        return patience is not None and self._found.checks_without_improvement >= patience

    def after(self, epoch: int) -> None:
        """Check the encoder after an epoch, if a check is due; a better encoder becomes the best."""
        config, found = self._config, self._found
        if config.check_every == 0 or (epoch % config.check_every and epoch != config.epochs):
            return
        auc = self._measure()
        improved = found.best_validation_auc is None or auc > found.best_validation_auc
        if improved:
            found.best_validation_auc, found.best_epoch, found.checks_without_improvement = auc, epoch, 0
            self._best.keep(epoch, self._network)
        else:
            found.checks_without_improvement += 1
        self._context.run.log("pretrain_check", epoch, config.epochs, {"validation_auc": auc, "improved": improved})
        if self.stopped and epoch < config.epochs:
            self._context.engine.say(
                f"pretrain: stopped after epoch {epoch}: {config.patience} checks without a validation bag AUC above "
                f"{found.best_validation_auc:.3f} (epoch {found.best_epoch})"
            )

    def best(self) -> EmbeddingNetwork:
        """The encoder to keep: that of the best check, or without checks the last."""
        if self._found.best_epoch is None:
            return self._network
        self._context.engine.barrier()
        return load_network(self._best.path(self._found.best_epoch))

    def _measure(self) -> float:
        context = self._context
        train, validation = (
            extract_bags(self._network.encoder, bags, context.engine) for bags in (context.train, context.validation)
        )

        def train_them() -> float:
            found = train_aggregators(self._aggregator, train, validation, aggregator_seeds(context.seed, 1))
            return float(np.mean(found.validation_auc))

        return context.engine.on_writer(train_them)
