"""The pretraining loop shared by every method."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from its2clr.bags import Context
from its2clr.config import PretrainConfig
from its2clr.encoders.encoder import EmbeddingNetwork
from its2clr.encoders.weights import BestEncoder
from its2clr.engine.guard import PATIENCE, CollapseGuard
from its2clr.engine.training_state import TrainingState
from its2clr.pretrain.method import METHODS, Method
from its2clr.pretrain.validation_checks import Checks, ChecksFound
from its2clr.seeds import derive_seed, torch_generator
from its2clr.training import Batches, TrainingStep, cosine_or_constant, train_epoch, warmed_up, weight_decays


@dataclass
class Progress(ChecksFound):
    """What a pretraining has found so far; saved with the network."""

    epochs_collapsed: int = 0


def pretrain(network: EmbeddingNetwork, context: Context, best: BestEncoder) -> EmbeddingNetwork:
    """Train the encoder on the training tiles; a stopped run continues after its last saved epoch.

    Args:
        network: f and psi; trained in place.
        context: Settings, bags, device and run. Only checks and the method `bag_labels` use bag labels.
        best: Keeps the encoder of every check that was the best so far.

    Returns:
        The start, encoder and projector: of the last epoch, or of the best check.

    Raises:
        InputError: A process would get fewer than two tiles of a batch.
        TrainingError: The loss became not-a-number or the representation collapsed.
    """
    config, engine, run, train = context.config.pretrain, context.engine, context.run, context.train
    batch_size = engine.divisible_batch_size("pretrain", min(config.batch_size, len(train.tiles)))
    steps = max(len(train.tiles) // batch_size, math.ceil(config.least_steps / config.epochs))
    method = prepare(network, config, context.seed)
    step = TrainingStep(
        method.network,
        train.tiles,
        method.loss,
        config,
        batch_size,
        config.epochs * steps,
        engine,
        crops=method.crops,
        records=method.records,
        edit_gradients=method.edit_gradients,
    )
    progress = Progress()
    state = TrainingState(run, "pretrain", method.network, step.optimiser, progress)
    start = state.resume()
    run.forget_after("pretrain_check", start)
    rows = None if method.contrasted is None else method.contrasted(batch_size)
    guard = CollapseGuard("pretrain", rows, max(PATIENCE["pretrain"], config.epochs // 10), progress)
    checks = Checks(method.kept, context, best, progress)
    labels = torch.from_numpy(train.labels[train.bag_of_instance]) if method.labelled else None
    for epoch in range(start, config.epochs):
        if checks.stopped:
            break
        indices = epoch_indices(len(train.tiles), batch_size, context.seed, epoch, steps)
        batches = Batches(indices, None if labels is None else labels[indices])
        if method.begin_epoch is not None:
            method.begin_epoch(epoch)
        rates = warmed_up(cosine_or_constant(config, epoch, config.epochs, steps), epoch, config.warmup_epochs)

        def after_step(number: int, before: int = epoch * steps) -> None:
            if method.update is not None:
                method.update(before + number, config.epochs * steps)

        decays = weight_decays(config, epoch, steps)
        keys = (context.seed, "pretrain", epoch + 1)
        result = train_epoch(step, batches, rates, keys, after_step, method.spread, decays)
        if not method.labelled:
            guard.check(epoch + 1, result.loss, result.spread)
        run.log("pretrain", epoch + 1, config.epochs, vars(result), guard.limits)
        checks.after(epoch + 1)
        state.save(epoch + 1, last=checks.stopped or epoch + 1 == config.epochs)
    return checks.best()


def prepare(network: EmbeddingNetwork, config: PretrainConfig, seed: int) -> Method:
    """The configured method for a network; the weights it adds are drawn from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "pretraining method"))
        return METHODS.find(config.method)(network, config)


def epoch_indices(count: int, batch_size: int, seed: int, epoch: int, steps: int | None = None) -> Tensor:
    """Random batches (steps, batch_size) of one epoch; no batch holds a tile twice.

    The tiles are taken in a random order, and what does not fill a batch is left out. If more `steps` are wanted, it is
    done again in another order.
    """
    generator = torch_generator(torch.device("cpu"), seed, "pretrain order", epoch)
    whole = count // batch_size * batch_size
    steps = steps or count // batch_size
    orders = [torch.randperm(count, generator=generator)[:whole] for _ in range(-(-steps * batch_size // whole))]
    return torch.cat(orders)[: steps * batch_size].view(steps, batch_size)
