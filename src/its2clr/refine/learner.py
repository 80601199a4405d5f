"""What trains the encoder in Algorithm 1 (line 16), and everything a stopped run needs to continue."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from its2clr.bags import Context
from its2clr.encoders.encoder import EmbeddingNetwork
from its2clr.engine.guard import LEAST_PATIENCE, CollapseGuard
from its2clr.engine.training_state import TrainingState
from its2clr.refine.finetuning import limit_training
from its2clr.refine.labels import InstanceLabels
from its2clr.refine.objectives import OBJECTIVES
from its2clr.training import Batches, TrainingStep, cosine_or_constant, train_epoch


@dataclass
class Progress:
    """What a refinement has found so far; saved with the network.

    Attributes:
        probabilities: (N,) probabilities of the labels in use.
        threshold: Threshold of the labels in use.
        labels_epoch: Epoch after which the labels in use were made.
        best_epoch: Epoch whose encoder is the best so far.
        best_validation_auc: Validation AUC of that encoder.
        best_score: What the gate compares: the highest AUC, or minus the lowest log loss.
        epochs_collapsed: How many epochs in a row looked collapsed.
    """

    probabilities: Tensor | None = None
    threshold: float | None = None
    labels_epoch: int = -1
    best_epoch: int | None = None
    best_validation_auc: float | None = None
    best_score: float | None = None
    epochs_collapsed: int = 0

    @property
    def labels(self) -> InstanceLabels | None:
        """The labels in use; None before the first round."""
        if self.probabilities is None or self.threshold is None:
            return None
        return InstanceLabels(self.probabilities.numpy(), self.threshold, self.labels_epoch)

    def use(self, labels: InstanceLabels) -> None:
        """Use these labels from now on."""
        self.probabilities, self.threshold = torch.from_numpy(labels.probabilities), labels.threshold
        self.labels_epoch = labels.epoch


class Learner:
    """The network with its objective and optimiser, trained one epoch at a time; continues after the last saved epoch.

    Args:
        network: f and psi of the start; trained in place.
        context: Settings, bags, device and run.

    Attributes:
        epochs_done: Epochs that were finished and saved before a stop.
        progress: What was found so far.
        steps: Steps per epoch.
        batch_size: Instances per step, over all processes.
    """

    def __init__(self, network: EmbeddingNetwork, context: Context) -> None:
        self._context, config = context, context.config.refine
        limit_training(network.encoder, config, context.seed)
        prepared = OBJECTIVES.find(config.objective)(network, config, context.seed)
        self.batch_size = context.engine.divisible_batch_size("refine", config.batch_size)
        self.steps = config.steps_per_epoch or max(
            config.least_steps, math.ceil(len(context.train.tiles) / self.batch_size)
        )
        self._step = TrainingStep(
            prepared.network,
            context.train.tiles,
            prepared.loss,
            config,
            self.batch_size,
            config.epochs * self.steps,
            context.engine,
        )
        self.progress = Progress()
        self._state = TrainingState(context.run, "refine", prepared.network, self._step.optimiser, self.progress)
        self.epochs_done = self._state.resume()
        context.run.forget_after("round", self.epochs_done - 1)
        patience = max(LEAST_PATIENCE, config.epochs // 10)
        rows = 2 * self.batch_size
        self._guard = CollapseGuard("refine", rows, patience, self.progress) if prepared.contrastive else None

    def train(self, batches: Batches, epoch: int, labels: InstanceLabels | None) -> None:
        """Train one epoch (1 to T) on these batches, and save the network and the labels the batches were drawn with.

        Raises:
            TrainingError: The loss became not-a-number or the representation collapsed.
        """
        run, config = self._context.run, self._context.config.refine
        if labels is not None:
            self.progress.use(labels)
        rates = cosine_or_constant(config, epoch - 1, config.epochs, self.steps)
        result = train_epoch(self._step, batches, rates, (self._context.seed, "refine", epoch))
        if self._guard is not None:
            self._guard.check(epoch, result.loss, result.spread)
        run.log("refine", epoch, config.epochs, vars(result), self._guard.limits if self._guard is not None else None)
        self._state.save(epoch, last=epoch == config.epochs)
