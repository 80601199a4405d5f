"""The pretraining loop shared by every self-supervised method."""

import torch
from torch import Tensor

from its2clr.config import PretrainConfig
from its2clr.encoders.encoder import EmbeddingNetwork
from its2clr.engine.devices import Engine
from its2clr.engine.guard import CollapseGuard
from its2clr.engine.rundir import RunDirectory, TrainingState
from its2clr.engine.seeds import torch_generator
from its2clr.engine.tiles import TileStore
from its2clr.pretrain.simclr import simclr_objective
from its2clr.training import Batches, TrainingStep, cosine_or_constant, train_epoch


def pretrain(
    network: EmbeddingNetwork,
    tiles: TileStore,
    config: PretrainConfig,
    engine: Engine,
    run: RunDirectory,
    seed: int,
) -> None:
    """Train the network on unlabelled tiles; goes on from the run's last finished epoch.

    Args:
        network: f and psi; trained in place.
        tiles: Training tiles.
        config: Method and settings.
        engine: Device and processes.
        run: Where checkpoints and metrics go.
        seed: Seed of batches and views.

    Raises:
        InputError: Fewer than two tiles of a batch per process.
        TrainingError: The loss became not-a-number or the representation collapsed.
    """
    batch_size = engine.divisible_batch_size("pretrain", min(config.batch_size, len(tiles)))
    steps = config.epochs * (len(tiles) // batch_size)
    step = TrainingStep(network, tiles, simclr_objective(config.temperature), config, batch_size, steps, engine)
    state = TrainingState(run, "pretrain", network, step.optimiser)
    start = state.resume()
    guard = CollapseGuard("pretrain", 2 * batch_size, max(5, config.epochs // 10), state.notes)
    for epoch in range(start, config.epochs):
        indices = epoch_indices(len(tiles), batch_size, seed, epoch)
        rates = cosine_or_constant(config, epoch, config.epochs, len(indices))
        result = train_epoch(step, Batches(indices), rates, (seed, "pretrain", epoch + 1))
        guard.check(epoch + 1, result.loss, result.spread)
        run.log("pretrain", epoch + 1, config.epochs, vars(result))
        state.save(epoch + 1, last=epoch + 1 == config.epochs)


def epoch_indices(count: int, batch_size: int, seed: int, epoch: int) -> Tensor:
    """A random order of all tiles cut into full batches, (steps, batch_size); the rest sits this epoch out."""
    order = torch.randperm(count, generator=torch_generator(torch.device("cpu"), seed, "pretrain order", epoch))
    return order[: count // batch_size * batch_size].view(-1, batch_size)
