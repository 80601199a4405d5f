"""The pretraining loop shared by every method."""

import torch
from torch import Tensor

from its2clr.aggregators.config import AggregatorTraining
from its2clr.config import PretrainConfig
from its2clr.encoders.encoder import EmbeddingNetwork
from its2clr.engine.devices import Engine
from its2clr.engine.guard import CollapseGuard, contrasted_rows
from its2clr.pretrain.bag_labels import bag_labels
from its2clr.pretrain.byol import byol
from its2clr.pretrain.dino import dino
from its2clr.pretrain.method import Method, Prepare
from its2clr.pretrain.moco import moco
from its2clr.pretrain.simclr import simclr
from its2clr.pretrain.validation_checks import Checks
from its2clr.refine.rounds import Bags
from its2clr.run.directory import RunDirectory, TrainingState
from its2clr.seeds import derive_seed, torch_generator
from its2clr.training import Batches, TrainingStep, cosine_or_constant, train_epoch, warmed_up

METHODS: dict[str, Prepare] = {
    "simclr": simclr,
    "moco": moco,
    "byol": byol,
    "dino": dino,
    "bag_labels": bag_labels,
}


def pretrain(
    network: EmbeddingNetwork,
    train: Bags,
    validation: Bags,
    config: PretrainConfig,
    aggregator: AggregatorTraining,
    engine: Engine,
    run: RunDirectory,
    seed: int,
) -> EmbeddingNetwork:
    """Train the encoder on the training tiles; goes on from the run's last finished epoch.

    Args:
        network: f and psi; trained in place.
        train: Training bags; their labels are looked at by checks and by the method `bag_labels` only.
        validation: Validation bags, for checks.
        config: Method and settings.
        aggregator: What the encoder is checked with.
        engine: Device and processes.
        run: Where checkpoints and metrics go.
        seed: Seed of batches and views.

    Returns:
        The encoder to go on with and a projector: of the last epoch, or of the best check.

    Raises:
        InputError: Fewer than two tiles of a batch per process.
        TrainingError: The loss became not-a-number or the representation collapsed.
    """
    tiles = train.tiles
    batch_size = engine.divisible_batch_size("pretrain", min(config.batch_size, len(tiles)))
    steps = len(tiles) // batch_size
    method = prepare(network, config, seed)
    step = TrainingStep(
        method.network,
        tiles,
        method.loss,
        config,
        batch_size,
        config.epochs * steps,
        engine,
        crops=method.crops,
        records=method.records,
    )
    state = TrainingState(run, "pretrain", method.network, step.optimiser)
    start = state.resume()
    run.forget_after("pretrain_check", start)
    guard = CollapseGuard("pretrain", contrasted_rows(config, batch_size), max(5, config.epochs // 10), state.notes)
    checks = Checks(method.kept, train, validation, config, aggregator, engine, run, state.notes, seed)
    labels = torch.from_numpy(train.labels[train.bag_of_instance]) if method.labelled else None
    for epoch in range(start, config.epochs):
        if checks.stopped:
            break
        indices = epoch_indices(len(tiles), batch_size, seed, epoch)
        batches = Batches(indices, None if labels is None else labels[indices])
        rates = warmed_up(cosine_or_constant(config, epoch, config.epochs, steps), epoch, config.warmup_epochs)

        def after_step(number: int, before: int = epoch * steps) -> None:
            if method.update is not None:
                method.update(before + number, config.epochs * steps)

        result = train_epoch(step, batches, rates, (seed, "pretrain", epoch + 1), after_step, method.spread)
        if not method.labelled:
            guard.check(epoch + 1, result.loss, result.spread)
        run.log("pretrain", epoch + 1, config.epochs, vars(result))
        checks.after(epoch + 1)
        state.save(epoch + 1, last=checks.stopped or epoch + 1 == config.epochs)
    return checks.best()


def prepare(network: EmbeddingNetwork, config: PretrainConfig, seed: int) -> Method:
    """The configured method around a network; what it adds is drawn from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "pretraining method"))
        return METHODS[config.method](network, config)


def epoch_indices(count: int, batch_size: int, seed: int, epoch: int) -> Tensor:
    """A random order of all tiles cut into full batches, (steps, batch_size); the rest sits this epoch out."""
    order = torch.randperm(count, generator=torch_generator(torch.device("cpu"), seed, "pretrain order", epoch))
    return order[: count // batch_size * batch_size].view(-1, batch_size)
