"""What trains the encoder in Algorithm 1 (line 16), and everything a stopped run needs to continue."""

import copy
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from its2clr.bags import Context
from its2clr.encoders.encoder import EmbeddingNetwork
from its2clr.engine.guard import PATIENCE, CollapseGuard
from its2clr.engine.training_state import TrainingState
from its2clr.files import write_json
from its2clr.refine.finetuning import limit_training
from its2clr.refine.labels import InstanceLabels
from its2clr.refine.objectives import OBJECTIVES
from its2clr.refine.remedies import RETRIES_FILE, Retry, remedied, remedies, said_retry
from its2clr.training import Batches, EpochResult, TrainingStep, cosine_or_constant, train_epoch, warmed_up


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
        epochs_collapsed: How many epochs in a row looked collapsed or stuck.
        retries: Every time it was stuck and what was tried then; the settings in use follow from how many they are.
    """

    probabilities: Tensor | None = None
    threshold: float | None = None
    labels_epoch: int = -1
    best_epoch: int | None = None
    best_validation_auc: float | None = None
    best_score: float | None = None
    epochs_collapsed: int = 0
    retries: list[Retry] = field(default_factory=list)

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

    When training is stuck, it goes back to its last good state and continues from there with a remedy. A good state is
    that of a round that passed the gate, and in which training did not look stuck.

    Args:
        network: f and psi of the start; trained in place.
        context: Settings, bags, device and run.

    Attributes:
        epochs_done: Finished epochs; fewer after it went back.
        progress: What was found so far.
        steps: Steps per epoch.
        batch_size: Instances per step, over all processes.
    """

    def __init__(self, network: EmbeddingNetwork, context: Context) -> None:
        self._network, self._context, config = network, context, context.config.refine
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
        rows = 2 * self.batch_size
        guard = CollapseGuard("refine", rows, PATIENCE["refine"], self.progress)
        self._guard = guard if prepared.contrastive else None
        self._state = TrainingState(context.run, "refine", prepared.network, self._step.optimiser, self.progress)
        self._before_round = self.progress
        self._continue_after(self._state.resume())

    def epochs(self) -> Iterator[int]:
        """0 to T, from the last saved epoch on; goes back when training does."""
        last = self._context.config.refine.epochs
        while self.epochs_done < last:
            yield self.epochs_done
        yield last

    def train(self, batches: Batches, epoch: int, labels: InstanceLabels | None) -> None:
        """Train one epoch (1 to T) on these batches, and save the network and the labels the batches were drawn with.

        If training is stuck, the last good state is restored instead, and the next epochs use a remedy.

        Raises:
            TrainingError: The loss became not-a-number, or training is stuck and every remedy was tried.
        """
        run, config = self._context.run, remedied(self._context.config.refine, len(self.progress.retries))
        passed = self.progress.best_epoch == epoch - 1
        if self._guard is not None and passed and self.progress.epochs_collapsed == 0:
            self._state.mark_good(epoch - 1, self._before_round)
        if labels is not None:
            self.progress.use(labels)
        rates = cosine_or_constant(config, epoch - 1, config.epochs, self.steps, config.constant_epochs)
        if self.progress.retries:
            rates = warmed_up(rates, epoch - 1 - self.progress.retries[-1]["back_to"], 1)
        result = train_epoch(self._step, batches, rates, (self._context.seed, "refine", epoch))
        if self._guard is not None and self._guard.sees(result.loss, result.spread):
            self._go_back(epoch, result, self._guard)
            return
        run.log("refine", epoch, config.epochs, vars(result), self._guard.limits if self._guard is not None else None)
        self._state.save(epoch, last=epoch == config.epochs)
        self.epochs_done, self._before_round = epoch, copy.deepcopy(self.progress)

    def _go_back(self, epoch: int, result: EpochResult, guard: CollapseGuard) -> None:
        """Restore the last good state and note what is tried next; it is saved at once, so a stopped run knows it too.

        Raises:
            TrainingError: Nothing is left to try.
        """
        tried, known = self.progress.retries, remedies(self._context.config.refine)
        if len(tried) == len(known) or not self._state.can_go_back:
            said = f"Tried before: {'; '.join(retry['remedy'] for retry in tried)}." if tried else ""
            raise guard.error(epoch, result.loss, result.spread, said)
        back_to = self._state.go_back()
        retry: Retry = {
            "seen": epoch,
            "loss": result.loss,
            "collapsed_loss": guard.limits["collapsed_loss"],
            "spread": result.spread,
            "back_to": back_to,
            "remedy": known[len(tried)].words,
        }
        self.progress.retries = [*tried, retry]
        self._state.save(back_to, last=True)
        self._context.engine.say(f"refine: {said_retry(retry)}")
        self._continue_after(back_to)

    def _continue_after(self, epoch: int) -> None:
        """Be in the state that was just restored: its settings in use, and nothing on disk of later epochs."""
        self.epochs_done, self._before_round = epoch, copy.deepcopy(self.progress)
        context, retries = self._context, self.progress.retries
        if retries:
            config = remedied(context.config.refine, len(retries))
            prepared = OBJECTIVES.find(config.objective)(self._network, config, context.seed)
            self._step.change(prepared.loss, config.momentum)
        context.run.forget_after("round", epoch - 1)
        if context.engine.is_writer:
            for folder in (context.run.path / "rounds").glob("[0-9]*"):
                if int(folder.name) > epoch:
                    shutil.rmtree(folder)
            if retries:
                write_json(context.run.path / RETRIES_FILE, retries)
